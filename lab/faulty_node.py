"""A node with a wrong wall clock or other protocol versions.

`python lab/faulty_node.py [--clock SECONDS] [--step SECONDS] [--protocol LOWEST-HIGHEST] -- ARGUMENTS`; SIGUSR1 moves
the clock by `--step`. The DHT process keeps the right clock.
"""

import argparse
import signal
import sys
import time


def main() -> None:
    """Installs the faults before other imports, then runs `skipstone ARGUMENTS`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clock", type=float, default=0.0)
    parser.add_argument("--step", type=float, default=0.0)
    parser.add_argument("--protocol")
    parser.add_argument("arguments", nargs="+")
    given = parser.parse_args()
    if given.protocol:
        _speak(given.protocol)
    if given.clock or given.step:
        _set_clock(given.clock, given.step)
    sys.argv = ["skipstone", *given.arguments]
    from node.cli.app import main as skipstone

    skipstone()


def _speak(versions: str) -> None:
    from swarm.vocabulary import types as vocabulary

    lowest, _, highest = versions.partition("-")
    # All modules import the name from here, and none has done so yet.
    setattr(vocabulary, "PROTOCOL_VERSIONS", vocabulary.VersionRange(int(lowest), int(highest)))  # noqa: B010


def _set_clock(ahead_s: float, step_s: float) -> None:
    from protocol.interfaces import clock

    class WrongClock(clock.SystemClock):
        """Clock with a wrong wall time, as on a machine whose clock was set by hand."""

        ahead_s: float

        def wall(self) -> float:
            return time.time() + WrongClock.ahead_s

    def step(*_: object) -> None:
        WrongClock.ahead_s = ahead_s + step_s

    WrongClock.ahead_s = ahead_s
    setattr(clock, "SystemClock", WrongClock)  # noqa: B010
    if step_s:
        signal.signal(signal.SIGUSR1, step)


if __name__ == "__main__":
    main()
