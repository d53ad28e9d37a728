"""The manifest's canonical form, its RunId, and the author's signature.

The canonical form is JSON: ASCII, sorted keys, no white space, floats as `repr`, no negative zero. It includes
defaults, except for keys added later. Comments are not signed, so peers exchange a text that is rendered from the
values.
"""

import base64
import binascii
import hashlib
import json
import textwrap
from dataclasses import dataclass
from typing import Any, Final

from protocol.identity.invitations import Guests
from protocol.identity.keys import Identity, public_key_of, verify
from protocol.manifest.manifest import Manifest, Section, manifest_from_table, parse_toml
from swarm.vocabulary.errors import ManifestError, ProtocolViolation
from swarm.vocabulary.types import SIGNATURE_BYTES, PeerId, RunId

TomlValue = bool | int | float | str | tuple["TomlValue", ...]


def toml_of(manifest: Manifest) -> str:
    """Renders all keys as TOML, including defaults; a default of a later version's key is a comment."""
    head = toml_comment("A Skipstone run. These values are equal on all peers. Changing a value makes a different run.")
    return "\n\n".join([head, *_table(manifest, "")]) + "\n"


def toml_comment(text: str) -> str:
    return "\n".join(textwrap.wrap(" ".join(text.split()), 100, initial_indent="# ", subsequent_indent="# "))


def toml_value(value: TomlValue) -> str:
    """Renders a value in TOML syntax. Floats are exact (`repr`), except that -0.0 becomes 0.0."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value + 0.0)
    if isinstance(value, str):
        # TOML uses JSON's escapes, and also requires one for DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return "[" + ", ".join(toml_value(item) for item in value) + "]"


def _table(section: Section, path: str) -> list[str]:
    """Renders a section and its sub-sections as TOML tables, the section's own keys first, as TOML requires."""
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
    "Made by the author's identity key over all values above. Order, layout and comments do not matter. After a change"
    " of a value the manifest must be signed again and defines another run."
)


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """A manifest with the verified signature of its author."""

    manifest: Manifest
    author: PeerId
    signature: bytes  # Ed25519 over `"skipstone-manifest:"` and the canonical form
    text: bytes  # TOML with the `[signature]` table; equal bytes on every peer

    @property
    def run(self) -> RunId:
        return run_id_of(self.manifest)

    def guests(self) -> Guests:
        return Guests(self.run, self.author, self.manifest.data.inviters, self.manifest.data.open)


def canonical(manifest: Manifest) -> bytes:
    """Returns the manifest's canonical form: two manifests have the same form exactly if all values are equal."""
    return json.dumps(_plain(manifest), sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def run_id_of(manifest: Manifest) -> RunId:
    """Returns the SHA-256 of `"skipstone-manifest:"` and the canonical form, in hexadecimal."""
    return RunId(hashlib.sha256(_PURPOSE + canonical(manifest)).hexdigest())


def sign_manifest(manifest: Manifest, identity: Identity) -> SignedManifest:
    """Signs the manifest. Raises ManifestError if a value does not survive rendering and parsing (a schema bug)."""
    signature = identity.sign(_PURPOSE + canonical(manifest))
    return read_signed_manifest(render(manifest, identity.peer, signature), run_id_of(manifest))


def render(manifest: Manifest, author: PeerId, signature: bytes) -> bytes:
    """Renders the manifest file: every key with value and comment, then the signature."""
    table = [
        toml_comment(_SIGNATURE_COMMENT),
        "[signature]",
        f"author = {toml_value(author)}",
        f"value = {toml_value(base64.b64encode(signature).decode())}",
    ]
    return (toml_of(manifest) + "\n" + "\n".join(table) + "\n").encode()


def read_signed_manifest(text: bytes, expected: RunId | None) -> SignedManifest:
    """Parses an untrusted manifest and verifies its signature and the RunId, if one is given. Raises ManifestError."""
    table = parse_toml(text)
    author, signature = _read_signature(table.pop("signature", None))
    manifest = manifest_from_table(table)
    try:
        public_key = public_key_of(author)
    except ProtocolViolation as error:
        raise ManifestError(f"signature.author: {error}") from None
    if not verify(public_key, signature, _PURPOSE + canonical(manifest)):
        raise ManifestError(
            "signature.value: not the author's signature of these values; they were changed after signing"
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
    """Converts pydantic models to dictionaries. Changes of pydantic's own dump would change RunIds."""
    if isinstance(value, Section):
        keys = (key for key in type(value).model_fields if not value.leaves_out(key))
        return {key: _plain(getattr(value, key)) for key in keys}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value + 0.0 if isinstance(value, float) else value
