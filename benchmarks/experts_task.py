"""The task of `benchmarks/experts.py`: some domains of real text as one source, and the arms' manifests."""

from __future__ import annotations

import sys
import sysconfig
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from node.data.documents import Documents, is_held_out
from node.data.sources import PIECE_BYTES
from node.data.tokenizers import ByteTokenizer
from node.experts.fitting import RESTARTS, fit_router
from node.experts.router import Router, document_router, router_digest
from protocol.manifest.manifest import Manifest, manifest_from_table
from swarm.vocabulary.errors import ConfigError

DOMAIN_BYTES: Final = 1_100_000
LEAST_DOMAIN_BYTES: Final = 2**16
DOCUMENTS: Final = 128
"""Of all domains together at least, where the texts are short: documents are then shorter than in sources of texts."""
LEAST_DOCUMENT_BYTES: Final = 2**10
"""Four times as long as what routes are chosen by."""
SEQUENCE: Final = 128
ROWS: Final = 4
HELD_OUT: Final = 0.1
INCLUDES: Final = Path("/usr/include")
LEARNING_RATE: Final = {16: 1.6e-2, 32: 8e-3}
FIT_DOCUMENTS: Final = 4096


@dataclass(frozen=True, slots=True)
class Domain:
    name: str
    text: bytes


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train.

    Args:
        experts: of each stage after stage 0.
        microbatches: of a step.
        routed: by a router; else by chance.
        text: the share of each domain's text that there is.
    """

    experts: int = 1
    microbatches: int = 4
    routed: bool = False
    text: float = 1.0


ARMS: Final = {
    "dense_steps": Arm(microbatches=1),
    "dense_tokens": Arm(),
    "routed": Arm(2, routed=True),
    "random": Arm(2),
}
MORE_ARMS: Final = {
    "routed_3x3": Arm(3, routed=True),
    "dense_half_text": Arm(text=0.5),
    "routed_3x3_half_text": Arm(3, routed=True, text=0.5),
}


class MixedSource:
    """The documents of several domains: pieces of their text, of one size."""

    def __init__(self, domains: Sequence[Domain], share: float = 1.0) -> None:
        """`share` is that of each domain's text that there is. Whatever it is, documents are equally long."""
        size = min(PIECE_BYTES, max(LEAST_DOCUMENT_BYTES, sum(len(domain.text) for domain in domains) // DOCUMENTS))
        self._pieces = {
            f"{number}-{domain.name}@{at}": domain.text[at : at + size]
            for number, domain in enumerate(domains)
            for at in range(0, int(len(domain.text) * share), size)
        }
        self.names = sorted(self._pieces)

    def read(self, name: str) -> bytes:
        return self._pieces[name]


def domains_of(files: Sequence[Path]) -> list[Domain]:
    """The domains in the files, or in all files below a folder; without any those that this machine has.

    Raises:
        ConfigError: a file or folder is not there, or too short.
    """
    if files:
        return _given(files)
    library = Path(sysconfig.get_path("stdlib"))
    found = {
        "python": _joined([path for path in _files(library, "*.py") if "site-packages" not in path.parts]),
        "c-headers": _joined(_files(INCLUDES, "*.h")),
        "licences": _joined(
            _files(Path("/usr/share/common-licenses"), "*") + _files(Path("/usr/share/doc"), "copyright")
        ),
        "perl": _joined(_files(Path("/usr/share/perl"), "*.p[lm]")),
    }
    return [Domain(name, text) for name, text in found.items() if len(text) > DOMAIN_BYTES // 4]


def _given(files: Sequence[Path]) -> list[Domain]:
    called = Counter(path.name for path in files)
    domains = []
    for path in files:
        text = _joined([path] if path.is_file() else _files(path, "*"))
        if not path.exists():
            raise ConfigError(f"there is no file or folder {path}")
        if len(text) < LEAST_DOMAIN_BYTES:
            raise ConfigError(
                f"{path} has {len(text)} bytes that can be read; a domain takes {LEAST_DOMAIN_BYTES} at least"
            )
        domains.append(Domain(path.name if called[path.name] == 1 else str(path), text))
    return domains


def documents_of(
    domains: Sequence[Domain], seed: int, share: float, manifest: Manifest, router: Router | None
) -> Documents:
    return Documents(MixedSource(domains, share), ByteTokenizer(), seed, document_router(manifest, router))


def manifest_of(arm: Arm, hidden: int, steps: int, seed: int, routing: dict[str, Any] | None = None) -> Manifest:
    step = arm.microbatches * ROWS * SEQUENCE
    table: dict[str, Any] = {
        "protocol": 2,
        "name": "experts",
        "seed": seed,
        "model": {
            "vocabulary": 257,
            "hidden": hidden,
            "heads": 2,
            "kv_heads": 2,
            "feed_forward": 3 * hidden,
            "sequence": SEQUENCE,
            "attention": "documents",
        },
        "stages": {"blocks": [0, 1, 1], "experts": arm.experts},
        "data": {"held_out": HELD_OUT},
        "training": {
            "rows": ROWS,
            "inner_tokens": step,
            "inner_steps": 10**6,
            "outer": {"learning_rate": 1.0, "momentum": 0.0},
            "inner": {"learning_rate": LEARNING_RATE.get(hidden, 0.256 / hidden)},
            "schedule": {"warmup_tokens": min(20, steps // 2) * step, "total_tokens": steps * step},
        },
    }
    return manifest_from_table(table if routing is None else table | {"routing": routing})


def routed_manifest(
    arm: Arm, domains: Sequence[Domain], hidden: int, steps: int, seed: int, prefix: int, restarts: int = RESTARTS
) -> tuple[Manifest, Router | None]:
    """The arm's manifest, and the router that is fitted to its documents for training, if it has one."""
    plain = manifest_of(arm, hidden, steps, seed)
    if not arm.routed:
        return plain, None
    documents = Documents(MixedSource(domains, arm.text), ByteTokenizer(), seed)
    fitted_to = list(documents.openings(lambda name: not is_held_out(seed, name, HELD_OUT), FIT_DOCUMENTS, prefix))
    fitted = fit_router(fitted_to, plain.stages.experts_of_each, prefix, seed, restarts)
    routing = {"router": router_digest(fitted.router.to_bytes()), "prefix": prefix}
    return manifest_of(arm, hidden, steps, seed, routing), fitted.router


def _files(folder: Path, pattern: str) -> list[Path]:
    return sorted(path for path in folder.rglob(pattern) if path.is_file()) if folder.is_dir() else []


def _joined(paths: Sequence[Path]) -> bytes:
    """The text of the files one after the other, as much as a domain takes."""
    parts, size = [], 0
    for path in paths:
        if size >= DOMAIN_BYTES:
            break
        try:
            parts.append(path.read_bytes()[: DOMAIN_BYTES - size])
        except OSError:
            continue
        size += len(parts[-1])
    return b"".join(parts)
