"""`skipstone export`: a run's model as a Hugging Face folder."""

from pathlib import Path
from typing import Annotated

import typer

from node.cli.options import PathChoice, StagesPerPath
from node.cli.views.output import announce, download_bar, print_json, run_loop
from node.cli.views.text import count, counted
from node.context.options import TokenizerPath


def export(
    source: Annotated[
        str, typer.Argument(metavar="LINK|SOURCE", help="Join link, checkpoint folder or exported folder.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; must be new or empty.")],
    tokenizer: Annotated[Path | None, TokenizerPath] = None,
    stages_per_path: Annotated[int | None, StagesPerPath] = None,
    path: Annotated[str | None, PathChoice] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Write every module of a run with experts, in a format only Skipstone reads.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an older export.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write the model as a Hugging Face folder.

    A running swarm gives each module as of its last round. A run with experts holds one model per path; --path chooses
    one.
    """
    if every and (path, stages_per_path) != (None, None):
        raise typer.BadParameter("cannot be combined with --path or --stages-per-path", param_hint="--all")
    announce("skipstone export: gathering the modules", as_json=json)
    from node.data.local_paths import LocalPathOptions
    from node.export.open_model import open_model
    from node.export.source import parse_path
    from node.export.writer import Export, require_free
    from node.export.writer import export as write
    from node.network.loss_report import AskedPaths

    require_free(folder, replace=force)  # fail before a long download

    async def run() -> Export:
        with download_bar(silent=json) as on_progress:
            local_paths = LocalPathOptions(tokenizer=tokenizer)
            async with open_model(source, on_progress, local_paths, stages_per_path) as opened:
                opened.narrow(AskedPaths(stages_per_path))
                file, stages = opened.tokenizer_file(), opened.source.signed.manifest.stages.count
                route = None if path is None else parse_path(path, stages)
                return await write(opened.source, folder, tokenizer_file=file, route=route, every=every, replace=force)

    done = run_loop(run())
    if json:
        print_json({"path": str(done.path), "run": done.run, "files": done.files, "bytes": done.size_bytes})
    else:
        files = counted(done.files, "file")
        typer.echo(f"{done.path}: run {done.run[:12]}, {count(done.size_bytes)} bytes of parameters in {files}")
