"""`skipstone new`: writes and signs the manifest of a run."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from node.cli.dial import DialOptions, told, turned_by
from node.cli.manifests import ManifestChanges, changed_manifest, chosen_manifest, router_of, starting_from
from node.cli.options import with_options
from node.cli.views.output import write_whole
from node.cli.views.text import count
from swarm.vocabulary.errors import ConfigError

if TYPE_CHECKING:
    from protocol.manifest.manifest import Manifest


@with_options(DialOptions, ManifestChanges)
def new(
    file: Annotated[Path, typer.Argument(help="The manifest to write.")],
    base: Annotated[
        Path | None, typer.Option("--from", help="Start from this TOML file instead of the default.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--from-model", help="Start from the model in this folder: Hugging Face Llama, Mistral or Qwen."),
    ] = None,
    route_from: Annotated[
        str | None,
        typer.Option(help="Text, as of --data, by which documents are routed to experts [default: by chance]"),
    ] = None,
    identity: Annotated[Path | None, typer.Option(help="The key that signs; made when it is not there.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    **settings: Any,
) -> None:
    """Write and sign a manifest: the one file that defines a run."""
    if file.exists() and not force:
        raise ConfigError(f"{file} exists already", hint="Name another file, or replace it with --force.")
    dial = DialOptions(**{name: settings.pop(name) for name in DialOptions.__slots__})
    changes = ManifestChanges(**settings)
    if changes.name is None and base is None:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).lstrip("._-")[:64] or None
        changes = dataclasses.replace(changes, name=name)
    turned = None
    if dial.size is None:
        manifest = chosen_manifest(base, changes)
    else:
        for option, value in {"--from": base, "--from-model": model, "--stages": changes.blocks}.items():
            if value is not None:
                raise ConfigError(f"--size and {option} both say how large the model is", hint="Give one of them.")
        turned = turned_by(dial, changes, changes.name or "run")
        manifest = changed_manifest(turned.manifest, dataclasses.replace(changes, total_tokens=None))
    if model is not None:
        manifest = starting_from(model, manifest, is_default=base is None, keeps_blocks=changes.blocks is not None)
    elif manifest.start is not None and changes.blocks is not None:
        raise ConfigError("--stages cuts the run's model anew", hint="Name the model's folder with --from-model.")
    router = None if base is None or manifest.routing is None else router_of(base, manifest)
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
    text = "" if files is None else f", {count(files.count)} files, {count(files.bytes)} bytes"
    typer.echo(f"{file}: run {signed.run}")
    typer.echo(f"  {manifest.name}, {manifest.stages.count} stages, signed by {signed.author}")
    typer.echo(f"  text: {manifest.data.source}{text}")
    if manifest.stages.has_experts:
        by = "by chance" if router is None else f"by {router_file(file)}, which belongs beside the manifest"
        typer.echo(f"  {len(manifest.modules())} modules; documents are routed to experts {by}")
    lines = [f"  memory: {_largest_need(manifest)}"] if turned is None else told(dial, turned, manifest)
    for line in lines:
        typer.echo(line)
    typer.echo(f"Start its first node with: skipstone join {file}{'' if model is None else f' --model {model}'}")


def _largest_need(manifest: Manifest) -> str:
    from node.model.memory_need import needs_of
    from swarm.membership.room import size_text
    from swarm.pipeline.custody import DEFAULT_SLOTS
    from swarm.vocabulary.types import ModuleId

    needs = needs_of(manifest, DEFAULT_SLOTS)
    first = needs[ModuleId(0)]
    said = f"{size_text(first.device)} on the compute device and {size_text(first.memory)} of the machine's"
    others = [need for module, need in needs.items() if module.stage]
    if not others:
        return said
    most = max(others, key=lambda need: need.all)
    return f"stage 0 takes {said}, the others at most {size_text(most.device)} and {size_text(most.memory)}"
