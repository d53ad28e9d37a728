"""The manifest of a command: a file's or the default one, with what the command line changes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.vocabulary.errors import ConfigError

if TYPE_CHECKING:
    from node.experts.router import Router
    from protocol.manifest.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestChanges:
    """Values that replace those of a manifest; None leaves one as it is."""

    name: str | None = None
    seed: int | None = None
    source: str | None = None
    """`data.source`."""
    revision: str | None = None
    """`data.revision`."""
    labels: str | None = None
    """`data.labels`."""
    blocks: tuple[int, ...] | None = None
    """`stages.blocks`."""
    per_path: int | None = None
    """`stages.per_path`."""
    visit_ratio: float | None = None
    """`stages.visit_ratio`."""
    experts: int | tuple[int, ...] | None = None
    """`stages.experts`; a router of other experts is left out."""
    attention: str | None = None
    """`model.attention`."""
    inner: str | None = None
    """`training.inner.name`."""
    total_tokens: int | None = None
    """`training.schedule.total_tokens`; the warm-up is the same share of it as before."""


def chosen_manifest(path: Path | None, changes: ManifestChanges) -> Manifest:
    """The file's manifest, signed or not, or the default one; checked again after the changes.

    Raises:
        ConfigError: the file cannot be read.
        ConfigError: the text that it names is not here, and its list of files is not in the manifest yet.
        ManifestError: a value is wrong, or a signature that is there is not the author's.
    """
    if path is None:
        from node.local_swarm.default_manifest import default_manifest

        return changed_manifest(default_manifest(changes.seed or 0), changes)
    return changed_manifest(_read(path), changes)


def changed_manifest(base: Manifest, changes: ManifestChanges) -> Manifest:
    """The manifest with the changes, checked again; raises as `chosen_manifest`."""
    from protocol.manifest.manifest import manifest_from_table

    return _with_files(manifest_from_table(_changed(base.model_dump(), changes)))


def router_of(path: Path | None, manifest: Manifest) -> Router | None:
    """The router beside the manifest's file; None when the manifest names none.

    Raises:
        ConfigError, StateError: it is not there, or another one.
    """
    from node.experts.router import load_router

    return None if path is None else load_router(path, manifest)


def parse_experts(text: str | None) -> int | tuple[int, ...] | None:
    """`2` as that many experts at each stage but the first, `1,2,1,4` as those of each of four stages.

    Raises:
        ConfigError: not whole numbers with commas between them.
    """
    if text is None:
        return None
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--experts {text!r} is not a list of numbers", hint="Give one number, or one for each stage: 1,2,1,4."
        ) from None
    return numbers[0] if len(numbers) == 1 else numbers


def parse_blocks(text: str | None) -> tuple[int, ...] | None:
    """`0,2,2` as the blocks of three stages.

    Raises:
        ConfigError: not whole numbers with commas between them.
    """
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--stages {text!r} is not a list of numbers", hint="Give the blocks of each stage, for example 0,2,2,2."
        ) from None


def _read(path: Path) -> Manifest:
    from protocol.manifest.manifest import manifest_from_table, parse_toml
    from protocol.manifest.signing import read_signed_manifest

    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the manifest {path} cannot be read: {error.strerror or error}") from error
    table = parse_toml(text)
    return read_signed_manifest(text, None).manifest if "signature" in table else manifest_from_table(table)


def _with_files(manifest: Manifest) -> Manifest:
    """With the list of its text's files, which is for others to compare theirs with."""
    if not manifest.data.is_of_files or manifest.data.files is not None:
        return manifest
    from node.data.places import as_written
    from node.data.sources import files_at

    place = as_written(manifest.data).text
    assert place is not None, "it is a path"
    files = files_at(place).listing.section()
    return manifest.model_copy(update={"data": manifest.data.model_copy(update={"files": files})})


def _changed(table: dict[str, Any], changes: ManifestChanges) -> dict[str, Any]:
    if changes.name is not None:
        table["name"] = changes.name
    if changes.seed is not None:
        table["seed"] = changes.seed
    if changes.source is not None:
        from node.data.hub import source_keys

        table["data"] |= source_keys(changes.source, changes.revision)
    elif changes.revision is not None:
        table["data"]["revision"] = changes.revision
    if changes.labels is not None:
        table["data"]["labels"] = changes.labels
    if changes.blocks is not None:
        table["stages"] |= {"blocks": changes.blocks, "per_path": None}
    if changes.per_path is not None:
        table["stages"]["per_path"] = changes.per_path
    if changes.visit_ratio is not None:
        table["stages"]["visit_ratio"] = changes.visit_ratio
    if changes.experts is not None:
        table["stages"]["experts"], table["routing"] = changes.experts, None
    if changes.attention is not None:
        table["model"]["attention"] = changes.attention
    if changes.inner is not None:
        table["training"]["inner"]["name"] = changes.inner
    if changes.total_tokens is not None:
        schedule = table["training"]["schedule"]
        steps, of = schedule["warmup_tokens"], schedule["total_tokens"]
        if of is None:
            steps, of = schedule["warmup_steps"], schedule["total_steps"]
        schedule["warmup_tokens"], schedule["total_tokens"] = changes.total_tokens * steps // of, changes.total_tokens
    return table
