"""The exception tree of Skipstone, with process exit codes (sysexits.h where it has one) and a hint for people.

Errors of grpc, hivemind and the operating system are mapped to these where they enter.
"""

from __future__ import annotations


class SkipstoneError(Exception):
    """Root of the tree; raised itself only when an invariant of our own is broken."""

    exit_code = 70
    hint = "This is a bug in Skipstone. Please report it with the log above."

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        if hint is not None:
            self.hint = hint


class ConfigError(SkipstoneError):
    """A command-line flag, environment variable or local file has a value that cannot work."""

    exit_code = 78
    hint = "Correct the setting named above and start again."


class IdentityError(SkipstoneError):
    """The identity key file is absent where it must exist, readable by others, or not an Ed25519 key."""

    exit_code = 78
    hint = "Run `chmod 600` on the key file, or name another file with --identity."


class ManifestError(SkipstoneError):
    """A manifest is malformed, inconsistent, wrongly signed, or not the one that the link names."""

    exit_code = 65
    hint = "Correct the key named above, then sign the manifest again with `skipstone new`."


class PeerError(SkipstoneError):
    """Another peer did not do its part. The work may succeed elsewhere."""

    exit_code = 75
    hint = "The node goes on with other peers; if there are none, try again later."


class Unreachable(PeerError):
    """No connection to the peer could be made, or the one there was broke."""

    hint = "Check that the peer runs, and that its addresses and ports can be reached from here."


class Stalled(PeerError):
    """The peer is connected but has been silent past the deadline."""


class Busy(PeerError):
    """The peer has no free slot for this microbatch now."""


class ProtocolViolation(PeerError):
    """The peer sent something that the protocol or the manifest forbids; nothing of it was used."""

    exit_code = 76


class StaleVersion(PeerError):
    """The two peers have no protocol version in common."""

    exit_code = 65
    hint = "Upgrade the older of the two nodes."


class Rejected(PeerError):
    """The peer refused on purpose: wrong run, a certificate that proves nobody, unknown module."""

    exit_code = 77


class StateError(SkipstoneError):
    """Saved or shared state cannot be used."""

    exit_code = 74
    hint = "Use another checkpoint, or start without one."


class CorruptSnapshot(StateError):
    """A checkpoint's bytes do not match the hashes written with it."""


class NoQuorum(StateError):
    """Fewer peers agree than the rule asks for."""

    exit_code = 75


class ResourceExhausted(SkipstoneError):
    """Memory, disk, ports, or a bound that Skipstone sets itself has run out."""

    exit_code = 71
    hint = "Free some of it, or raise the limit named above."


class OutOfMemory(ResourceExhausted):
    """This machine, its compute device, or the limit set to them has too little memory for a module or a microbatch."""

    hint = "Take a smaller stage, hold fewer microbatches (--slots), or close other programs."
