"""A data set of the hub read file by file, against fetching the whole set first.

    python benchmarks/hub.py [--files 40] [--rows 1000] [--row-bytes 1600] [--megabits 100] [--kept-files 4]

A hub on loopback sends JSON Lines over one emulated link. Measured are the bytes and seconds until a data node has its
first document, the bytes that lie on its disk, what two data nodes read and fetch in an epoch, and what is fetched to
go on in the middle of it. The whole set is fetched by `huggingface_hub.snapshot_download`, as `datasets` does before it
makes its own files of it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from node.data.documents import Documents, FileShare, Fragment, Place, everything, owner
from node.data.hub import HubStream
from node.data.tokenizers import ByteTokenizer
from swarm.vocabulary.types import PeerId
from tests.node.hub_on_loopback import COMMIT, NAME, LoopbackHub, serving

A, B = PeerId("a"), PeerId("b")
SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What the hub has, and how fast it comes."""

    files: int = 40
    rows: int = 1000
    """Of each file."""
    row_bytes: int = 1600
    megabits: float = 100.0
    kept_files: int = 4
    """That may lie on the disk."""


def measured(task: Task, home: Path) -> dict[str, Any]:
    """All figures, by name."""
    hub = _hub(task)
    size = sum(map(len, hub.files.values()))
    kept = task.kept_files * max(map(len, hub.files.values()))
    with serving(hub, home):
        hub.rate = task.megabits * 125_000
        began = time.monotonic()
        snapshot_download(NAME, repo_type="dataset", revision=COMMIT, local_dir=home / "whole", token=False)
        whole = time.monotonic() - began
        hub.bytes = 0
        began = time.monotonic()
        stream = HubStream(NAME, COMMIT, kept_bytes=kept)
        documents = Documents(stream, ByteTokenizer(), SEED)
        next(documents.epoch(Place(), everything))
        first = {"seconds": round(time.monotonic() - began, 3), "bytes": hub.bytes}
        hub.rate = None
        return {
            "task": asdict(task),
            "whole set": {"bytes": size, "seconds": round(whole, 3)},
            "first document": first,
            "disk": _on_disk(documents, stream, home, kept),
            "two data nodes": _of_two(hub, kept),
            "resumed": _resumed(hub, kept),
        }


def _hub(task: Task) -> LoopbackHub:
    chance = random.Random(SEED)
    files = {}
    for number in range(task.files):
        rows = ({"text": chance.randbytes(task.row_bytes // 2).hex()} for _ in range(task.rows))
        files[f"data/{number:05}.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows).encode()
    return LoopbackHub(files)


def _on_disk(documents: Documents, stream: HubStream, home: Path, kept: int) -> dict[str, int]:
    """The most bytes of files that were on the disk in an epoch, looked at every 100 documents."""
    most = most_counted = 0
    for number, _ in enumerate(documents.epoch(Place(), everything, ahead=True)):
        if number % 100 == 0:
            counted = stream.bytes
            most_counted = max(most_counted, counted)
            most = max(most, _bytes_below(home / "skipstone"))
    return {"allowed": kept, "most": most, "most_with_those_under_way": most_counted}


def _bytes_below(folder: Path) -> int:
    """Each file once, also one that gets its name while this looks."""
    sizes = {}
    for path in folder.rglob("*"):
        try:
            found = path.stat()
        except FileNotFoundError:  # it has just gone
            continue
        if path.is_file():
            sizes[found.st_ino] = found.st_size
    return sum(sizes.values())


def _epoch_of(own: PeerId, kept: int) -> Iterator[Fragment]:
    """An epoch of one of two data nodes."""
    stream = HubStream(NAME, COMMIT, kept_bytes=kept)
    share = FileShare(own, len(stream.files), partial(owner, SEED))
    mine, files = (partial(_asked, of, (A, B)) for of in (share.has_row, share.has_file))
    return Documents(stream, ByteTokenizer(), SEED).epoch(Place(), mine, files, ahead=True)


def _asked(has: Any, data_nodes: tuple[PeerId, ...], name: str) -> bool:
    return bool(has(name, data_nodes))


def _of_two(hub: LoopbackHub, kept: int) -> dict[str, int]:
    names, fetched = [], []
    for own in (A, B):
        hub.bytes = 0
        names.append({fragment.name for fragment in _epoch_of(own, kept)})
        fetched.append(hub.bytes)
    return {
        "rows_of_a": len(names[0]),
        "rows_of_b": len(names[1]),
        "rows_of_both": len(names[0] & names[1]),
        "rows_of_none": sum(held.count(b"\n") for held in hub.files.values()) - len(names[0] | names[1]),
        "bytes_of_a": fetched[0],
        "bytes_of_b": fetched[1],
    }


def _resumed(hub: LoopbackHub, kept: int) -> dict[str, Any]:
    """From the middle of an epoch on, with nothing on the disk."""
    all_rows = sum(held.count(b"\n") for held in hub.files.values())
    epoch = Documents(HubStream(NAME, COMMIT, kept_bytes=kept), ByteTokenizer(), SEED).epoch(Place(), everything)
    rest = list(islice(epoch, all_rows // 2 + 7, None))
    hub.bytes = 0
    again = Documents(HubStream(NAME, COMMIT, kept_bytes=kept), ByteTokenizer(), SEED).epoch(rest[0].start, everything)
    first = next(again)
    until_first = hub.bytes
    given = [first, *again]
    equal = [(a.start, a.tokens.tolist()) for a in rest] == [(b.start, b.tokens.tolist()) for b in given]
    return {"documents": len(given), "equal": equal, "bytes_until_first": until_first}


def main() -> None:
    """Prints the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in asdict(Task()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    with tempfile.TemporaryDirectory() as home:
        print(json.dumps(measured(Task(**vars(parser.parse_args())), Path(home)), indent=2))


if __name__ == "__main__":
    main()
