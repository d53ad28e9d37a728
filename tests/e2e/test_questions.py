"""`status` and `eval` of a running swarm, and who may not join it."""

import asyncio
import hashlib
import io
import json
import math
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from rich.console import Console

from node.cli.views.status_view import status_headline, status_table
from node.experts.router import router_file
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions
from node.model.memory_need import needs_of
from node.model.moments import DEFAULT_SLOTS
from node.network.client import evaluation, query_evaluation, query_status, statuses_of
from node.network.loss_report import WHOLE_MODEL, AskedPaths
from node.network.session import visit
from node.observability.events import Completed, NodeStatus, Step
from node.pipeline.admission import hidden_tensor
from protocol.identity.invitations import NOT_INVITED
from protocol.identity.keys import Identity
from protocol.manifest.join_link import JoinLink
from protocol.manifest.manifest import manifest_from_table
from protocol.manifest.signing import sign_manifest
from swarm.vocabulary.errors import ConfigError, ManifestError, Unreachable
from swarm.vocabulary.pipeline_messages import Receipt, ReceiptStatus
from swarm.vocabulary.types import Hop, ModuleId
from swarm.vocabulary.types import Path as Route
from tests.e2e.home_network import joined
from tests.e2e.round_watch import LogTail
from tests.e2e.small_run import PATIENCE_S, Watch, checked, run_of_experts, skipstone, small_run, write_text
from tests.node.data.test_tokenizers import word_tokenizer
from tests.security.adversary import find_targets, header
from tests.security.test_manifests import HERE, NODE, Victim, running, written

pytestmark = pytest.mark.e2e


async def test_a_running_swarm_tells_of_itself_and_any_part_of_it_can_be_measured(tmp_path: Path) -> None:
    """Of a run whose own paths skip a stage: the whole model, more than a path of training, and parts of it."""
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 1, 1), per_path=1)
    async with LocalSwarm(manifest, LocalSwarmOptions(peers=3, threads=1)) as swarm:
        await Watch(swarm).step(3)
        status = await query_status(swarm.link)
        assert status.run == swarm.link.run
        assert sorted(str(peer.module) for peer in status.peers) == ["0.0", "1.0", "2.0"]
        assert all(peer.state == "serving" and peer.answered is not None for peer in status.peers)
        assert (status.step or 0) >= 3
        assert 0 < (status.loss or 0) < 7
        assert status.microbatches.duplicated == 0
        shown = Console(record=True, width=200, file=io.StringIO())
        shown.print(status_headline(status), status_table(status))
        assert all(peer.peer[-6:] in shown.export_text(clear=False) for peer in status.peers)
        whole = await query_evaluation(swarm.link, 2, WHOLE_MODEL)
        assert (whole["microbatches"], whole["tokens"]) == (2, 2 * manifest.microbatch_tokens)
        assert math.isfinite(whole["loss"])
        async with visit(swarm.link) as session:
            for paths, stages in ((WHOLE_MODEL, [[1, 2]]), (AskedPaths(1), [[1]]), (AskedPaths(1, True), [[1], [2]])):
                answer = await evaluation(session, manifest, 1, paths)
                assert [subset["stages"] for subset in answer["subsets"]] == stages
                assert all(0 < subset["loss"] < 7 for subset in answer["subsets"])
            with pytest.raises(ConfigError, match="2 after stage 0"):
                await evaluation(session, manifest, 1, AskedPaths(3))
            async with asyncio.timeout(PATIENCE_S):  # the peers ask for their credit every few seconds
                async for status in statuses_of(session, manifest):
                    if sum(bool(peer.said.credited) for peer in status.peers) == 2:
                        break
        with pytest.raises(Unreachable, match="within 1 s"):
            await query_status(JoinLink(_another_run(tmp_path), swarm.link.peers), patience_s=1.0)


async def test_a_manifest_of_another_run_is_refused_at_once(tmp_path: Path) -> None:
    signed = sign_manifest(small_run(write_text(tmp_path / "text"), blocks=(0, 1)), Identity.generate())
    tampered = tmp_path / "tampered.toml"
    tampered.write_bytes(signed.text.replace(b"seed = 11", b"seed = 12"))
    code, _, errors = await skipstone("join", str(tampered), "--identity", str(tmp_path / "key"))
    assert code == ManifestError.exit_code
    assert "signature" in errors
    assert "Traceback" not in errors


async def test_only_the_author_s_guests_hand_out_work(tmp_path: Path) -> None:
    """The open run of `tests.security.siege` takes anybody's."""
    author, run, text = tmp_path / "author.key", tmp_path / "run.toml", write_text(tmp_path / "text")
    manifest = small_run(text, blocks=(0, 1), inner_steps=100, staleness=1)
    run.write_bytes(sign_manifest(manifest, Identity.create(author)).text)
    here = ("--stage", "0", "--text", str(text), "--steps", "2")
    # The first node has another key than the author, so it needs an invitation as well.
    async with LocalSwarm(manifest, LocalSwarmOptions(peers=2, threads=1, author_path=author)) as swarm:
        await Watch(swarm).step(1)
        targets, link = await find_targets(swarm.link, hidden_tensor(manifest), manifest.modules()), str(swarm.link)
        stranger, victim = targets.persona(), targets.contact(ModuleId(1))
        path = Route(stranger.peer, (Hop(ModuleId(1), victim.peer),))
        async with targets.attack(victim, persona=stranger, record=targets.as_data_node(stranger)) as (_, stream):
            await stream.say(header(targets.signed(stranger.identity, path, 0, 7), targets.tensor))
            while not isinstance(frame := await stream.hear(), Receipt):
                assert frame is not None
        assert (frame.status, frame.detail) == (ReceiptStatus.REFUSED, NOT_INVITED)
        code, _, said = await skipstone("join", link, *here, "--identity", str(tmp_path / "stranger.key"), "--yes")
        assert (code, "skipstone invite" in said) == (ConfigError.exit_code, True)
        _, invited, _ = await skipstone("invite", str(run), "--link", link, "--identity", str(author))
        async with joined(tmp_path, "friend", invited.decode(), *here) as friend:
            await friend.until(Step, lambda step: step.step >= 2)


def _another_run(tmp_path: Path) -> str:
    return sign_manifest(small_run(tmp_path / "text", blocks=(0, 2)), Identity.generate()).run


async def test_a_data_node_joins_without_the_tokenizer_s_file(tmp_path: Path) -> None:
    words = [f"word{number}" for number in range(23)]
    content = word_tokenizer("<unk>", "</s>", "and", *words) + b" " * 2**17  # of several pieces
    (tmp_path / "author").mkdir()
    (tmp_path / "author" / "words.json").write_bytes(content)
    text, key, newcomer = write_text(tmp_path / "text"), tmp_path / "author.key", Victim(tmp_path)
    table = small_run(text, blocks=(0, 1)).model_dump()
    table["data"] |= {
        "tokenizer": f"file:{tmp_path / 'author' / 'words.json'}",
        "tokenizer_sha256": hashlib.sha256(content).hexdigest(),
    }
    (tmp_path / "run.toml").write_bytes(sign_manifest(manifest_from_table(table), Identity.create(key)).text)
    author = ("--stage", "1", "--identity", str(key), "--link-file", str(tmp_path / "link"))
    _, invitation, _ = await skipstone("invite", str(tmp_path / "run.toml"), "--identity", str(key))
    joining = ("--text", str(text), "--stage", "0", "--steps", "3", "--invitation", invitation.decode().strip())
    command = (*NODE, str(tmp_path / "run.toml"), *author, *HERE)
    async with asyncio.timeout(PATIENCE_S), running(*command, env=newcomer.environment):
        link = await written(tmp_path / "link")
        async with running(*NODE, link, *joining, *HERE, env=newcomer.environment) as node:
            assert node.stdout is not None
            events = [json.loads(line) async for line in node.stdout]
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3]
    [kept] = (newcomer.home / "skipstone" / "tokenizers").iterdir()
    assert kept.read_bytes() == content


DATA, SMALL, LARGE = (ModuleId(stage) for stage in range(3))


@pytest.mark.timeout(400)
async def test_stages_go_to_those_that_have_room_for_them(tmp_path: Path) -> None:
    """The large stage takes more than the small peer has, and the large peer has room for either."""
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 1, 12))
    needs = needs_of(manifest, DEFAULT_SLOTS)
    limits = {"small": (needs[SMALL].all + needs[LARGE].all) // 2, "large": 8 * needs[LARGE].all}
    run = tmp_path / "run.toml"
    run.write_bytes(sign_manifest(manifest, Identity.load_or_create(tmp_path / "data.key")).text)
    async with joined(tmp_path, "data", str(run), "--stage", "0") as data:
        link = (await data.serving()).link
        nowhere = min(needs[SMALL].all, needs[LARGE].all) - 1
        own = ("--identity", str(tmp_path / "none.key"), "--memory-limit", str(nowhere))
        code, _, said = await skipstone("join", link, *own, "--no-data", "--listen", "127.0.0.1", "--json", "--yes")
        [told] = [line for line in said.splitlines() if line.startswith("error: ")]
        assert code == 71
        assert f"the smallest, {SMALL}, takes" in told
        assert f"under --memory-limit {nowhere}" in told
        assert "Traceback" not in said
        async with joined(tmp_path, "large", link, "--no-data", "--memory-limit", str(limits["large"])) as one:
            assert (await one.serving()).module == str(LARGE)
            async with joined(tmp_path, "small", link, "--no-data", "--memory-limit", str(limits["small"])) as other:
                assert (await other.serving()).module == str(SMALL)
                await data.until(Step, lambda step: step.step >= 3)


EXPERTS = 4
NEWCOMERS = 5


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_five_newcomers_at_once_serve_all_of_four_experts(tmp_path: Path) -> None:
    manifest, router = run_of_experts(tmp_path / "text", experts=(EXPERTS,))
    run, logs = tmp_path / "run.toml", tmp_path / "logs"
    run.write_bytes(sign_manifest(manifest, Identity.load_or_create(tmp_path / "data.key")).text)
    router_file(run).write_bytes(router.to_bytes())
    logged, on_own_path = ("--log-dir", str(logs)), set[tuple[int, ...]]()

    def every_expert_got_its_own(_: str, event: Completed) -> bool:
        if event.route is not None and [hop.partition("@")[0] for hop in event.hops] == [f"1.{event.route[0]}"]:
            on_own_path.add(event.route)
        return len(on_own_path) == EXPERTS

    async with joined(tmp_path, "data", str(run), "--stage", "0", *logged) as data:
        link = (await data.serving()).link
        tail = LogTail(logs, Completed)
        async with AsyncExitStack() as stack:
            nodes = [
                await stack.enter_async_context(joined(tmp_path, f"newcomer-{number}", link, *logged))
                for number in range(NEWCOMERS)
            ]
            await tail.until(every_expert_got_its_own)
            tail.close()
            for node in nodes:
                await node.serving()
            said = [[e for e in node.seen if isinstance(e, NodeStatus) and e.state == "serving"] for node in nodes]
            served = {events[-1].module for events in said}
    assert {f"1.{expert}" for expert in range(EXPERTS)} <= served, served
    report = checked(logs)
    assert (report["logs"], report["ended_well"]) == (1 + NEWCOMERS, 1 + NEWCOMERS)
