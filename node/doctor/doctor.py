"""`skipstone doctor`: the examination of this machine's fitness for a node and of how others reach it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from node.cli.views.output import announce, print_json, run_loop
from node.cli.views.text import harmless
from node.model.moments import MomentType
from node.network.reach_status import ReachMode

if TYPE_CHECKING:
    from node.doctor.examination import Finding

_CHARACTERS: Final = 600
_CHECK_WIDTH: Final = len("hivemind")
_LEVEL_WIDTH: Final = len("warn")


def doctor(
    link: Annotated[
        str | None, typer.Argument(help="A run's join link: its peers say how they reach this machine.")
    ] = None,
    listen: Annotated[str, typer.Option(help="Local address that the node would bind to.")] = "0.0.0.0",  # noqa: S104 - as join
    advertise: Annotated[str | None, typer.Option(help="Host that others would be told.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the node; 0 for any.")] = 0,
    dht_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of its DHT; 0 for any.")] = 0,
    reach: Annotated[ReachMode, typer.Option(help="auto asks the router for a port if need be.")] = ReachMode.AUTO,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N, mps or auto.")] = "auto",
    memory_limit: Annotated[str | None, typer.Option(help="What the node would be told of, such as 8GB.")] = None,
    moments: Annotated[
        MomentType, typer.Option(help="As of `join`: what the node would keep of each parameter.")
    ] = MomentType.FLOAT32,
    identity: Annotated[Path | None, typer.Option(help="The node's key file.")] = None,
    checkpoint_dir: Annotated[Path | None, typer.Option(help="Folder that the node would save to.")] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Folder for its event log.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Check this machine: versions, device, memory, disk, clock, ports, reachability. Exits with 1 if a check fails."""
    announce("skipstone doctor: examining this machine", as_json=json)
    from node.context.options import default_identity_path, memory_limit_of
    from node.doctor.examination import Doorway, Patient, examine
    from protocol.manifest.join_link import parse_link

    named = (("key", (identity or default_identity_path()).parent), ("checkpoints", checkpoint_dir), ("logs", log_dir))
    folders = tuple((name, folder) for name, folder in named if folder is not None)
    where = None if link is None else parse_link(link)
    doorway, limit = Doorway(listen, port, advertise, reach), memory_limit_of(memory_limit)
    patient = Patient(device, doorway, dht_port, folders, where, limit, moments)
    findings: list[Finding] = []

    def tell(found: Sequence[Finding]) -> None:
        findings.extend(found)
        if not json:
            for finding in found:
                typer.echo(finding_text(finding))

    run_loop(examine(patient, tell))
    if json:
        print_json(report(findings))
    raise typer.Exit(0 if is_well(findings) else 1)


def finding_text(finding: Finding) -> str:
    """Returns a finding as one line, and its fix below. Peers' words are made harmless."""
    head = f"{finding.level.value:<{_LEVEL_WIDTH}}  {finding.check:<{_CHECK_WIDTH}}  "
    line = head + harmless(finding.found, _CHARACTERS)
    return f"{line}\n{' ' * len(head)}{harmless(finding.fix, _CHARACTERS)}" if finding.fix else line


def report(findings: Sequence[Finding]) -> dict[str, Any]:
    return {"ok": is_well(findings), "checks": [finding.as_json() for finding in findings]}


def is_well(findings: Sequence[Finding]) -> bool:
    return all(finding.level.value != "fail" for finding in findings)
