"""Exceptions of Skipstone, each with an exit code (sysexits.h) and a hint. Libraries' errors are converted to these."""

from typing import Final

LEAVING: Final = "this node is leaving"  # Why this node ends its links when it stops


class SkipstoneError(Exception):
    """Base of all exceptions. Raised itself only if an internal invariant is broken."""

    exit_code = 70
    hint = "This is a bug in Skipstone. Please report it with the log above."

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        if hint is not None:
            self.hint = hint


class ConfigError(SkipstoneError):
    """A command-line option, environment variable or local file has an unusable value."""

    exit_code = 78
    hint = "Correct the setting named above and start again."


class IdentityError(SkipstoneError):
    """The identity key file is missing, readable by other users, or not an Ed25519 key."""

    exit_code = 78
    hint = "Run `chmod 600` on the key file, or name another file with --identity."


class ManifestError(SkipstoneError):
    """A manifest is malformed, inconsistent, badly signed, or not the one named by the link."""

    exit_code = 65
    hint = "Correct the key named above, then sign the manifest again with `skipstone new`."


class PeerError(SkipstoneError):
    """Another peer failed. The work may succeed with a different peer."""

    exit_code = 75
    hint = "The node continues with other peers. Without other peers, try again later."


class Unreachable(PeerError):
    """The connection to the peer failed or broke."""

    hint = "Check that the peer runs and that this machine can reach its addresses and ports."


class Stalled(PeerError):
    """The peer is connected but has been silent past the deadline."""


class Busy(PeerError):
    """The peer has no free slot for this microbatch now."""


class ProtocolViolation(PeerError):
    """The peer sent data that the protocol or the manifest forbids. The data was not used."""

    exit_code = 76


class StaleVersion(PeerError):
    """The two peers have no protocol version in common."""

    exit_code = 65
    hint = "Upgrade the older of the two nodes."


class Rejected(PeerError):
    """The peer refused on purpose: wrong run, invalid certificate, unknown module."""

    exit_code = 77


class Declined(Rejected):
    """The person at this machine answered no. This is no fault."""

    hint = "Answer yes when asked, or use --yes."


class StateError(SkipstoneError):
    """Saved or shared state cannot be used."""

    exit_code = 74
    hint = "Use another checkpoint, or start without one."


class CorruptSnapshot(StateError):
    """A checkpoint's bytes do not match the hashes written with it."""


class NoQuorum(StateError):
    """Too few peers agree on a state."""

    exit_code = 75


class ResourceExhausted(SkipstoneError):
    """Memory, disk, ports, or a limit of Skipstone's own is exhausted."""

    exit_code = 71
    hint = "Free some of it, or raise the limit named above."


class OutOfMemory(ResourceExhausted):
    """The machine, its compute device, or a limit on them has too little memory for a module or a microbatch."""

    hint = "Take a smaller stage, hold fewer microbatches (--slots), or close other programs."
