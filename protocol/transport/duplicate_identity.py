"""One key in two live processes: the older process is kept, and the younger one ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from protocol.frames.frames import Farewell, FarewellReason, Hello
from protocol.identity.signed_records import RECORD_LIFETIME_S
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.errors import IdentityError, Rejected, Unreachable
from swarm.vocabulary.types import PeerId, short

if TYPE_CHECKING:
    from protocol.transport.link import Link

FORMER_LIFE_MS: Final = 5000  # Clock correction between two lives, in ms
_ABOUT_AS_OLD_S: Final = 1.0  # Travel time of a Hello


class SameKey(Rejected):
    """Raised when the peer says that another process uses our identity; `record` is to prove it."""

    def __init__(self, message: str, record: bytes) -> None:
        super().__init__(message)
        self.record = record


def keep_the_older(link: Link, hello: Hello, now: float) -> Farewell | None:
    """The objection to the Hello of a younger process; None once the link of a younger one has been ended."""
    if link.began < now - hello.age_ms / 1e3 + _ABOUT_AS_OLD_S:
        return _farewell(now - link.began, link.record)
    error = Unreachable(f"{short(link.peer)} runs twice, and the older process is kept")
    link.end(error, _farewell(hello.age_ms / 1e3, hello.record))
    return None


def is_duplicate(said: Announcement, peer: PeerId, certificate: bytes, incarnation: int, wall: float) -> bool:
    """Whether another process with our key made this verified record while this one ran."""
    # The certificate is each process's own. A former life's record is older than this one.
    return (
        said.peer == peer
        and abs(wall - (said.expires_at - RECORD_LIFETIME_S)) < RECORD_LIFETIME_S
        and said.certificate != certificate
        and said.sequence > incarnation + FORMER_LIFE_MS
    )


async def end_for(older: Announcement) -> None:
    """Raises the IdentityError that ends this process."""
    where = f" at {', '.join(older.addresses)}" if older.addresses else ""
    raise IdentityError(
        f"another node with this key ({older.peer}) is in the run{where}, and was there first; this one ends",
        hint=(
            "Every machine needs a key of its own: start with --identity FILE, or stop the other node. Of a "
            "machine that was copied, delete the copied key."
        ),
    )


def _farewell(age_s: float, record: bytes) -> Farewell:
    return Farewell(FarewellReason.SAME_KEY, f"another process with this key runs since {age_s:.0f} s", record)
