"""A run that starts from an existing model of 135 million parameters: the same logits, and the same training as `solo`.

`transformers` makes a folder with random weights of each family, in the sizes of SmolLM2-135M. `skipstone new
--from-model` makes a run of it, and a swarm of three trains it on the source of Python's standard library: the first
node has the folder, the other two fetch their stages. What `skipstone export LINK` gives before the first round is
compared with the folder; after the steps the swarm's export with that of `solo`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import kit
from node.checkpoint.folder import CheckpointFolder
from node.cli.manifests import starting_from
from node.data.feed import held_out_microbatches
from node.data.places import ToldPlaces
from node.export.hugging_face import byte_tokenizer
from node.export.open_model import open_model
from node.export.source import read_decoder
from node.export.writer import export
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions
from node.observability.events import CatchingUp, Event, NodeStatus, Step
from node.solo.trainer import CheckpointPlan, evaluate, train_solo
from node.start.cut_model import open_start
from protocol.identity.keys import Identity
from protocol.manifest.manifest import Manifest
from protocol.manifest.signing import sign_manifest

CPU = torch.device("cpu")
LOGITS, LOSS, PARAMETERS = 1e-4, 1e-4, 1e-5
"""Largest differences: logits before training; losses and parameters after it."""
SIZES: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
OWN: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        }
    },
    "mistral": {"sliding_window": 1024, "tie_word_embeddings": False, "vocab_size": 24576, "head_dim": 64},
    "qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen3": {"head_dim": 128, "num_hidden_layers": 24},
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
"""Instead of `SIZES` for `--quick`."""
ROWS, SEQUENCE, MICROBATCHES = 1, 64, 2
HELD_OUT = 16
"""Microbatches of held-out text."""


def make_folder(family: str, folder: Path, sizes: dict[str, Any]) -> int:
    """Writes the model; returns the number of its parameters."""
    import transformers

    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    torch.manual_seed(7)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **OWN[family], **sizes})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    return int(model.num_parameters())


def run_of(folder: Path, steps: int) -> Manifest:
    """A run without a round within its steps: then what its replicas have agreed on is what they began with."""
    size = {"hidden": 64, "heads": 2, "feed_forward": 64, "sequence": SEQUENCE}
    base = kit.run_of(
        "from-model",
        [0, 1, 1],
        seed=7,
        **size,
        rows=ROWS,
        microbatches=MICROBATCHES,
        inner_steps=2 * steps,
        inner={"learning_rate": 3e-4},
        schedule={"kind": "constant", "warmup_steps": 5, "total_steps": 1000},
    )
    return starting_from(folder, base, is_default=False, keeps_blocks=False)


def logits_of(folder: Path) -> torch.Tensor:
    """What `transformers` makes of it."""
    import transformers

    tokens = torch.randint(257, (2, SEQUENCE), generator=torch.Generator().manual_seed(4))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(tokens).logits
    return logits


def largest_difference(one: Path, other: Path) -> float:
    """Between the parameters of two exports in one file each."""
    from safetensors import safe_open

    with safe_open(one / "model.safetensors", "pt") as ours, safe_open(other / "model.safetensors", "pt") as theirs:
        names = list(ours.keys())
        return max(float((ours.get_tensor(name) - theirs.get_tensor(name)).abs().max().item()) for name in names)


async def exported(source: str, target: Path, tokenizer: Path) -> None:
    """Writes the model of a link or checkpoint."""
    async with open_model(source, told=ToldPlaces(tokenizer=tokenizer)) as opened:
        await export(opened.source, target, tokenizer_file=tokenizer)


async def held_out_loss(folder: Path, manifest: Manifest) -> float:
    """In nats a token, which is a byte here."""
    async with open_model(str(folder)) as opened:
        decoder = await read_decoder(opened.source, CPU)
    return float(evaluate(decoder, held_out_microbatches(manifest, HELD_OUT))["loss"])


def solo(manifest: Manifest, steps: int, model: Path, folder: Path) -> list[float]:
    """Trains in this process; returns the losses."""
    losses: list[float] = []
    signed = sign_manifest(manifest, Identity.generate())
    train_solo(
        manifest,
        steps=steps,
        device=CPU,
        on_event=lambda event: losses.append(event.loss) if isinstance(event, Step) else None,
        start=open_start(manifest, model),
        saves=CheckpointPlan(CheckpointFolder(folder, signed.run, signed.text)),
    )
    return losses


async def swarm(manifest: Manifest, steps: int, model: Path, work: Path) -> dict[str, Any]:
    """Trains in a swarm, and exports by its link once all nodes serve."""
    options = LocalSwarmOptions(
        peers=3, steps=steps, threads=1, checkpoint_dir=work / "swarm", model=model, checkpoint_every_s=3600
    )
    seen: list[Event] = []
    serving: set[str] = set()
    begun, exporting = time.monotonic(), None
    async with LocalSwarm(manifest, options) as together:
        async for event in together.events():
            seen.append(event)
            if isinstance(event, NodeStatus) and event.state == "serving":
                serving.add(event.peer)
            if len(serving) == 3 and exporting is None:
                kit.tell(f"all serve after {time.monotonic() - begun:.0f} s")
                tokenizer = model / "tokenizer.json"
                exporting = asyncio.create_task(exported(str(together.link), work / "before", tokenizer))
            if together.progress.is_over and exporting is not None:
                await exporting
                together.request_stop()
    fetched = {event.module: event.total_bytes for event in seen if isinstance(event, CatchingUp)}
    return {"losses": [event.loss for event in seen if isinstance(event, Step)], "fetched_bytes": fetched}


def measure_family(family: str, steps: int, sizes: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="from-model-") as name:
        work, model = Path(name), Path(name) / "model"
        parameters = make_folder(family, model, sizes)
        begun = time.monotonic()
        manifest = run_of(model, steps)
        cut_s = time.monotonic() - begun
        kit.tell(f"{family}: {parameters} parameters, cut in {cut_s:.1f} s")
        ours = asyncio.run(swarm(manifest, steps, model, work))
        alone = solo(manifest, steps, model, work / "solo")
        for name in ("swarm", "solo"):
            asyncio.run(exported(str(work / name), work / f"{name}-export", model / "tokenizer.json"))
        first = (logits_of(work / "before") - logits_of(model)).abs().max().item()
        last = (logits_of(work / "swarm-export") - logits_of(work / "solo-export")).abs().max().item()
        losses = max(abs(one - other) for one, other in zip(ours["losses"], alone, strict=True))
        moved = largest_difference(work / "swarm-export", work / "solo-export")
        return {
            "parameters": parameters,
            "cut_s": round(cut_s, 1),
            "fetched_bytes": ours["fetched_bytes"],
            "logits_before": first,
            "logits_after": last,
            "losses": losses,
            "parameters_after": moved,
            "loss_first_and_last": [alone[0], alone[-1]],
            "held_out_before": asyncio.run(held_out_loss(work / "before", manifest)),
            "held_out_after": asyncio.run(held_out_loss(work / "swarm-export", manifest)),
            "met": first <= LOGITS and losses <= LOSS and moved <= PARAMETERS,
        }


def measure(options: Any) -> dict[str, Any]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    sizes = TINY if options.quick else {}
    return {family: measure_family(family, options.steps, sizes) for family in options.families}


def main() -> None:
    kit.run(__doc__, measure, {"families": ["llama"], "steps": 300}, families=tuple(OWN), steps=20)


if __name__ == "__main__":
    main()
