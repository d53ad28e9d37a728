"""The manifest of a command: a file's or the default one, with the changes of the command line."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from node.cli.options import VisitedPerPath, VisitRatio
from swarm.vocabulary.errors import ConfigError, ManifestError

if TYPE_CHECKING:
    from node.experts.router import Router
    from protocol.manifest.manifest import Manifest

# Defaults of `new --from-model`: rows per step, and the learning rate.
FINE_TUNING_ROWS: Final = 16
FINE_TUNING_RATE: Final = 3e-5
# Rules of new runs that skip stages, by SkipPipe (arXiv 2502.19913 and its code).
MOST_SKIPPED: Final = 3
FULL_EVERY: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestChanges:
    """Options of `skipstone new` that replace keys of the manifest; None keeps a key."""

    name: Annotated[str | None, "name", typer.Option(help="Name of the run [default: the file's name]")] = None
    source: Annotated[
        str | None, "data.source", typer.Option("--data", help="path:FILE-OR-FOLDER[:COLUMN] or huggingface:NAME[:...]")
    ] = None
    revision: Annotated[str | None, "data.revision", typer.Option(help="Commit of the data set")] = None
    labels: Annotated[str | None, "data.labels", typer.Option(help="Which tokens count: all or assistant")] = None
    open_data: Annotated[
        bool | None,
        "data.open",
        typer.Option("--open-data", help="Let anybody with the link be a data node, without an invitation."),
    ] = None
    blocks: Annotated[str | None, "stages.blocks", typer.Option("--stages", help="Blocks per stage, as 0,2,2,2")] = None
    stages_per_path: Annotated[int | None, "stages.per_path", VisitedPerPath] = None
    visit_ratio: Annotated[float | None, "stages.visit_ratio", VisitRatio] = None
    max_jump: Annotated[int | None, "paths.max_jump", typer.Option(help="Stages skipped in a row [default: 3]")] = None
    full_every: Annotated[int | None, "paths.full_every", typer.Option(help="Every Nth path visits all stages")] = None
    experts: Annotated[str | None, "stages.experts", typer.Option(help="Experts per stage, as 2 or 1,2,1,4")] = None
    workers: Annotated[str | None, "stages.workers", typer.Option(help="What nodes host: modules, or whole paths")] = (
        None
    )
    attention: Annotated[str | None, "model.attention", typer.Option(help="documents, or causal (one stream)")] = None
    residual: Annotated[
        int | None, "model.residual", typer.Option(help="For slow links: numbers a token, as 64; shows peers the text")
    ] = None
    inner: Annotated[str | None, "training.inner.name", typer.Option(help="muon, adamw (--from-model) or soap")] = None
    total_tokens: Annotated[
        int | None, "training.schedule.total_tokens", typer.Option(help="Tokens to train [with --size: 20 a parameter]")
    ] = None
    seed: Annotated[int | None, "seed", typer.Option(help="Seed of weights and text order [default: 0]")] = None

    def options(self) -> Iterator[tuple[str, str]]:
        """Yields each given option and the manifest's key that it sets."""
        for name, hint in typing.get_type_hints(type(self), include_extras=True).items():
            if getattr(self, name) is not None:
                key, option = hint.__metadata__
                yield option.default if option.default is not ... else f"--{name.replace('_', '-')}", key

    def keys(self) -> dict[str, Any]:
        """Returns the values that the options set, by dotted manifest key."""
        hints = typing.get_type_hints(type(self), include_extras=True)
        found = {hint.__metadata__[0]: getattr(self, name) for name, hint in hints.items()}
        if self.blocks is not None:
            found["stages.blocks"] = _numbers("--stages", self.blocks, "Give the blocks of each stage: 0,2,2,2.")
        if self.experts is not None:
            experts = _numbers("--experts", self.experts, "Give one number, or one for each stage: 1,2,1,4.")
            found["stages.experts"] = experts[0] if len(experts) == 1 else experts
        return {key: value for key, value in found.items() if value is not None}


def chosen_manifest(path: Path | None, changes: ManifestChanges) -> Manifest:
    """Reads the file's manifest, or the default one, and applies the changes. Raises ConfigError, ManifestError."""
    if path is None:
        from node.local_swarm.default_manifest import default_manifest

        return changed_manifest(default_manifest(changes.seed or 0), changes)
    return changed_manifest(_read(path), changes)


def changed_manifest(base: Manifest, changes: ManifestChanges) -> Manifest:
    """Returns `base` with the command line's changes and hashes of the text's files. Raises as `chosen_manifest`."""
    from protocol.manifest.manifest import manifest_from_table

    try:
        manifest = manifest_from_table(_changed(base.model_dump(), changes))
    except ManifestError as error:
        for option, key in changes.options():
            if f" {key}: " in str(error):
                raise ManifestError(str(error), hint=f"Correct {option}, which sets it.") from None
        raise
    data = manifest.data
    if not data.is_of_files or data.files is not None:
        return manifest
    from node.data.local_paths import as_written
    from node.data.sources import LocalSource, open_source

    source = open_source(data, as_written(data).text, is_new=True)
    assert isinstance(source, LocalSource), "it is a path"
    table = manifest.model_dump()
    # Pinned, so that other data nodes can compare their copy.
    table["data"]["files"] = source.listing.section().model_dump()
    return manifest_from_table(table)


def starting_from(
    path: Path, base: Manifest, inner: str | None = None, *, is_default: bool, keeps_blocks: bool
) -> Manifest:
    """Returns `base` with the model, tokenizer and weights of `path`. Raises ConfigError, ManifestError."""
    from node.data.tokenizers import chosen_tokenizer, require_fits
    from node.dial.dial import spread
    from node.start.cut_model import TOKENIZER, CutModel, ModelFolder, blocks_of, model_table
    from protocol.manifest.manifest import manifest_from_table

    if base.model.residual:
        raise ConfigError(
            "--from-model and model.residual cannot be combined: the blocks of a finished model write all of its width",
            hint="Leave out --residual, or train a new model.",
        )
    folder = ModelFolder(path)
    table = base.model_dump()
    model = model_table(folder.config, None if is_default else base.model.sequence)
    if model["tied_embeddings"] is True:
        model["tied_embeddings"] = folder.is_tied
    table["model"] = {"dtype": base.model.dtype, "attention": base.model.attention, **model}
    folder.tokenizer()  # raises if the folder has no tokenizer
    tokenizer, keys = chosen_tokenizer(path / TOKENIZER, path)
    require_fits(tokenizer, model["vocabulary"], path / TOKENIZER)
    table["data"] |= keys
    if not keeps_blocks:
        table["stages"] |= {"blocks": spread(blocks_of(folder.config), base.stages.count), "per_path": None}
    if is_default:
        table["training"] = _fine_tuning(model, table["training"], inner or "adamw")
    # The digests need the final model and stages, so the manifest is made twice.
    manifest = manifest_from_table(table | {"start": None})
    start = {"modules": CutModel(manifest, folder).digests()}
    return manifest_from_table(manifest.model_dump() | {"start": start})


def router_of(path: Path | None, manifest: Manifest) -> Router | None:
    """Loads the expert router saved next to the manifest's file, if any. Raises ConfigError, StateError."""
    from node.experts.router import load_router

    return None if path is None else load_router(path, manifest)


def _numbers(option: str, text: str, hint: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} {text!r} is not a list of numbers", hint=hint) from None


def _read(path: Path) -> Manifest:
    from protocol.manifest.manifest import manifest_from_table, parse_toml
    from protocol.manifest.signing import read_signed_manifest

    try:
        text = path.read_bytes()
    except OSError as error:
        why, hint = error.strerror or error, "`skipstone new FILE` writes a manifest."
        raise ConfigError(f"cannot read the manifest {path}: {why}", hint=hint) from error
    table = parse_toml(text)
    return read_signed_manifest(text, None).manifest if "signature" in table else manifest_from_table(table)


def _changed(table: dict[str, Any], changes: ManifestChanges) -> dict[str, Any]:
    if changes.source is not None:
        from node.data.hub import source_keys

        table["data"] |= source_keys(changes.source, changes.revision)
    if changes.blocks is not None:
        table["stages"]["per_path"] = None  # the old value may exceed the new number of stages
    if changes.stages_per_path is not None and table["paths"]["max_jump"] is None:
        table["paths"] = {"max_jump": MOST_SKIPPED, "full_every": FULL_EVERY}
    if changes.experts is not None:
        table["routing"] = None  # a router fits one layout of experts only
    if changes.total_tokens is not None:
        schedule = table["training"]["schedule"]  # keep the warm-up's share of the schedule
        unit = "steps" if schedule["total_tokens"] is None else "tokens"
        warmup, total = schedule[f"warmup_{unit}"], schedule[f"total_{unit}"]
        schedule["warmup_tokens"] = changes.total_tokens * warmup // total
    for key, value in changes.keys().items():
        # `source_keys` has set these two already, the source in its full form.
        if changes.source is None or key not in ("data.source", "data.revision"):
            *sections, last = key.split(".")
            reduce(getitem, sections, table)[last] = value
    return table


def _fine_tuning(model: Mapping[str, Any], training: Mapping[str, Any], name: str) -> dict[str, Any]:
    step = FINE_TUNING_ROWS * model["sequence"]
    schedule = training["schedule"] | {"warmup_tokens": 20 * step, "total_tokens": 1000 * step}
    # Large steps would undo the pretraining. Muon gains nothing on a model of AdamW (arXiv:2502.16982).
    inner = training["inner"] | {"name": name, "learning_rate": FINE_TUNING_RATE, "weight_decay": 0.0}
    return {**training, "rows": 1, "inner_tokens": step, "inner": inner, "schedule": schedule}
