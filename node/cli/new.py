"""`skipstone new`: writes and signs the manifest of a run.

It stands alone because each command is a module of its own.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from node.cli.manifests import ManifestChanges, chosen_manifest, parse_blocks
from node.cli.options import VisitedPerPath, VisitRatio
from node.cli.views.output import write_whole
from node.cli.views.text import count
from swarm.vocabulary.errors import ConfigError


def new(
    file: Annotated[Path, typer.Argument(help="The manifest to write.")],
    source: Annotated[
        Path | None, typer.Option("--from", help="Start from this TOML file instead of the default.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The run's name.")] = None,
    data: Annotated[
        str | None, typer.Option(help="python-stdlib, path:FILE-OR-FOLDER or huggingface:NAME[:...].")
    ] = None,
    stages: Annotated[str | None, typer.Option(help="Blocks of each stage, such as 0,2,2,2.")] = None,
    stages_per_path: Annotated[int | None, VisitedPerPath] = None,
    visit_ratio: Annotated[float | None, VisitRatio] = None,
    seed: Annotated[int | None, typer.Option(help="Weights, document order and held-out text follow from it.")] = None,
    identity: Annotated[Path | None, typer.Option(help="The key that signs; made when it is not there.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write and sign a manifest: the one file that defines a run."""
    if file.exists() and not force:
        raise ConfigError(f"{file} exists already", hint="Name another file, or replace it with --force.")
    if name is None and source is None:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).lstrip("._-")[:64] or None
    changes = ManifestChanges(
        name=name,
        seed=seed,
        source=data,
        blocks=parse_blocks(stages),
        per_path=stages_per_path,
        visit_ratio=visit_ratio,
    )
    manifest = chosen_manifest(source, changes)

    from node.context.options import default_identity_path
    from protocol.identity.keys import Identity
    from protocol.manifest.signing import sign_manifest

    signed = sign_manifest(manifest, Identity.load_or_create(identity or default_identity_path()))
    try:
        write_whole(file, signed.text)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from error
    files = manifest.data.files
    typer.echo(f"{file}: run {signed.run}")
    typer.echo(f"  {manifest.name}, {manifest.stages.count} stages, signed by {signed.author}")
    typer.echo(
        "  text: "
        f"{manifest.data.source}{'' if files is None else f', {count(files.count)} files, {count(files.bytes)} bytes'}"
    )
    typer.echo(f"Start its first node with: skipstone join {file}")
