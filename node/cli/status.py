"""`skipstone status` and `skipstone eval`: queries of a swarm or a checkpoint."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live

from node.cli.options import RunLink, StagesPerPath, run_link
from node.cli.views.output import announce, print_json, run_loop
from node.cli.views.status_view import status_views
from node.cli.views.text import count, loss_text, path_text, sizes_text
from node.context.options import AllowHub, TextPath, TokenizerPath
from node.observability.status import SwarmStatus
from node.observability.typed_json import from_json, to_json
from node.web.server import PORT, WHERE, RunPage, served
from swarm.workload.microbatch_sizes import SizeSummary


def dashboard(
    link: Annotated[str | None, RunLink] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page (0: a free one).")] = PORT,
) -> None:
    """Show a run in this machine's browser. Ctrl-C ends it."""
    announce("skipstone dashboard: opening a page", as_json=False)
    from node.network.client import statuses

    where = run_link(link)

    async def shown() -> None:
        async with served(RunPage(), port, partial(statuses, where)) as page:
            typer.echo(WHERE.format(page))
            await asyncio.Event().wait()

    run_loop(shown())


def status(
    link: Annotated[str | None, RunLink] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every few seconds, until Ctrl-C.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a swarm's stages, replicas, throughput, loss and paths."""
    announce(f"skipstone status: asking {'the last run' if link is None else 'the swarm'}", as_json=json)
    where, console = run_link(link), Console()

    def show(status: SwarmStatus, picture: Callable[[Group], None] = console.print) -> None:
        print_json(to_json(status)) if json else picture(Group(*status_views(status, console.width)))

    async def shown_again() -> None:
        from node.network.client import statuses

        with Live(console=console, auto_refresh=False) if console.is_terminal and not json else nullcontext() as live:
            async for status in statuses(where):
                show(status, console.print if live is None else partial(live.update, refresh=True))

    if watch:
        run_loop(shown_again())
        return
    from node.network.client import query_status

    show(run_loop(query_status(where)))


def history(link: Annotated[str | None, RunLink] = None) -> None:
    """Print a run's loss so far as CSV: step, tokens, loss, Unix time."""
    from node.network.client import query_status

    curve = run_loop(query_status(run_link(link))).curve
    for row in (("step", "tokens", "loss", "unix_s"), *(() if curve is None else curve.points)):
        typer.echo(",".join(map(str, row)))


def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="LINK|SOURCE", help="Join link, checkpoint folder or exported folder.")
    ],
    microbatches: Annotated[int, typer.Option(min=1, max=256, help="Held-out microbatches to measure.")] = 16,
    stages_per_path: Annotated[int | None, StagesPerPath] = None,
    every_subset: Annotated[
        bool, typer.Option("--every-subset", help="With --stages-per-path: average over all evenly spread choices.")
    ] = False,
    text: Annotated[Path | None, TextPath] = None,
    tokenizer: Annotated[Path | None, TokenizerPath] = None,
    allow_hub: Annotated[bool, AllowHub] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the held-out loss of a swarm, checkpoint or export."""
    announce("skipstone eval: measuring the held-out loss", as_json=json)
    if every_subset and stages_per_path is None:
        raise typer.BadParameter("needs --stages-per-path", param_hint="--every-subset")
    from node.data.local_paths import LocalPathOptions
    from node.network.loss_report import AskedPaths
    from protocol.manifest.join_link import link_in

    paths = AskedPaths(stages_per_path, every_subset)
    if (link := link_in(target)) is not None:  # before slow imports
        from node.network.client import query_evaluation

        answer = run_loop(query_evaluation(link, microbatches, paths))
    else:
        from node.export.open_model import evaluate_model

        local_path_options = LocalPathOptions(text=text, tokenizer=tokenizer, hub=allow_hub)
        answer = run_loop(evaluate_model(target, microbatches, paths=paths, local_path_options=local_path_options))
    if json:
        print_json(answer)
        return
    tokens, number = count(answer["tokens"]), answer["microbatches"]
    typer.echo(f"held-out loss {loss_text(answer['loss'])} nats per token  ({tokens} tokens, {number} microbatches)")
    sizes = from_json(SizeSummary, answer.get("sizes", {}), "sizes")
    if sizes.documents:
        typer.echo(f"  microbatch: {sizes_text(sizes)}")
    if stages_per_path is not None:
        for subset in answer["subsets"]:
            typer.echo(f"  {loss_text(subset['loss'])}  {path_text(subset['stages'])}")
