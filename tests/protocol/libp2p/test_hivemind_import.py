"""The DHT process imports what it needs of hivemind and nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECK = """
from protocol.libp2p import hivemind_import
hivemind_import.install()
import protocol.dht.dht_node, sys
heavy = {"torch", "numpy", "grpc", "hivemind.optim", "hivemind.averaging", "hivemind.moe"} & set(sys.modules)
assert not heavy, heavy
"""


def test_the_dht_comes_without_torch() -> None:
    subprocess.run([sys.executable, "-c", CHECK], cwd=Path(__file__).parents[3], check=True)
