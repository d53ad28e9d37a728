"""The manifest as readable TOML, with a comment over every key that has something to say.

The comments are the docstrings of the schema (`protocol.manifest.manifest`), so that there is one place to correct
them.
"""

from __future__ import annotations

import json
import textwrap
from typing import Final

from protocol.manifest.manifest import Manifest
from protocol.manifest.section import Section

_COMMENT_WIDTH: Final = 100

Scalar = bool | int | float | str
TomlValue = Scalar | tuple["TomlValue", ...]


def toml_of(manifest: Manifest) -> str:
    """The TOML of every key of the manifest, defaults included (those of keys that were added later as comments);
    reading it back gives the same manifest."""
    head = toml_comment(
        "A Skipstone run. Everything that must be equal on all peers is here: another value makes another run."
    )
    return "\n\n".join([head, *_table(manifest, "")]) + "\n"


def toml_comment(text: str) -> str:
    """`text` as TOML comment lines."""
    return "\n".join(textwrap.wrap(" ".join(text.split()), _COMMENT_WIDTH, initial_indent="# ", subsequent_indent="# "))


def toml_value(value: TomlValue) -> str:
    """A value in TOML syntax. Floats keep all their bits (`repr`), but there is one zero only."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value + 0.0)
    if isinstance(value, str):
        # JSON's escapes are TOML's, except that TOML wants DEL escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return "[" + ", ".join(toml_value(item) for item in value) + "]"


def _table(section: Section, path: str) -> list[str]:
    """The blocks of lines of a section and of the sections in it. TOML wants a table's own keys before its
    sub-tables."""
    head = []
    if path:
        about = type(section).__doc__
        head = [*([toml_comment(about)] if about else []), f"[{path}]"]
    own: list[str] = []
    inner: list[str] = []
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if isinstance(value, Section):
            inner += _table(value, f"{path}.{key}" if path else key)
            continue
        if field.description:
            own.append(toml_comment(field.description))
        line = f"# {key} is not set" if value is None else f"{key} = {toml_value(value)}"
        own.append(f"# {line}" if section.leaves_out(key) else line)
    return ["\n".join(head + own), *inner]
