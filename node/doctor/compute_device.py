"""The check of the compute device: is there a GPU that torch can use, how much memory has it, and does it calculate?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from node.doctor.finding import Finding, Level
from node.model.device import choose_devices

MEASURE_S: Final = 0.3
CPU_SIZE: Final = 512
GPU_SIZE: Final = 4096
LITTLE_MEMORY_BYTES: Final = 2 * 2**30
NVIDIA: Final = Path("/dev/nvidia0")


def look_at_device(wish: str) -> Sequence[Finding]:
    """Checks the devices that a node with `--device WISH` would use.

    Raises:
        ConfigError: they are not there.
    """
    return [
        finding for device in sorted(set(choose_devices(wish).value), key=str) for finding in _look_at(device, wish)
    ]


def _look_at(device: torch.device, wish: str) -> Sequence[Finding]:
    try:
        flops = matmul_flops(device, CPU_SIZE if device.type == "cpu" else GPU_SIZE)
    except RuntimeError as error:  # torch's, of a driver or of memory
        return [
            Finding(
                "device", Level.FAIL, f"{device}: {_first_line(error)}", "Check the driver, and what else uses the GPU."
            )
        ]
    if flops is None:
        return [
            Finding(
                "device",
                Level.FAIL,
                f"{device} multiplies wrongly",
                "Do not train with it: the hardware or driver is broken.",
            )
        ]
    speed = f"a {device.type.upper()} matrix product runs at {flops / 1e9:,.0f} GFLOP/s"
    if device.type == "cuda":
        return [_gpu(device, speed)]
    if device.type == "cpu" and NVIDIA.exists() and wish == "auto":
        fix = "Install a build of torch for CUDA, or check `nvidia-smi`."
        return [
            Finding(
                "device",
                Level.WARN,
                f"there is an NVIDIA GPU, but torch {torch.__version__} cannot use it; {speed}",
                fix,
            )
        ]
    return [Finding("device", Level.OK, f"{device}, {torch.get_num_threads()} threads; {speed}")]


def matmul_flops(device: torch.device, size: int) -> float | None:
    """Measures floating-point operations a second of a float32 product of two [size, size] matrices; None when the
    result is wrong.
    """
    left, right = (torch.ones(size, size, device=device) for _ in range(2))
    product = left @ right  # the first one pays for what is loaded late
    _wait_for(device)
    began, times = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < MEASURE_S:
        product = left @ right
        _wait_for(device)
        times += 1
    right_result = bool((product == size).all())
    return 2 * size**3 * times / elapsed if right_result else None


def _gpu(device: torch.device, speed: str) -> Finding:
    free, total = torch.cuda.mem_get_info(device)
    memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    found = f"{torch.cuda.get_device_name(device)}, {memory}; {speed}"
    if free < LITTLE_MEMORY_BYTES:
        return Finding(
            "device", Level.WARN, found, "Stop what else uses the GPU, or choose another one with --device cuda:N."
        )
    return Finding("device", Level.OK, found)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
