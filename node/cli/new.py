"""`skipstone new`: writes and signs the manifest of a run.

It stands alone because each command is a module of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from node.cli.dial import Asked, told, turned_by
from node.cli.manifests import (
    ManifestChanges,
    changed_manifest,
    chosen_manifest,
    parse_blocks,
    parse_experts,
    router_of,
)
from node.cli.options import VisitedPerPath, VisitRatio
from node.cli.views.output import write_whole
from node.cli.views.text import count
from swarm.vocabulary.errors import ConfigError

if TYPE_CHECKING:
    from protocol.manifest.manifest import Manifest


def new(
    file: Annotated[Path, typer.Argument(help="The manifest to write.")],
    source: Annotated[
        Path | None, typer.Option("--from", help="Start from this TOML file instead of the default.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--from-model", help="Start from the model in this folder: Hugging Face Llama, Mistral or Qwen."),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(help="Choose everything for so many parameters, such as 160m or 7b, and say why."),
    ] = None,
    card: Annotated[str | None, typer.Option(help="With --size: memory of each peer's card [default: 12GB]")] = None,
    peers: Annotated[int | None, typer.Option(help="With --size: how many there are; a stage for each.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="With --size: a tokenizer.json [default: the bytes themselves]")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The run's name.")] = None,
    data: Annotated[
        str | None, typer.Option(help="python-stdlib, path:FILE-OR-FOLDER or huggingface:NAME[:...].")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="With huggingface:NAME: its commit [default: the newest, asked of the hub]")
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(help="all, or assistant: --data is conversations, and only the assistant's words are learnt."),
    ] = None,
    stages: Annotated[str | None, typer.Option(help="Blocks of each stage, such as 0,2,2,2.")] = None,
    stages_per_path: Annotated[int | None, VisitedPerPath] = None,
    visit_ratio: Annotated[float | None, VisitRatio] = None,
    experts: Annotated[
        str | None, typer.Option(help="Modules of each stage but the first, such as 2; or of each stage: 1,2,1,4.")
    ] = None,
    route_from: Annotated[
        str | None,
        typer.Option(help="Text, as of --data, by which documents are routed to experts [default: by chance]"),
    ] = None,
    attention: Annotated[
        str | None, typer.Option(help="documents: whole documents, each by itself; causal: one stream cut into rows.")
    ] = None,
    inner: Annotated[str | None, typer.Option(help="The inner optimizer: adamw, soap or muon.")] = None,
    total_tokens: Annotated[
        int | None, typer.Option(help="Tokens of the whole run after which the learning rate is at its end.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Weights, document order and held-out text follow from it.")] = None,
    identity: Annotated[Path | None, typer.Option(help="The key that signs; made when it is not there.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write and sign a manifest: the one file that defines a run."""
    if file.exists() and not force:
        raise ConfigError(f"{file} exists already", hint="Name another file, or replace it with --force.")
    asked = _asked_of_dial(
        size,
        {"--card": card, "--peers": peers, "--tokenizer": tokenizer},
        {"--from": source, "--from-model": model, "--stages": stages},
    )
    if asked is not None:
        asked = replace(asked, total_tokens=total_tokens, inner=inner)
        total_tokens = None
    if name is None and source is None:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).lstrip("._-")[:64] or None
    changes = ManifestChanges(
        name=name,
        seed=seed,
        source=data,
        revision=revision,
        labels=labels,
        blocks=parse_blocks(stages),
        per_path=stages_per_path,
        visit_ratio=visit_ratio,
        experts=parse_experts(experts),
        attention=attention,
        inner=inner,
        total_tokens=total_tokens,
    )
    turned = None
    if asked is None:
        manifest = chosen_manifest(source, changes)
    else:
        turned = turned_by(asked, name or "run")
        manifest = changed_manifest(turned.manifest, changes)
    if model is not None:
        from node.cli.existing_model import starting_from

        manifest = starting_from(model, manifest, is_default=source is None, keeps_blocks=stages is not None)
    elif manifest.start is not None and stages is not None:
        raise ConfigError("--stages cuts the run's model anew", hint="Name the model's folder with --from-model.")
    router = None if source is None or manifest.routing is None else router_of(source, manifest)
    if route_from is not None:
        from node.data.feed import with_router

        manifest, router = with_router(manifest, route_from)

    from node.context.options import default_identity_path
    from node.experts.router import router_file
    from protocol.identity.keys import Identity
    from protocol.manifest.signing import sign_manifest

    signed = sign_manifest(manifest, Identity.load_or_create(identity or default_identity_path()))
    try:
        write_whole(file, signed.text)
        if router is not None:
            write_whole(router_file(file), router.to_bytes())
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from error
    files = manifest.data.files
    typer.echo(f"{file}: run {signed.run}")
    typer.echo(f"  {manifest.name}, {manifest.stages.count} stages, signed by {signed.author}")
    typer.echo(
        "  text: "
        f"{manifest.data.source}{'' if files is None else f', {count(files.count)} files, {count(files.bytes)} bytes'}"
    )
    if manifest.stages.has_experts:
        by = "by chance" if router is None else f"by {router_file(file)}, which belongs beside the manifest"
        typer.echo(f"  {len(manifest.modules())} modules; documents are routed to experts {by}")
    if asked is not None and turned is not None:
        for line in told(asked, turned, manifest):
            typer.echo(line)
    else:
        typer.echo(f"  memory: {_largest_need(manifest)}")
    typer.echo(f"Start its first node with: skipstone join {file}{'' if model is None else f' --model {model}'}")


def _asked_of_dial(size: str | None, with_it: Mapping[str, Any], without_it: Mapping[str, object]) -> Asked | None:
    """What the dial is asked for; None where it is not.

    Raises:
        ConfigError: options do not go together.
    """
    if size is None:
        lonely = [option for option, value in with_it.items() if value is not None]
        if lonely:
            raise ConfigError(f"{lonely[0]} goes with --size", hint="Say how large the model should be: --size 160m.")
        return None
    doubled = [option for option, value in without_it.items() if value is not None]
    if doubled:
        raise ConfigError(f"--size and {doubled[0]} both say how large the model is", hint="Give one of them.")
    return Asked(size=size, card=with_it["--card"], peers=with_it["--peers"], tokenizer=with_it["--tokenizer"])


def _largest_need(manifest: Manifest) -> str:
    """The memory that the stages take, in a clause."""
    from node.model.memory_need import needs_of
    from swarm.membership.room import size_text
    from swarm.pipeline.ledger import DEFAULT_SLOTS
    from swarm.vocabulary.types import ModuleId

    needs = needs_of(manifest, DEFAULT_SLOTS)
    first = needs[ModuleId(0)]
    said = f"{size_text(first.device)} on the compute device and {size_text(first.memory)} of the machine's"
    others = [need for module, need in needs.items() if module.stage]
    if not others:
        return said
    most = max(others, key=lambda need: need.all)
    return f"stage 0 takes {said}, the others at most {size_text(most.device)} and {size_text(most.memory)}"
