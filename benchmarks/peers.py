"""One process of what `head_to_head` compares with; runs in the Python of `--peers-python`, without Skipstone.

`python -m benchmarks.peers JSON` trains until it is killed and prints an event for each step, as `skipstone --json`
does. The JSON has what `head_to_head.start` gives it.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn

from benchmarks.plain import Decoder, loss_of

PATIENCE: Any = timedelta(seconds=120)


def initialised(part: Decoder, all_blocks: int) -> Decoder:
    """Fills the matrices with random values of the deviations that Skipstone's have."""
    for name, matrix in part.named_parameters():
        if matrix.dim() > 1:
            deviation = matrix.shape[1] ** -0.5
            if "embedding" in name or "lm_head" in name:
                deviation = 0.02
            elif ".out." in name or ".down." in name:
                deviation *= (2 * all_blocks) ** -0.5
            nn.init.normal_(matrix, std=deviation)
    return part


def batches(own: Any, rows: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows at random places of the text, and their labels."""
    text = torch.frombuffer(bytearray(Path(own.text).read_bytes()), dtype=torch.uint8)
    generator, length = torch.Generator().manual_seed(seed), own.model.sequence + 1
    while True:
        places = torch.randint(0, len(text) - length, (rows,), generator=generator).tolist()
        found = torch.stack([text[place : place + length] for place in places]).long()
        yield found[:, :-1].contiguous(), found[:, 1:].contiguous()


def adamw(own: Any, parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, own.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)


def train(own: Any, net: nn.Module, optimizer: Any, groups: Any, rows: int, compute: Callable[..., Any] | None) -> None:
    """Takes steps until killed. `groups` has the learning rates; `compute` returns the loss, or None if it has none."""
    tokens = 0
    for number, (x, y) in enumerate(batches(own, rows, own.seed if compute else own.seed + own.rank)):
        for group in groups:
            group["lr"] = own.learning_rate * min(1.0, (number + 1) / own.warmup_steps)
        if compute is None:
            loss = loss_of(net(x), y)
            loss.backward()
        else:
            loss = compute(x, y)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tokens += y.numel()
        if loss is not None:
            print(json.dumps({"event": "step", "tokens": tokens, "loss": float(loss)}), flush=True)


def solo(own: Any, net: Decoder) -> None:
    optimizer = adamw(own, net.parameters())
    train(own, net, optimizer, optimizer.param_groups, own.rows * own.world, None)


def hivemind_local(own: Any, net: Decoder) -> None:
    """Local steps and the mean of parameters every epoch, 8 bits."""
    import hivemind
    from hivemind.compression import Uniform8BitQuantization

    place = Path(own.folder) / "addresses"
    while own.rank and not place.exists():
        time.sleep(0.2)
    known = {"initial_peers": place.read_text().split()} if own.rank else {}
    here = [f"/ip4/{own.addresses[own.rank]}/tcp/4001"]
    dht = hivemind.DHT(host_maddrs=here, start=True, use_relay=False, use_auto_relay=False, **known)
    if not own.rank:
        place.with_suffix(".new").write_text(" ".join(map(str, dht.get_visible_maddrs())))
        place.with_suffix(".new").rename(place)
    sizes = {"batch_size_per_step": own.rows, "target_batch_size": own.rows * own.world * own.inner_steps}
    times = {"matchmaking_time": 3.0, "averaging_timeout": PATIENCE.total_seconds()}
    codecs = dict.fromkeys(("grad_compression", "state_averaging_compression"), Uniform8BitQuantization())
    trained = {"params": net.parameters(), "optimizer": lambda parameters: adamw(own, parameters)}
    shape: Any = {**trained, **sizes, **times, **codecs, "use_local_updates": True}
    optimizer = hivemind.Optimizer(dht=dht, run_id="head-to-head", **shape)
    train(own, net, optimizer, optimizer.state_averager.optimizer.param_groups, own.rows, None)


def torchft_diloco(own: Any, net: Decoder) -> None:
    """DiLoCo in float32: torchft's 8 bits need a GPU."""
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    host, lighthouse = own.addresses[own.rank], f"{own.addresses[0]}:29600"
    port, others = 29610 + own.rank, 10_000  # on one device the stores share all addresses
    servers = [] if own.rank else [LighthouseServer(lighthouse, own.world, others)]
    servers.append(TCPStore(host, port, is_master=True, wait_for_workers=False))
    where = {"hostname": host, "store_addr": host, "store_port": port, "lighthouse_addr": f"http://{lighthouse}"}
    whole = {"rank": 0, "world_size": 1, "min_replica_size": 1, "replica_id": f"peer{own.rank}"}
    waits = {"timeout": PATIENCE, "quorum_timeout": PATIENCE, "use_async_quorum": False}
    # All begin alike, and the server of a first synchronisation names the host, which other namespaces do not know.
    state: Any = {"load_state_dict": lambda state: None, "state_dict": dict, "init_sync": False}
    manager = Manager(ProcessGroupGloo(timeout=PATIENCE), **where, **whole, **waits, **state)
    optimizer = adamw(own, net.parameters())
    outer = torch.optim.SGD(net.parameters(), own.outer_rate, own.outer_momentum, nesterov=own.outer_momentum > 0)
    with DiLoCo(manager, [net], optimizer, outer, sync_every=own.inner_steps):
        train(own, net, optimizer, optimizer.param_groups, own.rows, None)


def torch_pipe(own: Any, net: Decoder) -> None:
    """1F1B over gloo."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group("gloo", f"tcp://{own.addresses[0]}:29511", rank=own.rank, world_size=own.world)
    stage = PipelineStage(net, own.rank, own.world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=own.microbatches, loss_fn=loss_of)

    def compute(x: Tensor, y: Tensor) -> float | None:
        losses: list[Tensor] = []
        last = {"target": y, "losses": losses} if own.rank == own.world - 1 else {}
        schedule.step(*(() if own.rank else (x,)), **last)
        return sum(map(float, losses)) / len(losses) if losses else None

    optimizer = adamw(own, net.parameters())
    train(own, net, optimizer, optimizer.param_groups, own.rows * own.world, compute)


def main(own: Any) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(own.seed)
    os.environ["GLOO_SOCKET_IFNAME"] = own.device
    first, last = own.rank == 0, own.rank == own.world - 1
    ends = (first, last, torch.bfloat16) if own.arm == "torch-pipe" else ()
    net = Decoder(own.model, own.blocks[own.rank] if ends else sum(own.blocks), *ends)
    arm = {f.__name__.replace("_", "-"): f for f in (solo, hivemind_local, torchft_diloco, torch_pipe)}[own.arm]
    arm(own, initialised(net, sum(own.blocks)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1], object_hook=lambda table: SimpleNamespace(**table)))
