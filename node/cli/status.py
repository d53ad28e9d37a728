"""`skipstone status`, `dashboard`, `history`, `credits` and `eval`: what a swarm, a file or a checkpoint tells."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console, Group
from rich.live import Live

from node.cli.options import RunLink, Source, StagesPerPath, run_link
from node.cli.views.output import announce, print_json, run_loop, tell
from node.cli.views.status_view import status_views
from node.cli.views.text import count, counted, harmless, loss_text, path_text, peer_name, sizes_text
from node.context.options import AllowHub, TextPath, TokenizerPath, default_identity_path
from node.observability.status import SwarmStatus
from node.observability.typed_json import from_json, to_json
from node.web.server import PORT, WHERE, RunPage, served
from swarm.vocabulary.errors import StateError
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
        async with served(RunPage(lambda: str(where)), port, partial(statuses, where)) as page:
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


BADGE: Final = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="200" height="20"><rect width="200" height="20" fill="#0e7490"/>'
    '<text x="8" y="14" fill="#fff" font-family="sans-serif" font-size="11">Skipstone: {} tokens</text></svg>\n'
)


def credits(
    files: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="[default: this machine's]")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Fail if anything is forged, changed or twice.")] = False,
    badge: Annotated[Path | None, typer.Option(metavar="SVG", help="Write a picture with the sum.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the work that data nodes have signed for this machine's peers. Needs no network, so anyone can check it."""
    from node.runtime.credit_file import credit_folder, read_credit

    folder = credit_folder(default_identity_path())
    announce(f"skipstone credits: {'the given files' if files else folder}", as_json=json)
    rows, faults = list[dict[str, Any]](), list[str]()
    for path in files or sorted(folder.glob("*.json")):
        signed, credit, wrong = read_credit(path)
        tokens, visits = credit.tokens, sum(row.visits for row, _ in credit.proofs)
        by = sorted({tally.data_node for _, tally in credit.proofs})
        row = {"file": str(path), "run": signed.run, "name": signed.manifest.name, "peer": credit.peer}
        rows.append(row | {"tokens": tokens, "microbatches": visits, "data_nodes": by, "faults": wrong})
        faults += [f"{path}: {fault}" for fault in wrong]
        if not json:
            work = f"{counted(tokens, 'token')} in {counted(visits, 'microbatch')}, by {counted(len(by), 'data node')}"
            typer.echo(f"  {harmless(signed.manifest.name):20} {peer_name(credit.peer)}  {work}")
    total = sum(row["tokens"] for row in rows)
    if json:
        print_json({"tokens": total, "credits": rows})
    else:
        typer.echo(f"{counted(total, 'token')}, {counted(len({row['run'] for row in rows}), 'run')}")
    if badge is not None:
        badge.write_text(BADGE.format(count(total)))
    for fault in faults:
        tell(f"left out: {fault}")
    if verify and faults:
        raise StateError(f"{counted(len(faults), 'fault')} in the credit", hint="Do not trust this file.")


def evaluate(
    target: Annotated[str, Source],
    microbatches: Annotated[int, typer.Option(min=1, max=256, help="Held-out microbatches to measure.")] = 16,
    stages_per_path: Annotated[int | None, StagesPerPath] = None,
    every_subset: Annotated[bool, typer.Option("--every-subset", help="Mean of all even choices of stages.")] = False,
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
