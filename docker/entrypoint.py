"""What a container does before its node: it takes an identity, makes or awaits what the node joins with, and becomes
the node.

    entrypoint.py join [TARGET] [OPTIONS]       TARGET, else SKIPSTONE_LINK: a link, or a file with one or with a
    manifest entrypoint.py COMMAND ...                   any other command of Skipstone, as it is

Replicas of one service share a volume of identities but must not share an identity. Each takes the first folder of the
volume that nobody has locked, so a container that replaces another goes on as the same peer, and as many as are started
get one each. The kernel frees the lock when the node ends, however it ends. The host's name would not do: a container
that was made anew has another.

Standard library only, and one process in the end: the node gets every signal itself.
"""

import fcntl
import ipaddress
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

SKIPSTONE = "skipstone"
MAX_IDENTITIES = 256
WAIT_S = 180.0
"""For the file with the link. The node that writes it may still have a first run to make."""
POLL_S = 0.2
UNAVAILABLE = 75
"""EX_TEMPFAIL, as Skipstone ends when other peers did not do their part."""


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Becomes the Skipstone command that was asked for."""
    told = dict(environment)
    if arguments[:1] == ["join"]:
        prepare_node(arguments[1:], told)
    os.execvpe(SKIPSTONE, [SKIPSTONE, *arguments], told)


def prepare_node(arguments: Sequence[str], told: dict[str, str]) -> None:
    """Everything that a node in a container needs beforehand; completes its variables."""
    if not told.get("SKIPSTONE_IDENTITY"):
        own = take_identity(Path(told["SKIPSTONE_IDENTITIES"]))
        point(Path(told["SKIPSTONE_HOME"]), own)
    if not told.get("SKIPSTONE_ADVERTISE") and (address := own_address(socket.gethostname())):
        told["SKIPSTONE_ADVERTISE"] = address
    target = arguments[0] if arguments and not arguments[0].startswith("-") else told.get("SKIPSTONE_LINK", "")
    if not target or target.startswith("skipstone:"):
        return
    if template := told.get("SKIPSTONE_RUN"):
        make_manifest(Path(target), Path(template), told)
    else:
        wait_for(Path(target), WAIT_S)


def take_identity(identities: Path) -> Path:
    """The first folder that no other container has, locked for as long as this process, and the node it becomes,
    live."""
    for number in range(1, MAX_IDENTITIES + 1):
        folder = identities / str(number)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        os.set_inheritable(lock, True)
        return folder
    sys.exit(f"entrypoint: all {MAX_IDENTITIES} identities in {identities} are in use")


def point(home: Path, folder: Path) -> None:
    """Makes `home`, where Skipstone looks for its identity, a link to the folder that was taken."""
    home.unlink(missing_ok=True)  # of this container's life before a restart
    home.symlink_to(folder)


def own_address(host: str) -> str | None:
    """This container's address in its network; None where the host's name leads nowhere that others could reach."""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return None
    return None if ipaddress.ip_address(address).is_loopback else address


def make_manifest(manifest: Path, template: Path, told: Mapping[str, str]) -> None:
    """Signs the run of the template and invites the other data nodes, unless an earlier start has done so."""
    if not manifest.exists():
        subprocess.run([SKIPSTONE, "new", str(manifest), "--from", str(template)], env=told, check=True)
    invitation = manifest.with_name("invitation")
    if not invitation.exists():
        command = [SKIPSTONE, "invite", str(manifest), "--uses", "0", "--expires", "9999d"]
        invited = subprocess.run(command, env=told, check=False, stdout=subprocess.PIPE)
        if invited.returncode == 0:
            invitation.write_bytes(invited.stdout)


def wait_for(file: Path, limit_s: float) -> None:
    """Returns when the file is there, which another container writes."""
    give_up = time.monotonic() + limit_s
    while not file.exists():
        if time.monotonic() >= give_up:
            print(
                f"entrypoint: nobody has written {file} in {limit_s:.0f} s; does the first node run?", file=sys.stderr
            )
            sys.exit(UNAVAILABLE)
        time.sleep(POLL_S)


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
