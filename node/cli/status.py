"""`skipstone status` and `skipstone eval`: questions to a swarm, or to a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from node.cli.options import AllowHub, StagesPerPath, TextPlace, TokenizerPlace, link_in
from node.cli.views.accused_view import accused_view
from node.cli.views.codecs_view import codecs_views
from node.cli.views.live import download_bar
from node.cli.views.output import announce, print_json, run_loop
from node.cli.views.paths_view import paths_views
from node.cli.views.text import count, harmless, loss_text, megabytes, number_in, path_text, peer_name, round_text
from node.context.options import variable

if TYPE_CHECKING:
    from node.data.places import ToldPlaces
    from node.network.loss_report import AskedPaths

_ROUND_WIDTH = len("3 peers")
"""What has to be left of that column on a narrow terminal."""


def status(
    link: Annotated[
        str,
        typer.Argument(envvar=variable("link"), show_envvar=False, help="The swarm's join link, or a file with it."),
    ],
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show a swarm's stages, replicas, speeds, loss, and the paths of its data nodes."""
    announce("skipstone status: asking the swarm", as_json=json)
    from protocol.manifest.join_link import parse_link

    where = link_in(link) or parse_link(link)
    from node.network.client import query_status

    answer = run_loop(query_status(where))
    if json:
        print_json(answer)
        return
    console = Console()
    console.print(status_headline(answer))
    console.print(status_table(answer))
    for view in (*accused_view(answer), *paths_views(answer), *codecs_views(answer)):
        console.print(view)


def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="LINK|SOURCE", help="A join link, or a checkpoint's or an exported folder.")
    ],
    microbatches: Annotated[int, typer.Option(min=1, max=256, help="Held-out microbatches to measure.")] = 16,
    stages_per_path: Annotated[int | None, StagesPerPath] = None,
    every_subset: Annotated[
        bool, typer.Option("--every-subset", help="With --stages-per-path: the mean over the ring of such choices.")
    ] = False,
    text: Annotated[Path | None, TextPlace] = None,
    tokenizer: Annotated[Path | None, TokenizerPlace] = None,
    allow_hub: Annotated[bool, AllowHub] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Measure the loss on held-out text, of a running swarm, a checkpoint or an exported folder."""
    announce("skipstone eval: measuring the held-out loss", as_json=json)
    if every_subset and stages_per_path is None:
        raise typer.BadParameter("needs --stages-per-path", param_hint="--every-subset")
    from node.data.places import ToldPlaces
    from node.network.loss_report import AskedPaths
    from protocol.manifest.join_link import is_link

    paths = AskedPaths(stages_per_path, every_subset)
    if is_link(target):
        answer = _evaluate_swarm(target, microbatches, paths)
    else:
        told = ToldPlaces(text=text, tokenizer=tokenizer, hub=allow_hub)
        answer = _evaluate_folder(target, microbatches, paths, told)
    if json:
        print_json(answer)
        return
    tokens, number = count(answer["tokens"]), answer["microbatches"]
    typer.echo(f"held-out loss {loss_text(answer['loss'])} nats per token  ({tokens} tokens, {number} microbatches)")
    if stages_per_path is not None:
        for subset in answer["subsets"]:
            typer.echo(f"  {loss_text(subset['loss'])}  {path_text(subset['stages'])}")


def status_headline(answer: Mapping[str, Any]) -> Text:
    """The run in a line or two; `answer` is what `query_status` returns."""
    line = Text(harmless(str(answer["name"])), style="bold")
    line.append(f"  run {harmless(str(answer['run']))[:12]}", style="not bold dim")
    if answer["step"] is not None:
        figures = f"  step {count(answer['step'])}  loss {loss_text(answer['loss'])}"
        line.append(f"{figures}  {count(answer['tokens_per_s'])} tokens/s", style="not bold")
    if answer["waiting_for"]:
        missing = ", ".join(harmless(str(module)) for module in answer["waiting_for"])
        line.append(f"\nwaiting: no peer serves {missing}", style="bold yellow")
    return line


def status_table(answer: Mapping[str, Any]) -> Table:
    """One row a peer, in order of stage, and one for every stage that has none."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("stage", "module", "peer", "state"):
        table.add_column(title)
    for title in ("steps", "tokens/s", "slots"):
        table.add_column(title, justify="right")
    table.add_column("round", min_width=_ROUND_WIDTH)
    table.add_column("address", no_wrap=True, overflow="fold")
    for stage in range(answer["stages"]):
        peers = [peer for peer in answer["peers"] if str(peer["module"]).split(".")[0] == str(stage)]
        for peer in peers:
            table.add_row(Text(str(stage)), *_status_row(peer))
        if not peers:
            table.add_row(Text(str(stage), style="red"), "", Text("none", style="red"))
    return table


def _status_row(peer: Mapping[str, Any]) -> tuple[RenderableType, ...]:
    return (
        Text(harmless(str(peer["module"] or "-"))),
        Text(peer_name(str(peer["peer"]))),
        Text(harmless(str(peer["state"] if peer["answered"] else "no answer"))),
        Text(count(peer["steps"])),
        Text(count(peer["tokens_per_s"])),
        Text(f"{peer['slots'] - peer['free_slots']}/{peer['slots']}"),
        _round_cell(peer),
        _address_cell(peer),
    )


def _address_cell(peer: Mapping[str, Any]) -> Text:
    """Its addresses, or through whom it is called, and in brackets how others reach it as far as it knows."""
    said = (peer["answered"] or {}).get("reach")
    step = said.get("step") if isinstance(said, dict) else None
    where = ", ".join(str(address) for address in peer["addresses"])
    if peer["via"]:
        where = f"via {', '.join(peer_name(str(other)) for other in peer['via'])}"
    if step not in (None, "unknown"):
        where = f"{where} ({step})".strip()
    return Text(harmless(where + _relay_text((peer["answered"] or {}).get("relay"))))


def _relay_text(said: Any) -> str:
    """What a peer that serves tunnels says that it has carried."""
    if not isinstance(said, dict) or not said.get("at"):
        return ""
    return f", relay: {megabytes(number_in(said, 'carried_bytes'))} carried"


def _round_cell(peer: Mapping[str, Any]) -> RenderableType:
    """What the peer says of itself may be anything."""
    said = peer["answered"] or {}
    if isinstance(download := said.get("catching_up"), dict):
        return download_bar(number_in(download, "bytes"), number_in(download, "total_bytes"))
    last = said.get("last_round")
    since = number_in(last, "seconds_ago") if isinstance(last, dict) else None
    return Text(round_text(peer["round"], number_in(last, "members"), since))


def _evaluate_swarm(target: str, microbatches: int, paths: AskedPaths) -> dict[str, Any]:
    from protocol.manifest.join_link import parse_link

    link = parse_link(target)
    from node.network.client import query_evaluation

    return run_loop(query_evaluation(link, microbatches, paths))


def _evaluate_folder(target: str, microbatches: int, paths: AskedPaths, told: ToldPlaces) -> dict[str, Any]:
    from node.export.offline_evaluation import evaluate_model

    return run_loop(evaluate_model(target, microbatches, paths=paths, told=told))
