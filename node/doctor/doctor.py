"""`skipstone doctor`: checks whether this machine suits a node, and how peers reach it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from node.cli.options import MomentsChoice
from node.cli.views.output import announce, print_json, run_loop
from node.cli.views.text import harmless
from node.model.moments import MomentType
from node.network.reach_status import ReachMode

if TYPE_CHECKING:
    from node.doctor.examination import Finding

_CHARACTERS: Final = 600


def doctor(
    link: Annotated[str | None, typer.Argument(help="Link of a run, whose peers try to reach this machine.")] = None,
    listen: Annotated[str, typer.Option(help="Local address to bind to.")] = "0.0.0.0",  # noqa: S104 - as join
    advertise: Annotated[str | None, typer.Option(help="Host that peers dial [default: detected]")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the node (0: any free port).")] = 0,
    dht_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the DHT (0: any free port).")] = 0,
    reach: Annotated[ReachMode, typer.Option(help="auto asks the router to open a port if needed.")] = ReachMode.AUTO,
    device: Annotated[str, typer.Option(help="Compute device: cpu, cuda, cuda:N, mps or auto.")] = "auto",
    memory_limit: Annotated[str | None, typer.Option(help="Memory of a stage, as 8GB [default: all free]")] = None,
    moments: Annotated[MomentType, MomentsChoice] = MomentType.FLOAT32,
    identity: Annotated[Path | None, typer.Option(help="Key file of the node [default: this machine's key]")] = None,
    checkpoint_dir: Annotated[Path | None, typer.Option(help="Folder for checkpoints, for its free space.")] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Folder for event logs, to check its free space.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check this machine for a node, and how peers reach it.

    Checks versions, device, memory, disk, clock, ports and reachability. Exits with 1 if a check fails.
    """
    announce("skipstone doctor: examining this machine", as_json=json)
    from node.context.options import NodeOptions, default_identity_path, memory_limit_of
    from node.doctor.examination import Patient, examine
    from protocol.manifest.join_link import read_link

    key = identity or default_identity_path()
    # Checks the host names as a node does.
    node = NodeOptions(link=None, manifest_path=key, identity_path=key, listen=listen, advertise=advertise)
    named = (("key", key.parent), ("checkpoints", checkpoint_dir), ("logs", log_dir))
    folders = tuple((name, folder) for name, folder in named if folder is not None)
    where = None if link is None else read_link(link)
    at = node.listen, port, node.advertise, reach, dht_port
    patient = Patient(device, *at, folders, where, memory_limit_of(memory_limit), moments)
    findings: list[Finding] = []

    def tell(found: "Sequence[Finding]") -> None:
        findings.extend(found)
        if not json:
            for finding in found:
                typer.echo(finding_text(finding))

    run_loop(examine(patient, tell))
    if json:
        print_json(report(findings))
    raise typer.Exit(0 if is_well(findings) else 1)


def finding_text(finding: "Finding") -> str:
    """Formats a finding as one line with its fix below. Text from peers is escaped."""
    head = f"{finding.level.value:<4}  {finding.check:<8}  "
    line = head + harmless(finding.found, _CHARACTERS)
    return f"{line}\n{' ' * len(head)}{harmless(finding.fix, _CHARACTERS)}" if finding.fix else line


def report(findings: "Sequence[Finding]") -> dict[str, Any]:
    return {"ok": is_well(findings), "checks": [finding.as_json() for finding in findings]}


def is_well(findings: "Sequence[Finding]") -> bool:
    return all(finding.level.value != "fail" for finding in findings)
