"""`skipstone service`: systemd starts this machine's node at boot, and again after a crash."""

import asyncio
import getpass
import os
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import typer

from node.cli.options import keep_link, run_link
from node.cli.views.output import announce
from node.context.options import default_identity_path
from node.context.whole_file import write_whole
from swarm.vocabulary.errors import ConfigError, IdentityError, ManifestError, ResourceExhausted

NAME: Final = "skipstone.service"
ELSEWHERE: Final = "Elsewhere, start `skipstone join --yes` by the system's own means."
UNIT: Final = """[Unit]
Description=Skipstone node
StartLimitIntervalSec=0

[Service]
{environment}WorkingDirectory={folder}
ExecStart={command}
# Not after it has left in good order, nor after errors that a new start repeats.
Restart=on-failure
RestartPreventExitStatus={lasting}
RestartSec=15
WatchdogSec=180
# Only the node itself is asked to end: it needs its children until it has left.
KillMode=mixed
TimeoutStopSec=90

[Install]
WantedBy=default.target
"""
service = typer.Typer(help="Run this machine's node from boot on.", no_args_is_help=True, rich_markup_mode=None)


@service.command(context_settings={"ignore_unknown_options": True})
def install(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[LINK] [OPTION]...", help="As of `join` [default: the last run]")
    ] = None,
) -> None:
    """Join a run now and at each boot. Its log: journalctl --user -u skipstone"""
    unit, home, options = unit_path(), default_identity_path().parent.absolute(), list(words or ())
    announce(f"skipstone service: writing {unit}", as_json=False)
    link = run_link(options.pop(0) if options and not options[0].startswith("-") else None)
    if "--checkpoint-dir" not in options:
        options += ["--checkpoint-dir", str(home / "service")]
    kept = home / "service.link"  # a link can carry an invitation, and a unit is readable by other users
    own = sorted((name, value) for name, value in os.environ.items() if name.startswith("SKIPSTONE_"))
    command = (sys.executable, "-P", "-m", "skipstone", "join", str(kept), "--yes", *options)
    text = UNIT.format(
        environment="".join(f"Environment={quoted(f'{name}={value}')}\n" for name, value in own),
        folder=os.getcwd().replace("%", "%%"),
        command=" ".join(map(quoted, command)),
        lasting=" ".join(sorted({str(error.exit_code) for error in (ConfigError, IdentityError, ManifestError)})),
    )
    _run("systemctl", "--user", "show-environment")  # before anything is written
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        unit.parent.mkdir(parents=True, exist_ok=True)
        keep_link(kept, str(link))
        write_whole(unit, text.encode())
    except OSError as error:
        raise ResourceExhausted(f"cannot write {unit}: {error.strerror or error}") from None
    _run("systemctl", "--user", "daemon-reload")
    _run("systemctl", "--user", "enable", NAME)
    _run("systemctl", "--user", "restart", NAME)
    _run("loginctl", "enable-linger", getpass.getuser(), hint="The node runs, but after a boot only once you log in.")
    typer.echo("the node starts now and at each boot; look with `skipstone service status`")


@service.command()
def status() -> None:
    """Show whether the node runs, and its last messages."""
    raise typer.Exit(subprocess.call(("systemctl", "--user", "status", "--no-pager", NAME)))  # noqa: S603, S607


@service.command()
def remove() -> None:
    """Let the node leave, and start it no more. Its key, credit and checkpoint stay."""
    _run("systemctl", "--user", "disable", "--now", NAME)
    unit_path().unlink(missing_ok=True)
    _run("systemctl", "--user", "daemon-reload")
    typer.echo("the node is no service any more")


def unit_path() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user" / NAME


def quoted(word: str) -> str:
    """Quotes a word for a unit, in which systemd expands % and $."""
    for special, escaped in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        word = word.replace(special, escaped)
    return f'"{word}"'


def _run(*words: str, hint: str = ELSEWHERE) -> None:
    """Runs a command of systemd. Raises ConfigError with its error message."""
    if shutil.which(words[0]) is None:
        raise ConfigError(f"`{words[0]}` was not found: this machine does not run systemd", hint=hint)
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)  # noqa: S603
    if done.returncode:
        raise ConfigError(f"`{' '.join(words)}`: {(done.stderr or done.stdout).strip()}", hint=hint)


async def watchdog() -> None:
    """Tells systemd, if it asks, that the event loop turns: else systemd restarts the node."""
    address, limit_us = os.environ.get("NOTIFY_SOCKET"), float(os.environ.get("WATCHDOG_USEC", "0"))
    if not address or not limit_us:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.setblocking(False)
        while True:
            with suppress(OSError):
                notified.sendto(b"WATCHDOG=1", address.replace("@", "\0", 1) if address[0] == "@" else address)
            await asyncio.sleep(limit_us / 3e6)
