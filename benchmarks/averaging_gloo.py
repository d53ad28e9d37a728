"""torch.distributed's all-reduce over gloo, as a reference: no encryption, no agreement, nobody may fail."""

from __future__ import annotations

import time
from datetime import timedelta
from multiprocessing.connection import Connection

import torch


def gloo_process(connection: Connection, rank: int, count: int, elements: int, store: str) -> None:
    """One of `count` processes that sum a vector; says when each round began and ended. A round for each message."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timedelta(seconds=60)
    )
    values = torch.full((elements,), float(rank))
    connection.send("ready")
    while connection.recv():
        values.fill_(float(rank))
        connection.send("prepared")
        connection.recv()
        begun = time.monotonic()
        dist.all_reduce(values)
        connection.send((begun, time.monotonic()))
        assert values[-1].item() == sum(range(count))
