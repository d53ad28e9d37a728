"""The test whether this kernel can delay packets itself (`tc` with netem), which the emulation does not need.

It stands alone because the emulation does without it; the command only tells the person.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from protocol.libp2p.child_environment import child_environment
from swarm.vocabulary.types import Reasoned

_TRY_S = 5.0


def netem_works() -> Reasoned[bool]:
    """Whether netem works on the loopback device of a network namespace that is gone again at once; nothing of this
    machine is changed.
    """
    if sys.platform != "linux":
        return Reasoned(False, "netem is a thing of Linux")
    if os.geteuid() != 0:
        return Reasoned(False, "netem needs root")
    unshare, tc = shutil.which("unshare"), shutil.which("tc")
    if unshare is None or tc is None:
        return Reasoned(False, "the commands `unshare` (util-linux) and `tc` (iproute2) are not both installed")
    command = (unshare, "--net", tc, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    environment = child_environment(os.environ)
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=_TRY_S, check=False, env=environment)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        return Reasoned(False, f"netem could not be tried: {error}")
    if tried.returncode:
        lines = tried.stderr.strip().splitlines()
        return Reasoned(False, f"the kernel refuses netem: {lines[0] if lines else tried.returncode}")
    return Reasoned(True, "`tc` with netem works here")
