"""`skipstone invite`: prints a link with which others may host stage 0 of a run."""

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from node.context.options import default_identity_path
from swarm.vocabulary.errors import ConfigError, ManifestError


def invite(
    manifest: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Manifest of the run.")],
    link: Annotated[
        str | None,
        typer.Option(help="Join link, or a file that holds one [default: print the text for `join --invitation`]"),
    ] = None,
    data: Annotated[
        bool, typer.Option("--data", help="Invite to host stage 0: the only kind of invitation.", show_default=False)
    ] = True,
    uses: Annotated[int, typer.Option(min=0, max=65_535, help="Peers that may use it (0: any number).")] = 1,
    expires: Annotated[str, typer.Option(help="Time until its data nodes must stop: 30m, 12h or 7d.")] = "7d",
    identity: Annotated[
        Path | None, typer.Option(help="Key file of the run's author or an inviter [default: this machine's key]")
    ] = None,
) -> None:
    """Print a link that lets others host stage 0, read the run's text and hand out work. Treat it as a secret."""
    from protocol.identity.invitations import Grant
    from protocol.identity.keys import Identity
    from protocol.manifest.join_link import read_link
    from protocol.manifest.signing import read_signed_manifest

    duration = re.fullmatch(r"([1-9][0-9]{0,5})([mhd])", expires)
    if duration is None:
        raise ConfigError(f"--expires {expires!r} is not a duration", hint="Write it as 30m, 12h or 7d.")
    until = int(time.time()) + int(duration[1]) * {"m": 60, "h": 3600, "d": 86_400}[duration[2]]
    where = None if link is None else read_link(link)
    signed = read_signed_manifest(manifest.read_bytes(), None)
    if where is not None and not signed.run.endswith(where.second_half):
        raise ManifestError(
            f"the manifest defines run {signed.run}, not the link's", hint="Name the manifest file of the link's run."
        )
    issuer = Identity.load(identity or default_identity_path())
    if issuer.peer not in signed.guests().hosts:
        raise ConfigError(
            f"{issuer.peer} is neither the author of this run nor one of its inviters (data.inviters)",
            hint="Name the author's key file with --identity, or ask the author for an invitation.",
        )
    grant = Grant.issue(issuer, signed.run, uses, until)
    typer.echo(grant if where is None else replace(where, invitation=grant))
