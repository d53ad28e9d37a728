"""A data node without an invitation gets no work done; the author's guest does, and every peer in an open run."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions
from node.observability.events import Step
from node.pipeline.admission import hidden_tensor
from protocol.frames.frames import encode_chunk
from protocol.identity.invitations import NOT_INVITED
from protocol.identity.keys import Identity
from protocol.manifest.signing import sign_manifest
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.pipeline_messages import Receipt, ReceiptStatus
from swarm.vocabulary.types import Hop, ModuleId
from swarm.vocabulary.types import Path as Route
from tests.e2e.home_network import joined
from tests.e2e.small_run import Watch, open_run, skipstone, small_run, write_text
from tests.security.adversary import Targets, find_targets, header


async def first_receipt(targets: Targets) -> Receipt:
    """The answer to the first frame of a stranger that announces stage 0."""
    persona, victim = targets.persona(), targets.contact(ModuleId(1))
    path = Route(persona.peer, (Hop(ModuleId(1), victim.peer),))
    async with targets.attack(victim, persona=persona, record=targets.as_data_node(persona)) as (_, stream):
        await stream.say(header(targets.signed(persona.identity, path, 0, 7), targets.tensor))
        await stream.say(encode_chunk(1, 0, memoryview(bytes(targets.tensor.byte_length))))
        while not isinstance(frame := await stream.hear(), Receipt):
            assert frame is not None
    return frame


@pytest.mark.e2e
@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_open", [False, True])
async def test_only_the_author_s_guests_hand_out_work(tmp_path: Path, is_open: bool) -> None:
    text = write_text(tmp_path / "text")
    manifest = small_run(text, blocks=(0, 1), inner_steps=100, staleness=1)
    manifest = open_run(manifest) if is_open else manifest
    author, run = tmp_path / "author.key", tmp_path / "run.toml"
    run.write_bytes(sign_manifest(manifest, Identity.create(author)).text)
    # The first node's key is not the author's, so it needs an invitation as well.
    async with LocalSwarm(manifest, LocalSwarmOptions(peers=2, threads=1, author_path=author)) as swarm:
        watch = Watch(swarm)
        await watch.step(1)
        targets = await find_targets(swarm.link, hidden_tensor(manifest), manifest.modules())
        receipt = await first_receipt(targets)
        here = ("--stage", "0", "--text", str(text), "--steps", "2")
        link = str(swarm.link)
        if is_open:
            assert receipt.status is ReceiptStatus.ACCEPTED
        else:
            assert (receipt.status, receipt.detail) == (ReceiptStatus.REFUSED, NOT_INVITED)
            own = ("--identity", str(tmp_path / "friend.key"), "--listen", "127.0.0.1", "--yes")
            code, _, said = await skipstone("join", link, *here, *own)
            assert code == ConfigError.exit_code
            assert "skipstone invite" in said
            code, invited, said = await skipstone("invite", str(run), "--link", link, "--identity", str(author))
            assert code == 0, said
            link = invited.decode().strip()
        async with joined(tmp_path, "friend", link, *here) as friend:
            await friend.until(Step, lambda step: step.step >= 2)
        swarm.request_stop()
        await watch.to_the_end(swarm)
