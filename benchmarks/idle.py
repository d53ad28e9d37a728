"""What an idle node sends and computes for the swarm, by the number of nodes: bytes a second, share of a CPU core.

Real nodes with a stage each, in network namespaces of this machine (root, `ip`), whose devices count what leaves.
`missing`: nobody hosts stage 0. `complete`: one more peer announces it (`python -m benchmarks.idle peer LINK HOST`) and
launches nothing. Figures are means of the nodes over `seconds`, from `settle` seconds after the last node serves.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import kit
from benchmarks.kit import ROOT, tell
from node.network.session import visit
from protocol.manifest.join_link import parse_link
from swarm.vocabulary.types import ModuleId, PeerState
from tests.e2e.home_network import SplitNetwork, split_network

BLOCK_STAGES: Final = 4
PATIENCE_S: Final = 600.0
FLOOR_BYTES, BYTES_A_PEER, MOST_CPU = 2000.0, 50.0, 0.01


async def announce_stage_zero(link: str, host: str) -> None:
    """Announces a data node that launches nothing, until the process is ended."""
    async with visit(parse_link(link), host) as session:
        signed = await session.fetch_manifest(PATIENCE_S)
        session.own.take(ModuleId(0))
        session.own.state = PeerState.SERVING
        session.membership_sync.watch(signed.manifest.modules())
        session.membership_sync.announce()
        await asyncio.Event().wait()


def start(stack: ExitStack, network: SplitNetwork, index: int, folder: Path, *words: str) -> None:
    """Starts a Python module in the namespace of a node until the end of the stack."""
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SKIPSTONE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    command = ("ip", "netns", "exec", f"{network.hub}-{index}", sys.executable, "-P", "-m", *words)
    with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
        process = subprocess.Popen(command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
    stack.callback(process.wait, 120)
    stack.callback(process.terminate)


def until(what: str, met: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not met():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.2)


def spent(network: SplitNetwork, nodes: Iterable[int]) -> Counter[str]:
    """Returns the bytes that the nodes' namespaces have sent, and the CPU seconds of their processes, by kind."""
    found = Counter[str]()
    for namespace in (f"{network.hub}-{index}" for index in nodes):
        shown = output("ip", "-n", namespace, "-s", "-j", "link", "show", "eth0")
        found["bytes"] += json.loads(shown)[0]["stats64"]["tx"]["bytes"]
        for process in output("ip", "netns", "pids", namespace).split():
            command = Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
            ticks = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
            kind = "p2pd" if "/p2pd" in command.split(" ")[0] else "dht" if "protocol.dht" in command else "node"
            found[kind] += sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return found


def output(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def one(nodes: int, *, complete: bool, settle_s: float, seconds: float) -> dict[str, Any]:
    with TemporaryDirectory() as name, split_network("a" * (nodes + complete)) as network, ExitStack() as stack:
        folder, every = Path(name), range(nodes)
        environment, run, link = {**os.environ, "SKIPSTONE_HOME": name}, folder / "run.toml", folder / "link0"
        new = (sys.executable, "-P", "-m", "skipstone", "new", str(run))
        subprocess.run(new, check=True, capture_output=True, cwd=ROOT, env=environment)
        for index in range(nodes):
            host, place = network.addresses.format(index + 1), folder / str(index)
            words = ("node", "join", str(link if index else run), "--yes", "--json", "--threads", "1")
            where = ("--stage", str(1 + index % BLOCK_STAGES), "--listen", host, "--advertise", host)
            more = ("--reach", "direct", "--link-file", str(folder / f"link{index}"))
            start(stack, network, index, place, *words, *where, *more)
            until("no link", link.exists)
        outputs = [folder / str(index) / "out" for index in every]
        until("some do not serve", lambda: all('"state":"serving"' in each.read_text() for each in outputs))
        if complete:
            words = ("benchmarks.idle", "peer", link.read_text().strip(), network.addresses.format(nodes + 1))
            start(stack, network, nodes, folder / str(nodes), *words)
        # A new link keeps look-ups frequent for a minute, and the last peer begins its links now.
        time.sleep(settle_s * (1 + complete))
        began, before = time.monotonic(), spent(network, every)
        time.sleep(seconds)
        after, elapsed = spent(network, every), (time.monotonic() - began) * nodes
        rates = {kind: (after[kind] - before[kind]) / elapsed for kind in after}
        rate, share = rates.pop("bytes"), {kind: round(each, 4) for kind, each in rates.items()}
        bar = FLOOR_BYTES + BYTES_A_PEER * (nodes - 1 + complete)
        stages = "complete" if complete else "missing"
        row: dict[str, Any] = {"nodes": nodes, "stages": stages, "bytes_per_s": round(rate), "bar": round(bar)}
        row |= {"cpu": round(sum(share.values()), 4), "cpu_of": share}
        tell(row)
        return row


def measure(options: Any) -> dict[str, Any]:
    shape = {"settle_s": options.settle, "seconds": options.seconds}
    wanted = [(int(count), complete) for count in options.nodes.split(",") for complete in (False, True)]
    return {"rows": [one(count, complete=complete, **shape) for count, complete in wanted], "most_cpu": MOST_CPU}


if __name__ == "__main__":
    if sys.argv[1:2] == ["peer"]:
        asyncio.run(announce_stage_zero(*sys.argv[2:]))
    else:
        quick = {"nodes": "2", "settle": 5.0, "seconds": 5.0}
        kit.run(__doc__, measure, quick, nodes="4,8,16", settle=60.0, seconds=40.0)
