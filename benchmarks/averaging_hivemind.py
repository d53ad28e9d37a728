"""hivemind's DecentralizedAverager: one averager in each process, its matchmaking done before the clock starts."""

from __future__ import annotations

import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

MATCHMAKING_S = 3.0
PATIENCE_S = 60.0


def averager_process(connection: Connection, count: int, elements: int, codec: str, peers: list[str]) -> None:
    """One of `count` averagers, in half precision (with NumPy 2.4 its 8-bit codecs fail) or float32; says when each
    all-reduce began and ended, or None when it failed. A round for each message."""
    from hivemind.averaging import DecentralizedAverager
    from hivemind.compression import Float16Compression, NoCompression
    from hivemind.dht import DHT

    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # its averager is a process that cannot be started otherwise
    dht = DHT(initial_peers=peers, start=True)
    averager = DecentralizedAverager(
        [torch.randn(elements)],
        dht,
        prefix="bench",
        target_group_size=count,
        min_group_size=count,
        min_matchmaking_time=MATCHMAKING_S,
        request_timeout=1.0,
        compression=Float16Compression() if codec == "FLOAT16" else NoCompression(),
        start=True,
    )
    connection.send([str(address) for address in dht.get_visible_maddrs()])
    try:
        while connection.recv():
            control = averager.step(wait=False, require_trigger=True, timeout=PATIENCE_S)
            connection.send(is_matched(control))
            connection.recv()
            connection.send(all_reduced(control))
    finally:
        averager.shutdown()
        dht.shutdown()


def is_matched(control: Any) -> bool:
    """Waits until the group has been found."""
    from hivemind.averaging.control import AveragingStage

    deadline = time.monotonic() + PATIENCE_S
    while control.stage != AveragingStage.AWAITING_TRIGGER:
        if control.done() or time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def all_reduced(control: Any) -> tuple[float, float] | None:
    begun = time.monotonic()
    try:
        control.allow_allreduce()
        control.result(PATIENCE_S)
    except Exception as error:
        print(f"hivemind: a round failed: {error!r:.200}", file=sys.stderr)
        return None
    return begun, time.monotonic()
