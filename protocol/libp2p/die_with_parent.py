"""Runs a command that ends when its parent ends: `python -I -S die_with_parent.py PARENT_PID COMMAND [ARGUMENT...]`.

Between fork and exec of another program there is no room for code of ours, so this small program goes between. On Linux
the kernel is asked to kill the command when its parent dies, however that happens (`prctl(2)`, PR_SET_PDEATHSIG; it
survives execve). Elsewhere nothing is asked, and the node kills the process group instead. It uses the standard library
alone, because it runs isolated from everything installed.

It stands alone because it is run as a program, not imported.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1
_MAX_OPEN_FILES = 4096
"""p2pd has no limits of its own; its connection manager prunes at 512 connections."""


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the kernel was asked
            sys.exit(1)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(_MAX_OPEN_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    os.execv(command[0], command)  # noqa: S606  # no shell wanted


if __name__ == "__main__":
    main()
