"""Makes the worker for the module that a node hosts: its parameters, its optimizer, its speed."""

from __future__ import annotations

import time

import torch
from torch import nn

from node.admission import hidden_tensor
from node.data_worker import DataWorker, StageZero
from node.hop_worker import HopWorker
from node.model.build import build_block_stack, build_embedding, build_head
from node.model.parts import HIDDEN_TYPES
from node.model.visit import backward, forward
from node.optimization import Accumulator, InnerOptimizer
from node.options import DEFAULT_SLOTS
from node.room import require_room
from node.tensors import device_errors
from protocol.manifest import Manifest
from swarm.vocabulary import ModuleId

PROBES = 3


def host_hop(
    manifest: Manifest, module: ModuleId, device: torch.device, graph_budget_bytes: int, slots: int = DEFAULT_SLOTS
) -> HopWorker:
    """A replica of a module of stage 1 or above, with the run's initial weights, for a peer with so many slots.

    Raises:
        ResourceExhausted: this machine has no room for it.
    """
    require_room(manifest, (module,), device, slots)
    with device_errors():
        part = build_block_stack(manifest, module).to(device)
        total = Accumulator(part)
        optimizer = InnerOptimizer(manifest.training, [total])
    tensor, tokens = hidden_tensor(manifest), manifest.microbatch_tokens
    return HopWorker(part, total, optimizer, tensor, tokens, device, graph_budget_bytes)


def host_stage_zero(manifest: Manifest, device: torch.device, slots: int = DEFAULT_SLOTS) -> DataWorker:
    """A data node's replica of stage 0, with the run's initial weights. Raises as `host_hop`."""
    require_room(manifest, (ModuleId(0),), device, slots)
    with device_errors():
        embedding, head = build_embedding(manifest).to(device), build_head(manifest).to(device)
        sums = Accumulator(embedding), Accumulator(head)
        stage = StageZero(embedding, head, *sums, InnerOptimizer(manifest.training, sums))
    return DataWorker(stage, hidden_tensor(manifest), manifest.microbatch_tokens, device)


def measure_speed(part: nn.Module, manifest: Manifest, device: torch.device) -> float:
    """Tokens per second of forward and backward on this device: the best of a few, the first of which warms up."""
    source = torch.zeros(manifest.hidden_shape, dtype=HIDDEN_TYPES[manifest.model.dtype], device=device)
    fastest = float("inf")
    with device_errors():
        for _ in range(PROBES):
            begun = time.perf_counter()
            visit = forward(part, source)
            gradients = backward(part, visit, torch.ones_like(visit.result))
            assert gradients.source is not None
            gradients.source.sum().item()  # waits for a device that works asynchronously
            fastest = min(fastest, time.perf_counter() - begun)
    return manifest.microbatch_tokens / fastest
