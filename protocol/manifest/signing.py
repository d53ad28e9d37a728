"""The manifest's canonical form, the RunId that follows from it, and the author's signature.

Two files with the same values define the same run, however they are laid out, so what is hashed and signed is not the
file but its canonical form: JSON with sorted keys and no white space, ASCII only, every default filled in but those of
keys that were added later, floats as Python's `repr` writes them (the shortest digits that give the same double) and
without a negative zero. Comments are not covered by the signature; that is why the text that travels is always written
anew from the checked values.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import textwrap
from dataclasses import dataclass
from typing import Any, Final

from protocol.identity.keys import Identity, public_key_of, verify
from protocol.manifest.manifest import Manifest, manifest_from_table, parse_toml
from protocol.manifest.section import Section
from swarm.vocabulary.errors import ManifestError, ProtocolViolation
from swarm.vocabulary.types import SIGNATURE_BYTES, PeerId, RunId

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


_PURPOSE: Final = b"skipstone-manifest:"
_SIGNATURE_COMMENT: Final = (
    "Made by the author's identity key over all values above, in whatever order and layout they stand; comments are not"
    " covered. Whoever changes a value has to sign again, and gets another run."
)


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """A manifest with a checked signature of its author. Only `sign_manifest` and `read_signed_manifest` make one,
    after checking it.
    """

    manifest: Manifest
    author: PeerId
    signature: bytes
    """Ed25519, 64 bytes, over `"skipstone-manifest:"` and the canonical form."""
    text: bytes
    """The file: TOML in UTF-8 with the `[signature]` table, the same bytes on every peer."""

    @property
    def run(self) -> RunId:
        return run_id_of(self.manifest)


def canonical(manifest: Manifest) -> bytes:
    """The canonical bytes of the manifest's values; equal exactly when all values are equal."""
    return json.dumps(_plain(manifest), sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def run_id_of(manifest: Manifest) -> RunId:
    """SHA-256 of `"skipstone-manifest:"` and the canonical form, in hexadecimal."""
    return RunId(hashlib.sha256(_PURPOSE + canonical(manifest)).hexdigest())


def sign_manifest(manifest: Manifest, identity: Identity) -> SignedManifest:
    """Signs the manifest with the identity as its author. The result has been read back from its own text. Raises
    ManifestError: a value cannot be written to a file and read back, which is a bug of the schema.
    """
    signature = identity.sign(_PURPOSE + canonical(manifest))
    return read_signed_manifest(render(manifest, identity.peer, signature), run_id_of(manifest))


def render(manifest: Manifest, author: PeerId, signature: bytes) -> bytes:
    """The manifest file's text: every key with its value and what it means, then the signature. Depends on nothing but
    the arguments.
    """
    table = [
        toml_comment(_SIGNATURE_COMMENT),
        "[signature]",
        f"author = {toml_value(author)}",
        f"value = {toml_value(base64.b64encode(signature).decode())}",
    ]
    return (toml_of(manifest) + "\n" + "\n".join(table) + "\n").encode()


def read_signed_manifest(text: bytes, expected: RunId | None) -> SignedManifest:
    """Reads and checks a manifest file, which may come from a peer.

    Args:
        text: TOML, at most 64 KiB.
        expected: the run it must define, or None when any will do (a file of one's own).

    Raises:
        ManifestError: not TOML, a key is wrong, unsigned, wrongly signed, or another run than expected.
    """
    table = parse_toml(text)
    author, signature = _read_signature(table.pop("signature", None))
    manifest = manifest_from_table(table)
    try:
        public_key = public_key_of(author)
    except ProtocolViolation as error:
        raise ManifestError(f"signature.author: {error}") from None
    if not verify(public_key, signature, _PURPOSE + canonical(manifest)):
        raise ManifestError(
            "signature.value: it is not the author's signature of these values; the manifest was changed after signing"
        )
    run = run_id_of(manifest)
    if expected is not None and run != expected:
        raise ManifestError(
            f"the manifest defines run {run}, not {expected}",
            hint="Ask for the link again, or name the manifest file that belongs to this run.",
        )
    return SignedManifest(manifest, author, signature, render(manifest, author, signature))


def _read_signature(table: Any) -> tuple[PeerId, bytes]:
    if table is None:
        raise ManifestError("signature: missing; the manifest is not signed")
    if not isinstance(table, dict) or table.keys() != {"author", "value"}:
        raise ManifestError("signature: must be a table with the two keys author and value")
    author, value = table["author"], table["value"]
    if not isinstance(author, str) or not isinstance(value, str):
        raise ManifestError("signature: author and value must be strings")
    try:
        signature = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise ManifestError("signature.value: not base64") from None
    if len(signature) != SIGNATURE_BYTES:
        raise ManifestError(f"signature.value: {len(signature)} bytes, an Ed25519 signature has {SIGNATURE_BYTES}")
    return PeerId(author), signature


def _plain(value: object) -> object:
    """Models as dictionaries. Walks the fields itself, so that no change of pydantic's way to dump can change a
    RunId."""
    if isinstance(value, Section):
        keys = (key for key in type(value).model_fields if not value.leaves_out(key))
        return {key: _plain(getattr(value, key)) for key in keys}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value + 0.0 if isinstance(value, float) else value
