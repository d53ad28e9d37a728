"""Experts against one dense path on domains of real text: held-out nats a byte.

`loss`: a dense path at equal steps (of one microbatch: what the papers compare with), a dense path at equal steps and
tokens, 2x2 experts with a fitted router, the same with documents dealt by chance. The first `--prefix` bytes of each
document, by which routes are chosen, are left out of all losses. Of each file or folder of `--domains` the first 1.1 MB
count; without any, those of this machine. Documents are pieces of 16 KiB, or shorter where those would be fewer than
128.

`rounds`: 2x2 experts with two replicas each, which train on half of the documents and average every 50 inner steps,
against a dense path and against dense models with the parameters of all experts, as more blocks or wider ones; each at
equal steps (a step of one microbatch, as a path has) and at equal steps and tokens.
"""

import math
import statistics
import sys
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import kit
from benchmarks.kit import Solo, evaluate, loss_of, run_of, tell
from node.averaging.anchor.outer_step import OuterRule, outer_rule
from node.data.documents import Documents, is_held_out
from node.data.sources import PIECE_BYTES
from node.data.tokenizers import ByteTokenizer
from node.experts.router import Router, document_router, fit_router, router_digest
from node.model.device import flushed_denormals
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import ConfigError

DOMAIN_BYTES: Final = 1_100_000
LEAST_DOMAIN_BYTES: Final = 2**16
DOCUMENTS: Final = 128  # at least, of all domains together
LEAST_DOCUMENT_BYTES: Final = 2**10
SEQUENCE: Final = 128
ROWS: Final = 4
HELD_OUT: Final = 0.1
LEARNING_RATE: Final = {16: 1.6e-2, 32: 8e-3}
FIT_DOCUMENTS: Final = 4096
Domains = dict[str, bytes]


class MixedSource:
    """The documents of several domains: equal pieces of each text, or each `every`th of them."""

    def __init__(self, domains: Domains, first: int = 0, every: int = 1) -> None:
        size = min(PIECE_BYTES, max(LEAST_DOCUMENT_BYTES, sum(map(len, domains.values())) // DOCUMENTS))
        self._pieces = {
            f"{number}-{name}@{at}": text[at : at + size]
            for number, (name, text) in enumerate(domains.items())
            for at in range(0, len(text), size)
        }
        self.names = sorted(self._pieces)[first::every]

    def read(self, name: str) -> bytes:
        return self._pieces[name]


def domains_of(given: Sequence[Path], most: int) -> Domains:
    """At most `most` bytes of each file or folder, or of this machine's. Raises ConfigError if one is too short."""
    if not given:
        places = {
            "python": (sysconfig.get_path("stdlib"), "*.py"),
            "c-headers": ("/usr/include", "*.h"),
            "licences": ("/usr/share/doc", "copyright"),
            "perl": ("/usr/share/perl", "*.p[lm]"),
        }
        found = {name: _text_of(Path(folder), pattern, most) for name, (folder, pattern) in places.items()}
        return {name: text for name, text in found.items() if len(text) > most // 4}
    found = {str(path): _text_of(path, "*", most) for path in given}
    for name, text in found.items():
        if len(text) < LEAST_DOMAIN_BYTES:
            raise ConfigError(f"{name} is missing or has fewer than {LEAST_DOMAIN_BYTES} readable bytes")
    return found


def _text_of(path: Path, pattern: str, most: int) -> bytes:
    """The text of a file, or of a folder's files one after the other."""
    text = b""
    for file in sorted(path.rglob(pattern)) if path.is_dir() else [path]:
        if len(text) < most and file.is_file() and "site-packages" not in file.parts:
            with suppress(OSError):
                text += file.read_bytes()[: most - len(text)]
    return text


@dataclass(frozen=True, slots=True)
class Arm:
    """Experts and blocks of each stage after stage 0, microbatches of a step, whether a router chooses, replicas of
    each module, width of the feed-forward layers over `hidden`."""

    experts: int = 1
    microbatches: int = 4
    routed: bool = False
    blocks: int = 1
    replicas: int = 1
    feed_forward: float = 3


ARMS: Final = {
    "dense_steps": Arm(microbatches=1),
    "dense_tokens": Arm(),
    "routed": Arm(2, routed=True),
    "random": Arm(2),
}
ROUNDS_ARMS: Final = {
    "dense_steps": Arm(microbatches=1),
    "dense_tokens": Arm(microbatches=8),
    "all_blocks_steps": Arm(microbatches=1, blocks=2),
    "all_blocks_tokens": Arm(microbatches=8, blocks=2),
    "wide_steps": Arm(microbatches=1, feed_forward=22 / 3),
    "wide_tokens": Arm(microbatches=8, feed_forward=22 / 3),
    "routed": Arm(2, routed=True),
    "rounds": Arm(2, routed=True, replicas=2),
}
ROUND_STEPS: Final = 50
ROUNDS_BARS: Final = {f"rounds/{dense}": 0.0 for dense in list(ROUNDS_ARMS)[:6]} | {"rounds/routed": 0.02}
BARS: Final = {"routed/dense_steps": -0.08, "routed/dense_tokens": -0.015, "random/routed": 0.03}
"""Changes of perplexity: at most, at most, at least."""


def manifest_of(arm: Arm, options: Any, seed: int, routing: dict[str, Any] | None = None) -> Manifest:
    hidden, step = options.hidden, arm.microbatches * ROWS * SEQUENCE
    return run_of(
        "experts",
        [0, arm.blocks, arm.blocks],
        seed=seed,
        hidden=hidden,
        heads=2,
        feed_forward=round(arm.feed_forward * hidden),
        sequence=SEQUENCE,
        rows=ROWS,
        microbatches=arm.microbatches,
        model={"attention": "documents"},
        stages={"experts": arm.experts},
        data={"held_out": HELD_OUT},
        sections={} if routing is None else {"routing": routing},
        inner={"learning_rate": LEARNING_RATE.get(hidden, 0.256 / hidden)},
        inner_steps=ROUND_STEPS if arm.replicas == 1 else 1_000_000,  # those of replicas are held by `rounds_of`
        schedule={"warmup_tokens": min(20, options.steps // 2) * step, "total_tokens": options.steps * step},
    )


def routed_manifest(arm: Arm, domains: Domains, options: Any, seed: int) -> tuple[Manifest, Router | None]:
    """The arm's manifest, and the router that is fitted to its documents for training, if it has one."""
    plain = manifest_of(arm, options, seed)
    if not arm.routed:
        return plain, None
    documents = Documents(MixedSource(domains), ByteTokenizer(), seed)
    fitted_to = list(
        documents.openings(lambda name: not is_held_out(seed, name, HELD_OUT), FIT_DOCUMENTS, options.prefix)
    )
    fitted = fit_router(fitted_to, plain.stages.experts_of_each, options.prefix, seed, options.restarts)
    routing = {"router": router_digest(fitted.to_bytes()), "prefix": options.prefix}
    return manifest_of(arm, options, seed, routing), fitted


def train(arm: Arm, domains: Domains, options: Any, seed: int) -> dict[str, Any]:
    """Trains one arm; its held-out loss in nats a byte."""
    manifest, router = routed_manifest(arm, domains, options, seed)
    # Replicas train on a part of the text each, and all arms are measured on the whole.
    *documents, measured = (
        Documents(MixedSource(domains, *share), ByteTokenizer(), seed, document_router(manifest, router))
        for share in (*((replica, arm.replicas) for replica in range(arm.replicas)), ())
    )
    with flushed_denormals():
        replicas = [Solo(manifest, 10**6, None, each, measured, options.prefix) for each in documents]
        meet, trained = rounds_of(replicas, outer_rule(manifest)), replicas[0]
        for step in range(1, options.steps + 1):
            for replica in replicas:
                replica.step()
            if arm.replicas > 1 and (step % ROUND_STEPS == 0 or step == options.steps):
                meet()
        result = evaluate(partial(loss_of, trained.model), trained.texts)
        tokens = sum(replica.trainer.tokens for replica in replicas)
        report: dict[str, Any] = {"loss": round(result["loss"], 4), "tokens": tokens}
        for name, of in result.get("routes", {}).items():
            report.setdefault("routes", {})[name] = [round(of["loss"], 4), of["tokens"]]
    return report


def rounds_of(replicas: Sequence[Solo], rule: OuterRule) -> Callable[[], None]:
    """A round of all modules: an outer step on the mean of the replicas' parameters (arXiv:2311.08105)."""
    modules = [[part for _, parts in replica.model.modules() for part in parts] for replica in replicas]
    parameters = [list(dict.fromkeys(p for part in parts for p in part.parameters())) for parts in modules]
    anchors = [parameter.detach().clone() for parameter in parameters[0]]
    outer = torch.optim.SGD(anchors, rule.learning_rate, rule.momentum, nesterov=True)

    @torch.no_grad()
    def meet() -> None:
        for anchor, *of_replicas in zip(anchors, *parameters, strict=True):
            anchor.grad = anchor - torch.stack(of_replicas).mean(dim=0)
        outer.step()
        for anchor, *of_replicas in zip(anchors, *parameters, strict=True):
            for parameter in of_replicas:
                parameter.copy_(anchor)

    return meet


def measure_loss(options: Any) -> dict[str, Any]:
    return compared(ARMS, BARS, options)


def measure_rounds(options: Any) -> dict[str, Any]:
    return compared(ROUNDS_ARMS, ROUNDS_BARS, options)


def compared(arms: dict[str, Arm], bars: dict[str, float], options: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    domains = domains_of(options.domains or [], options.domain_bytes)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for seed, (name, arm) in product(options.seeds, arms.items()):
        found[name].append(train(arm, domains, options, seed))
        tell(f"seed {seed}, {name}: {found[name][-1]['loss']}")
    changes = {}
    for pair, bar in bars.items():
        one, other = ([each["loss"] for each in found[name]] for name in pair.split("/"))
        differences = [a - b for a, b in zip(one, other, strict=True)]
        changes[pair] = {"change": round(math.expm1(statistics.median(differences)), 4), "bar": bar}
    return {"domains": {name: len(text) for name, text in domains.items()}, "perplexity": changes, "every_seed": found}


if __name__ == "__main__":
    usual = {"hidden": 16, "steps": 1500, "seeds": [1, 2, 3], "prefix": 256, "restarts": 8}
    quick = {"hidden": 8, "steps": 2, "seeds": [1], "restarts": 1, "domain_bytes": 2**14}
    own = {"domains": [Path], "domain_bytes": DOMAIN_BYTES}
    kit.run(__doc__, {"loss": measure_loss, "rounds": measure_rounds}, quick, **own, **usual)
