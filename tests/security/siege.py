"""A swarm of real processes in full work that is attacked, and what tells whether it minds."""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions, node_command
from node.observability.events import MicrobatchCounts, RoundCommitted
from node.pipeline.admission import hidden_tensor
from protocol.interfaces.transport import Contact
from tests.e2e.small_run import Watch, small_run, write_text
from tests.security.adversary import Targets, find_targets
from tests.security.watching import sitecustomize

BESIEGED = [pytest.mark.e2e, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="package")]
PEERS = 4
START_S = 300.0
MAY_GROW_BYTES = 64 * 2**20
MAY_STAY_OPEN = 16


@dataclass(eq=False)
class Siege:
    """A swarm in full work, and what an adversary knows of it."""

    swarm: LocalSwarm
    watch: Watch
    targets: Targets
    folder: Path

    async def goes_on(self, steps: int = 3) -> None:
        """So many more steps are taken, all of honest microbatches."""
        await self.watch.step(self.swarm.progress.step + steps)

    async def holds_a_round(self) -> RoundCommitted:
        event = await self.watch.until(lambda e: isinstance(e, RoundCommitted) and len(e.members) > 1)
        assert isinstance(event, RoundCommitted)
        return event

    def process_of(self, target: Contact) -> int:
        index = next(peer.index for peer in self.swarm.peers if peer.peer == target.peer)
        return self.swarm.processes()[index]

    def peak_bytes(self, target: Contact) -> int:
        """The most memory that the process has had so far (VmHWM)."""
        status = Path(f"/proc/{self.process_of(target)}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) * 1024

    def open_files(self, target: Contact) -> int:
        return sum(1 for _ in Path(f"/proc/{self.process_of(target)}/fd").iterdir())

    def first_number(self) -> int:
        """Of the microbatches. Nobody but the hops can know it: here it is taken from the data node's own log."""
        events = map(json.loads, self.events().splitlines())
        return min(int(event["microbatch"].partition("#")[2]) for event in events if event["event"] == "completed")

    def logs(self) -> str:
        """All that every process of the swarm has written to standard error so far."""
        return "".join(path.read_text(errors="surrogateescape") for path in sorted((self.folder / "stderr").iterdir()))

    def events(self) -> str:
        return "".join(path.read_text() for path in sorted((self.folder / "events").iterdir()))

    def command_lines(self) -> str:
        group = set(self.swarm.processes().values())
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                if entry.name.isdigit() and os.getpgid(int(entry.name)) in group:
                    found.append((entry / "cmdline").read_bytes().decode(errors="replace"))
        return "\n".join(found)

    def is_unhurt(self) -> None:
        assert self.swarm.ends == {}
        logs = self.logs()
        assert "Traceback" not in logs, logs[logs.index("Traceback") :][:3000]

    async def to_the_end(self) -> MicrobatchCounts:
        self.swarm.request_stop()
        await self.watch.to_the_end(self.swarm)
        assert {end.exit_code for end in self.swarm.ends.values()} == {0}
        logs = self.logs()
        assert "Traceback" not in logs, logs[logs.index("Traceback") :][:3000]
        [counts] = [summary.microbatches for summary in self.watch.summaries() if summary.module == "0.0"]
        return counts


@asynccontextmanager
async def siege(folder: Path, peers: int = PEERS, *, forked: bool = False) -> AsyncIterator[Siege]:
    """A data node, two replicas of stage 1 (one, of three peers), one of stage 2; at work when the block begins."""
    # Adversaries also act as data nodes.
    manifest = small_run(write_text(folder / "text"), blocks=(0, 1, 1), inner_steps=20, is_open=True)
    (folder / "stderr").mkdir()
    options = LocalSwarmOptions(peers=peers, threads=1, log_dir=folder / "events", log_level="debug")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(sitecustomize.FOLDER, str(folder / "stderr"))
        patch.setenv("PYTHONPATH", str(Path(sitecustomize.__file__).parent))
        # A named command is not forked: each node is an interpreter, which imports `sitecustomize` and starts slowly.
        async with LocalSwarm(manifest, options, command=None if forked else node_command()) as swarm:
            watch = Watch(swarm)
            async with asyncio.timeout(START_S):
                while swarm.progress.step < 3:
                    await asyncio.sleep(0.1)
            targets = await find_targets(swarm.link, hidden_tensor(manifest), manifest.modules())
            yield Siege(swarm, watch, targets, folder)
