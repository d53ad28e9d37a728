"""The commands."""

import ast
import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import types
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lab.commands import app as laboratory
from node.__main__ import EXPERIMENTS, app
from node.cli.views.text import harmless_lines
from node.context.options import NodeOptions
from node.data.tokenizers import ByteTokenizer
from node.experts.router import load_router
from node.local_swarm import local_swarm
from node.network.loss_report import AskedPaths
from node.observability.events import EventSink, MicrobatchCounts, NodeStatus, Note
from node.observability.status import PeerStatus, Status, SwarmStatus
from node.observability.typed_json import to_json
from protocol.identity.invitations import Grant
from protocol.identity.keys import Identity
from protocol.manifest.join_link import parse_link, short_link
from protocol.manifest.signing import read_signed_manifest
from swarm.experts.routes import best_route
from swarm.vocabulary.errors import ConfigError, IdentityError, SkipstoneError, Unreachable
from tests.node.checkpoint.saved_states import save_checkpoint
from tests.node.local_swarm.test_local_swarm import ROOT, STAND_IN
from tests.node.small_manifest import small_manifest
from tests.node.start.tiny_models import write_folder

LINK = (
    "skipstone:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    "@/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWJRSrypvnpHgc6ZAgyCni4KcSmbV7uGRaMw5LgMKT18fq"
)


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPSTONE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_swarm, "node_command", lambda: STAND_IN)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments, prog_name="skipstone")


def ran(*arguments: str) -> Any:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


def refused(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 78
    return str(result.output)


def corpus(tmp_path: Path, *texts: bytes) -> Path:
    (tmp_path / "corpus").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "corpus" / f"{number}.txt").write_bytes(text)
    return tmp_path / "corpus"


HEARS_SIGNALS = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
"""


def command(*arguments: str, code: str = "from node.__main__ import main; main()") -> subprocess.Popen[str]:
    """A real process; `code` may prepare something before it calls main()."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", HEARS_SIGNALS + code, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        process_group=0,
    )


def pretend(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """Puts the network side of a node aside: what it does is not under test here."""
    for name in ("node.runtime.node", "node.network.client"):
        module = types.ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)


class TestNew:
    def test_it_writes_a_signed_manifest_with_the_changes(self, tmp_path: Path) -> None:
        file, text = tmp_path / "run.toml", corpus(tmp_path, b"abc")
        words = ("--name", "mine", "--seed", "7", "--stages", "0,1,1", "--data", f"path:{text}", "--inner", "soap")
        result = ran("new", str(file), *words, "--stages-per-path", "1", "--visit-ratio", "1.5")
        signed = read_signed_manifest(file.read_bytes(), None)
        assert (signed.manifest.name, signed.manifest.seed) == ("mine", 7)
        assert (signed.manifest.stages.blocks, signed.manifest.stages.per_path) == ((0, 1, 1), 1)
        assert signed.manifest.stages.visit_ratio == 1.5
        assert signed.manifest.training.inner.name == "soap"
        assert signed.manifest.data.source == f"path:{text}"
        assert (signed.manifest.data.files.count, signed.manifest.data.files.bytes) == (1, 3)
        assert signed.run in result.stdout
        assert (tmp_path / "home" / "identity.key").stat().st_mode & 0o777 == 0o600
        ran("new", str(tmp_path / "second.toml"), "--from", str(file), "--name", "again")
        manifest = read_signed_manifest((tmp_path / "second.toml").read_bytes(), None).manifest
        assert (manifest.seed, manifest.name) == (7, "again")

    @pytest.mark.parametrize(
        ("file", "name"), [("my run.toml", "my-run"), ("first.run.toml", "first.run"), ("__.toml", "stdlib-demo")]
    )
    def test_a_run_is_named_after_its_file(self, tmp_path: Path, file: str, name: str) -> None:
        assert f"skipstone join {shlex.quote(str(tmp_path / file))}\n" in ran("new", str(tmp_path / file)).stdout
        assert f'name = "{name}"' in (tmp_path / file).read_text()

    def test_hops_of_few_numbers_show_the_text_and_go_with_no_finished_model(self, tmp_path: Path) -> None:
        file, model = tmp_path / "run.toml", tmp_path / "model"
        write_folder(model, "qwen2, tied")
        assert "every peer with a stage can read the text" in ran("new", str(file), "--residual", "16").stdout
        assert read_signed_manifest(file.read_bytes(), None).manifest.model.residual == 16
        ran("solo", str(file), "--steps", "1", "--json")
        for base in (("--from", str(file)), ("--residual", "16")):
            words = (str(tmp_path / "odd.toml"), *base, "--from-model", str(model))
            assert "write all of its width" in refused("new", *words)
        assert "must be less than hidden (128)" in run("new", str(tmp_path / "odd.toml"), "--residual", "128").stderr
        ran("new", str(file), "--size", "10m", "--residual", "32", "--force")
        assert read_signed_manifest(file.read_bytes(), None).manifest.model.residual == 32

    def test_its_author_invites_data_nodes(self, tmp_path: Path) -> None:
        file, other = str(tmp_path / "run.toml"), tmp_path / "other.key"
        assert "decide what the model learns" in ran("new", file, "--open-data").stdout
        link = LINK.replace(parse_link(LINK).run, read_signed_manifest(Path(file).read_bytes(), None).run)
        short = str(short_link(parse_link(link).run, ("[::1]:4001",)))
        assert ran("invite", file, "--link", short).stdout.startswith(f"{short}?invitation=")
        grant = parse_link(ran("invite", file, "--link", link, "--uses", "3").stdout).invitation
        assert grant is not None
        assert (grant.uses, abs(grant.expires - time.time() - 7 * 86_400) < 60) == (3, True)
        assert Grant.parse(ran("invite", file).stdout.strip()).uses == 1
        Identity.create(other)
        assert "neither the author" in refused("invite", file, "--identity", str(other))
        assert "12h" in refused("invite", file, "--expires", "2w")

    def test_a_run_with_experts_has_a_router_beside_it(self, tmp_path: Path) -> None:
        file, text = tmp_path / "run.toml", corpus(tmp_path, *[b"some prose " * 40, b"int i = 0;\n" * 40] * 20)
        source = f"path:{text}"
        words = ("--stages", "0,1,1", "--experts", "1,2,1", "--route-from", source)
        result = ran("new", str(file), "--data", source, *words)
        manifest = read_signed_manifest(file.read_bytes(), None).manifest
        assert manifest.stages.experts == (1, 2, 1)
        router = load_router(file, manifest)
        openings = [ByteTokenizer().encode((text / f"{number}.txt").read_bytes()) for number in (0, 1)]
        assert {best_route(router.affinity("", opening)) for opening in openings} == {(0, 0), (1, 0)}
        assert "4 modules; documents are routed to experts by" in result.stdout
        ran("new", str(tmp_path / "again.toml"), "--from", str(file), "--seed", "2")
        assert (tmp_path / "again.router").read_bytes() == router.to_bytes()
        (tmp_path / "run.router").unlink()
        assert "run's router" in refused("solo", str(file), "--steps", "1")

    def test_a_run_may_start_from_a_model(self, tmp_path: Path) -> None:
        file, model, text = tmp_path / "run.toml", tmp_path / "model", corpus(tmp_path, *[b"some prose " * 40] * 40)
        write_folder(model, "qwen2, tied")
        result = ran("new", str(file), "--from-model", str(model), "--data", f"path:{text}", "--stages", "0,3,1")
        assert f"skipstone join {file} --model {model}" in result.stdout
        manifest = read_signed_manifest(file.read_bytes(), None).manifest
        assert (manifest.model.family, manifest.model.sequence, manifest.stages.blocks) == ("qwen2", 96, (0, 3, 1))
        assert manifest.training.inner.name == "adamw"
        ran("solo", str(file), "--steps", "1", "--json", "--model", str(model))
        assert "--model DIR" in refused("solo", str(file), "--steps", "1")
        assert "--from-model" in refused("new", str(tmp_path / "again.toml"), "--from", str(file), "--stages", "0,2,2")
        ran("new", str(tmp_path / "again.toml"), *f"--from {file} --stages 0,2,2 --from-model {model}".split())
        refused("new", str(tmp_path / "odd.toml"), "--from-model", str(text))

    def test_experts_without_a_router_are_dealt_by_chance(self, tmp_path: Path) -> None:
        result = ran("new", str(tmp_path / "run.toml"), "--experts", "2")
        assert "9 modules; documents are routed to experts at random" in result.stdout
        assert "memory: stage 0 needs" in result.stdout
        assert not (tmp_path / "run.router").exists()

    def test_it_does_not_overwrite(self, tmp_path: Path) -> None:
        file = tmp_path / "run.toml"
        file.write_text("precious")
        refused("new", str(file))
        assert file.read_text() == "precious"
        ran("new", str(file), "--force")
        assert "cannot write" in refused("new", str(tmp_path / "nowhere" / "run.toml"))

    @pytest.mark.parametrize(
        ("arguments", "code", "message"),
        [
            (("--stages", "a,b"), 78, "not a list of numbers"),
            (("--stages", "0,0"), 65, "every stage but stage 0 needs at least 1 block"),
            (("--name", "no spaces"), 65, "name"),
            (("--from", "nowhere.toml"), 78, "cannot read the manifest"),
            (("--data", "path:/nowhere"), 78, "/nowhere"),
            (("--route-from", "python-stdlib"), 78, "needs experts"),
            (("--size", "10q"), 78, "not a number of parameters"),
            (("--size", "10m", "--stages", "0,1"), 78, "--size and --stages both set"),
            (("--experts", "two"), 78, "not a list of numbers"),
            (("--experts", "2", "--attention", "causal"), 65, "whole documents are routed"),
            (("--inner", "sgd"), 65, "training.inner.name: Input should be 'adamw'"),
            (("--inner", "sgd"), 65, "Correct --inner, which sets it."),
            (("--data", "a.txt"), 65, "Correct --data, which sets it."),
            (("--size", "10m", "--inner", "sgd"), 65, "training.inner.name"),
            (("--size", "10m", "--total-tokens", "0"), 78, "at least 1"),
            (("--card", "12GB"), 78, "--card goes with --size"),
            (("--size", "10m", "--tokenizer", "nowhere.json"), 78, "nowhere.json"),
        ],
    )
    def test_wrong_values(self, tmp_path: Path, arguments: tuple[str, ...], code: int, message: str) -> None:
        result = run("new", str(tmp_path / "run.toml"), *arguments)
        assert result.exit_code == code
        assert message in result.stderr
        assert list(tmp_path.glob("*.toml")) == []

    def test_the_dial_says_every_choice_with_its_reason_and_what_to_expect(self, tmp_path: Path) -> None:
        file = tmp_path / "run.toml"
        words = ("--size", "60m", "--card", "4GB", "--total-tokens", "500000000", "--seed", "5", "--inner", "muon")
        result = ran("new", str(file), *words)
        manifest = read_signed_manifest(file.read_bytes(), None).manifest
        lines = [line.split() for line in result.stdout.splitlines()]
        assert ["width", str(manifest.model.hidden)] in [line[:2] for line in lines]
        assert ["stages", f"{manifest.stages.count},"] in [line[:2] for line in lines]
        assert ["20", "Mbit/s"] in [line[:2] for line in lines]
        assert "for cards of 4 GB" in " ".join(result.stdout.split())
        assert "500,000,000" in result.stdout
        assert manifest.training.schedule.total_tokens == 500_000_000
        assert (manifest.seed, manifest.training.inner.name, manifest.name) == (5, "muon", "run")


class TestJoin:
    def test_its_options_reach_the_node(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        async def run_node(options: NodeOptions, events: EventSink, stop: asyncio.Event, **rest: object) -> None:
            assert options.manifest_path == tmp_path / "run.toml"
            assert (options.graph_bytes, options.relay_bytes_per_hour) == (2**20, 50_000_000)
            assert options.identity_path == tmp_path / "home" / "identity.key"
            events.emit(Note("info", "hello"))

        (tmp_path / "run.toml").write_text("")
        pretend(monkeypatch, run_node=run_node)
        words = ("join", str(tmp_path / "run.toml"), "--memory", "1MiB", "--serve-relay", "50")
        assert run(*words).stdout.splitlines() == ["skipstone join: starting a node", "hello"]
        assert [json.loads(line)["event"] for line in run(*words, "--json").stdout.splitlines()] == ["note"]

    @pytest.mark.parametrize("error", [IdentityError("bad key"), Unreachable("nobody there"), SkipstoneError("oops")])
    @pytest.mark.parametrize("grouped", [False, True])
    def test_errors_end_it(self, monkeypatch: pytest.MonkeyPatch, error: SkipstoneError, grouped: bool) -> None:
        async def run_node(options: NodeOptions, events: EventSink, stop: asyncio.Event, **rest: object) -> None:
            if not grouped:
                raise error
            try:
                raise error
            except SkipstoneError as raised:
                raise ExceptionGroup("tasks", [raised]) from None

        pretend(monkeypatch, run_node=run_node)
        result = run("join", LINK)
        assert result.exit_code == error.exit_code
        assert result.stderr == f"error: {error}\n  {error.hint}\n"
        assert "Traceback" in run("--debug", "join", LINK).stderr

    def test_bad_targets(self) -> None:
        assert "neither a join link nor a manifest" in refused("join", "nowhere")
        refused("join", "skipstone:short@x")
        refused("join", LINK, "--memory", "much")
        assert run("join", LINK, "--no-such-option").exit_code == 2


WAITING_NODE = """
import asyncio, sys, types
from node.observability.events import Note
async def run_node(options, events, stop, **rest):
    events.emit(Note("info", "up"))
    {body}
module = types.ModuleType("node.runtime.node")
module.run_node = run_node
sys.modules["node.runtime.node"] = module
from node.__main__ import main
main()
"""
PATIENT = WAITING_NODE.format(
    body='import logging; await stop.wait(); logging.getLogger("x").warning("careful"); await asyncio.sleep(0); '
    'events.emit(Note("info", "stopped in good order"))'
)
DEAF = WAITING_NODE.format(body="await asyncio.Event().wait()")
STUCK = WAITING_NODE.format(body="while True: pass")


def until(process: subprocess.Popen[str], text: str) -> None:
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"{text!r} never came; {process.stderr and process.stderr.read()}")


class TestSignals:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, None])
    def test_the_first_or_the_end_of_input_stops_in_good_order(self, number: signal.Signals | None) -> None:
        # Its input is /dev/null: at its end already.
        words = ("join", LINK) if number else ("join", LINK, "--stop-on-eof")
        with command(*words, code=PATIENT) as process:
            if number:
                until(process, "up")
                process.send_signal(number)
            out, err = process.communicate()
        assert all(words in out for words in ("stopped in good order", "warning: careful"))
        assert "careful" not in err
        assert ("once more to stop at once" in err) is (number is not None)
        assert process.returncode == 0

    @pytest.mark.parametrize("code", [DEAF, STUCK])
    def test_the_second_stops_at_once(self, code: str) -> None:
        with command("join", LINK, code=code) as process:
            until(process, "up")
            process.send_signal(signal.SIGINT)
            assert "once more" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
        assert process.returncode == 130

    def test_a_reader_that_goes_away_stops_it(self) -> None:
        body = 'while not stop.is_set(): events.emit(Note("info", "x")); await asyncio.sleep(0.01)'
        with command("join", LINK, "--json", code=WAITING_NODE.format(body=body)) as process:
            until(process, "up")
            process.stdout.close()
        assert process.returncode == 0


@pytest.mark.parametrize("words", [("join", LINK), ("up",), ("solo",)])
def test_a_checkpoint_folder_that_cannot_be_written_is_refused_at_the_start(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch)
    (tmp_path / "file").write_text("")
    assert "cannot write checkpoints" in refused(*words, "--checkpoint-dir", str(tmp_path / "file" / "ck"))


class TestUp:
    def test_json(self, stand_ins: None) -> None:
        result = ran("up", "--peers", "6", "--steps", "3", "--json")
        events = [json.loads(line) for line in result.stdout.splitlines()]
        assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3]
        assert events[-1]["event"] == "summary"
        assert events[-1]["microbatches"] == {"started": 3, "completed": 3, "abandoned": 0, "duplicated": 0}
        assert [peer["exit_code"] for peer in events[-1]["peers"]] == [0] * 6
        assert "starting a local swarm" in result.stderr

    def test_plain_lines(self, stand_ins: None) -> None:
        result = ran("up", "--steps", "2")
        lines = result.stdout.splitlines()
        assert lines[0] == "skipstone up: starting a local swarm"
        assert any(line.startswith("  skipstone join skipstone:") for line in lines)
        assert sum(line.startswith("step ") for line in lines) == 2, result.output
        assert any(line.startswith("2 steps  loss 5.0000 -> 2.5000") for line in lines)

    def test_a_failed_node_is_the_exit_code(self, stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SKIPSTONE_STAND_IN", "crash:0")
        result = run("up", "--steps", "2")
        assert result.exit_code == 71, result.output
        assert "the cat is on fire" in result.stdout

    @pytest.mark.parametrize(("presses", "words"), [(1, ""), (2, "deaf:1")])
    def test_ctrl_c(self, presses: int, words: str, tmp_path: Path) -> None:
        code = (
            "import os, tempfile; from node.local_swarm import local_swarm\n"
            f"os.environ['SKIPSTONE_STAND_IN'] = {words!r}; tempfile.tempdir = {str(tmp_path)!r}\n"
            f"local_swarm.node_command = lambda: {STAND_IN!r}\n"
            "local_swarm.STOP_LIMIT_S = 3600.0\n"
            "from node.__main__ import main; main()"
        )
        with command("up", "--json", code=code) as process:
            until(process, '"step":2')
            process.send_signal(signal.SIGINT)
            assert any("once more" in line for line in process.stderr)
            if presses == 2:
                process.send_signal(signal.SIGINT)
            out, _ = process.communicate()
        assert process.returncode == 130
        summary = json.loads(out.splitlines()[-1])
        assert summary["event"] == "summary"
        codes = [peer["exit_code"] for peer in summary["peers"]]
        assert codes == [0] * 5 if presses == 1 else 137 in codes
        assert [path.name for path in tmp_path.iterdir()] == ["home"], "which has the link"


FIGURES: dict[str, Any] = {"tokens_per_s": 1500.0, "slots": 4, "free_slots": 1, "steps": 12}
OF_PEER: dict[str, Any] = {"peer": "12D3KooWabcdef", "module": "0.0", "addresses": ("127.0.0.1:5000",), **FIGURES}
PEER = PeerStatus(state="serving\x1b[2J", answered=Status(steps=12), **OF_PEER)
OF_RUN: dict[str, Any] = {"loss": 3.25, "tokens": 1000, "tokens_per_s": 1500.0, "microbatches": MicrobatchCounts(1, 1)}
STATUS = SwarmStatus(
    run="9f86d081884c7d65", name="demo", stages=2, step=12, waiting_for=("1.0",), peers=(PEER,), **OF_RUN
)


class TestQuestions:
    def test_status(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def query_status(link: object) -> SwarmStatus:
            assert str(link) == LINK
            return STATUS

        pretend(monkeypatch, query_status=query_status)
        monkeypatch.setenv("COLUMNS", "120")
        result = ran("status", LINK)
        for expected in ("demo", "step 12", "loss 3.2500", "abcdef", "3/4", "127.0.0.1:5000", "no peer serves 1.0"):
            assert expected in result.stdout
        assert any(line.split() == ["stage", "1", "none"] for line in result.stdout.splitlines())
        assert "\x1b" not in result.stdout
        assert json.loads(run("status", LINK, "--json").stdout) == to_json(STATUS)

    def test_without_a_link_the_last_run_is_meant(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        joined = []

        async def run_node(options: NodeOptions, events: EventSink, stop: asyncio.Event, **rest: object) -> None:
            joined.append(str(options.link))
            events.emit(NodeStatus("p", None, "joining", "", LINK.replace("127.0.0.1", "127.0.0.7")))
            assert "127.0.0.7" in (tmp_path / "home" / "last-run.link").read_text()

        async def statuses(link: object) -> AsyncIterator[SwarmStatus]:
            assert str(link) == LINK, "the node that joined has left"
            yield STATUS
            yield replace(STATUS, step=13)

        pretend(monkeypatch, run_node=run_node, statuses=statuses)
        for command in ("status", "join"):
            assert "no run was joined" in refused(command)
        ran("join", LINK)
        ran("join")
        assert joined == [LINK, LINK]
        said = ran("status", "--watch").stdout
        assert said.index("step 12") < said.index("step 13")

    def test_evaluation_of_a_swarm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def query_evaluation(link: object, microbatches: int, paths: AskedPaths) -> dict[str, Any]:
            subsets = [{"stages": list(stages), "loss": 2.5} for stages in paths.of(small_manifest())]
            return {"loss": 2.5, "tokens": 512 * microbatches, "microbatches": microbatches, "subsets": subsets}

        pretend(monkeypatch, query_evaluation=query_evaluation)
        assert "through" not in run("eval", LINK).stdout
        part = run("eval", LINK, "--stages-per-path", "1").stdout.splitlines()[1:]
        assert part[1:] == ["  2.5000  through stages 0 and 1"]
        parts = run("eval", LINK, "--stages-per-path", "1", "--every-subset").stdout.splitlines()[1:]
        assert parts[1:] == ["  2.5000  through stages 0 and 1", "  2.5000  through stages 0 and 2"]
        assert run("eval", LINK, "--stages-per-path", "3").exit_code == ConfigError.exit_code
        assert run("eval", LINK, "--every-subset").exit_code == 2
        assert "held-out loss 2.5000" in run("eval", LINK, "--microbatches", "4").stdout
        assert json.loads(run("eval", LINK, "--microbatches", "4", "--json").stdout)["tokens"] == 2048
        assert run("eval", LINK, "--microbatches", "0").exit_code == 2
        refused("eval", "nowhere")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "checkpoint", small_manifest())


class TestModels:
    def test_export(self, tmp_path: Path, checkpoint: Path) -> None:
        result = ran("export", str(checkpoint), str(tmp_path / "folder"))
        assert "bytes of parameters in 1 file" in result.stdout
        refused("export", str(checkpoint), str(tmp_path / "folder"))
        result = run("export", str(checkpoint), str(tmp_path / "folder"), "--force", "--json")
        answer = json.loads(result.stdout)
        assert (answer["files"], answer["path"]) == (1, str(tmp_path / "folder"))
        assert answer["bytes"] < (tmp_path / "folder" / "model.safetensors").stat().st_size

    def test_generate(self, tmp_path: Path, checkpoint: Path) -> None:
        ran("export", str(checkpoint), str(tmp_path / "folder"))
        asked = ("the cat", "--tokens", "30", "--seed", "5", "--device", "cpu")
        models = (checkpoint, checkpoint, tmp_path / "folder")
        answers = [json.loads(run("generate", str(path), *asked, "--json").stdout) for path in models]
        assert answers[0] == answers[1] == answers[2]
        assert (answers[0]["prompt_tokens"], answers[0]["seed"]) == (7, 5)
        result = run("generate", str(checkpoint), *asked)
        assert result.stdout == harmless_lines(answers[0]["text"]) + "\n"
        assert "seed 5" in result.stderr
        result = ran("generate", str(checkpoint), "x" * 40, "--tokens", "2", "--device", "cpu")
        assert "the prompt has 40 tokens; the model sees the last 16" in result.stderr

    def test_generate_with_some_of_the_stages(self, checkpoint: Path) -> None:
        asked = ("generate", str(checkpoint), "the cat", "--tokens", "30", "--seed", "5", "--device", "cpu", "--json")
        whole, every, part = (
            json.loads(run(*asked, *more).stdout)
            for more in ((), ("--stages-per-path", "2"), ("--stages-per-path", "1"))
        )
        assert (whole, whole["stages"], part["stages"]) == (every, [1, 2], [1])
        assert whole["tokens"] != part["tokens"]
        assert "through stages 0 and 1" in run(*asked, "--stages-per-path", "1").stderr
        assert run(*asked, "--stages-per-path", "3").exit_code == ConfigError.exit_code

    @pytest.mark.parametrize(
        ("arguments", "code", "message"),
        [
            (("generate", "nowhere", "a"), 78, "not a join link, a checkpoint or an exported folder"),
            (("export", "nowhere", "folder"), 78, "not a join link, a checkpoint or an exported folder"),
            (("generate", "nowhere", "a", "--temperature", "-1"), 78, "temperature"),
            (("generate", "nowhere", "a", "--device", "abacus"), 78, "abacus"),
            (("generate", "nowhere", "a", "--tokens", "0"), 2, ""),
        ],
    )
    def test_wrong_arguments(self, arguments: tuple[str, ...], code: int, message: str) -> None:
        result = run(*arguments)
        assert result.exit_code == code
        assert message in result.stderr
        assert "Traceback" not in result.stderr


def test_what_a_model_writes_moves_no_cursor() -> None:
    assert harmless_lines("a\tb\r\n\x1b[2J\u202ec\x9b") == "a\tb \n [2J c "


def test_solo_trains_and_its_checkpoint_can_be_evaluated(tmp_path: Path) -> None:
    text = corpus(tmp_path, *[b"the quick brown fox jumps over the lazy dog\n" * 60] * 60)
    arguments = ("--data", f"path:{text}", "--threads", "1", "--device", "cpu")
    result = ran("solo", "--steps", "2", "--checkpoint-dir", str(tmp_path / "out"), "--json", *arguments)
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [event["event"] for event in events] == ["step", "step", "summary"]
    assert events[-1]["peers"] == []
    assert 0 < json.loads(run("eval", str(tmp_path / "out"), "--microbatches", "1", "--json").stdout)["loss"] < 7


def test_leave_without_a_running_node(tmp_path: Path) -> None:
    assert "no node runs here" in refused("leave", "--identity", str(tmp_path / "identity.key"))


OF_DOCKER = "build cap-drop detach follow no-deps pids-limit read-only rm scale security-opt stop-timeout tmpfs volumes"


def options_of(command: Any) -> Iterator[str]:
    for each in getattr(command, "commands", {}).values():
        yield from options_of(each)
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)


def options_of_benchmarks() -> Iterator[str]:
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        found = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        yield from (each for each in found if isinstance(each, str) and each.startswith("--"))


def test_options_in_documents_and_messages_exist() -> None:
    known = {"--help", *options_of(typer.main.get_command(app)), *options_of(typer.main.get_command(laboratory))}
    known |= {*options_of_benchmarks(), *(f"--{name}" for name in OF_DOCKER.split())}
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    option = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
    named = {path.name: set(option.findall(path.read_text())) for path in documents}
    known |= {"--append-eod", "--off", "--user", "--now", "--no-pager"}  # Megatron-LM's; a placeholder; systemd's
    for path in (path for folder in ("node", "swarm", "protocol") for path in (ROOT / folder).rglob("*.py")):
        texts = [each.value for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.Constant)]
        named[path.name] = {found for text in texts if isinstance(text, str) for found in option.findall(text)}
    assert {name: options - known for name, options in named.items() if options - known} == {}


def test_help_shows_every_command_and_how_to_begin() -> None:
    assert "protocol 5 to 5" in ran("--version").stdout
    said = run("--help").stdout
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert all(f"\n  {name} " in said for name in commands), "each command is in a panel"
    assert {"up", "join", "new", *EXPERIMENTS} <= set(commands)
    assert all(words in said for words in ("skipstone up", "skipstone join LINK", "skipstone new run.toml"))
