"""Variables say what a node's options say, and links may be in files: how containers and services are started."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from node.__main__ import app
from node.cli.options import NewLinks, keep_link
from node.context.options import (
    SETTINGS,
    VARIABLES,
    LogLevel,
    NodeOptions,
    default_identity_path,
    is_default_identity,
    parse_size,
    variable,
    without_settings,
)
from node.local_swarm.setup import LocalSetup, LocalSwarmOptions
from node.model.moments import MomentType
from node.network.reach_status import ReachMode
from node.network.session import Whereabouts
from node.observability.events import EventSink, NodeStatus
from node.observability.status import SwarmStatus
from protocol.manifest.join_link import link_in, parse_link
from protocol.transport.settings import free_ports
from swarm.vocabulary.errors import ConfigError
from tests.kit.events import KeptEvents
from tests.node.small_manifest import small_manifest

PEER = "12D3KooWJRSrypvnpHgc6ZAgyCni4KcSmbV7uGRaMw5LgMKT18fq"
LINK = f"skipstone:{'0' * 64}@/ip4/127.0.0.1/tcp/4001/p2p/{PEER}"
OTHER_LINK = f"skipstone:{'1' * 64}@/dns4/bootstrap/tcp/4001/p2p/{PEER}"
OTHER_VALUES: dict[str, Any] = (
    {"moving": False, "reads_text": False, "allow_hub": True, "yes": True, "as_json": True}
    | {"text": Path("/text"), "tokenizer": Path("/tokenizer.json"), "model": Path("/model")}
    | {"identity_path": Path("other"), "log_dir": Path("/events"), "link_file": Path("link")}
    | {"settings": Path("limits.toml"), "checkpoint_dir": Path("/saved"), "checkpoint_every_s": 5.0}
    | {"port": 4001, "dht_port": 4002, "relay_megabytes_per_hour": 50, "threads": 3, "slots": 5, "window": 6}
    | {"stage": "2.2", "invitation": "word", "listen": "127.0.0.1", "advertise": "bootstrap", "device": "cpu"}
    | {"reach": ReachMode.DIRECT, "moments": MomentType.EIGHT_BIT, "log_level": LogLevel.DEBUG}
    | {"memory": "512MiB", "memory_limit": "8GB", "patience_s": 1.5, "stop_on_eof": True, "dashboard": 8421}
    | {"steps": 7, "modules": 3, "stages": "0,2-4", "name": "Ada"}
)


@pytest.fixture(autouse=True)
def no_settings_of_whoever_runs_this(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SKIPSTONE_HOME", str(tmp_path))


def joined(monkeypatch: pytest.MonkeyPatch, *arguments: str, **variables: str) -> NodeOptions:
    seen: list[NodeOptions] = []

    async def run_node(options: NodeOptions, events: EventSink, stop: asyncio.Event, **rest: object) -> None:
        seen.append(options)
        if options.link_file != OTHER_VALUES["link_file"]:
            events.emit(serving(LINK))

    monkeypatch.setitem(sys.modules, "node.runtime.node", types.SimpleNamespace(run_node=run_node))
    monkeypatch.setattr("node.cli.join.stop_on_end_of_input", lambda ask: None)  # this process's input may have ended
    result = CliRunner().invoke(app, ["join", *arguments], env=variables)
    assert result.exit_code == 0, result.output
    return seen[0]


def parameters_of(command: str) -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return {parameter.name: parameter for parameter in group.commands[command].params}


class TestNodeSettings:
    def test_every_option_has_the_variable_of_its_name(self) -> None:
        parameters = parameters_of("join")
        assert parameters.pop("target").envvar == "SKIPSTONE_LINK"
        said = {parameter.opts[0]: parameter.envvar for parameter in parameters.values()}
        assert {name for name, envvar in said.items() if envvar is None} == {"--stop-on-eof"}
        assert all(envvar in (None, variable(name.removeprefix("--"))) for name, envvar in said.items())
        assert {envvar for envvar in said.values() if envvar is not None} | {"SKIPSTONE_LINK"} == VARIABLES

    def test_every_row_of_the_table_is_an_option_a_field_and_an_argument(self, monkeypatch: pytest.MonkeyPatch) -> None:
        parameters = parameters_of("join")
        assert [name for name in parameters if name != "target"] == list(SETTINGS)
        assert len(SETTINGS) + 2 == len(dataclasses.fields(NodeOptions)), "besides the link and the manifest"
        plain = NodeOptions(link=parse_link(LINK), manifest_path=None, identity_path=Path("key"))
        for name in SETTINGS:
            changed = dataclasses.replace(plain, **{name: OTHER_VALUES[name]})
            assert changed != plain
            assert joined(monkeypatch, *changed.arguments()) == changed
        together = {name: value for name, value in OTHER_VALUES.items() if name != "stages"}  # not beside --stage
        changed = dataclasses.replace(plain, **together)
        words = changed.arguments()
        variables = {}
        for name in together:
            option = SETTINGS[name][0]
            declared = [*parameters[name].opts, *parameters[name].secondary_opts]
            (at,) = (index for index, word in enumerate(words) if word in declared)
            switch = isinstance(OTHER_VALUES[name], bool)
            if option.envvar is not None:
                variables[option.envvar] = str(words[at] == declared[0]) if switch else words[at + 1]
        assert joined(monkeypatch, LINK, "--stop-on-eof", **variables) == changed

    def test_typed_options_come_first_and_empty_variables_are_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        variables = {"SKIPSTONE_LINK": OTHER_LINK, "SKIPSTONE_STAGE": "2", "SKIPSTONE_DATA": "0"}
        options = joined(monkeypatch, LINK, "--stage", "1", "--data", **variables)
        assert (str(options.link), options.stage, options.reads_text) == (LINK, "1", True)
        assert joined(monkeypatch, LINK, **dict.fromkeys(map(variable, SETTINGS), "")) == joined(monkeypatch, LINK)

    def test_the_nodes_of_a_local_swarm_inherit_no_setting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SKIPSTONE_STAGE", "2")
        monkeypatch.setenv("SKIPSTONE_DEBUG", "1")
        setup = LocalSetup(small_manifest(), LocalSwarmOptions(peers=3))
        setup.remove()
        assert "SKIPSTONE_STAGE" not in setup.environment()
        assert setup.environment()["SKIPSTONE_DEBUG"] == "1"
        assert without_settings({"SKIPSTONE_LINK": LINK, "PATH": "p"}) == {"PATH": "p"}


class TestLinks:
    def test_in_a_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "link"
        file.write_text(f"{OTHER_LINK}\n")
        assert str(link_in(str(file))) == OTHER_LINK
        assert str(joined(monkeypatch, SKIPSTONE_LINK=str(file)).link) == OTHER_LINK

    @pytest.mark.parametrize("content", [b"protocol = 1", b"", b"\xff\x00"])
    def test_another_file_or_none_has_no_link(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "file").write_bytes(content)
        for place in (str(tmp_path / "file"), str(tmp_path / "nowhere"), "\0"):
            assert link_in(place) is None
        with pytest.raises(ConfigError):
            link_in("skipstone:short@x")

    def test_status_takes_it_from_the_variable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[str] = []

        async def query_status(link: object) -> SwarmStatus:
            asked.append(str(link))
            return SwarmStatus(run="9f86", name="demo", stages=2)

        monkeypatch.setitem(sys.modules, "node.network.client", types.SimpleNamespace(query_status=query_status))
        (tmp_path / "link").write_text(LINK)
        result = CliRunner().invoke(app, ["status", "--json"], env={"SKIPSTONE_LINK": str(tmp_path / "link")})
        assert (result.exit_code, asked) == (0, [LINK])


def serving(link: str) -> NodeStatus:
    return NodeStatus(PEER, "0.0", "serving", "127.0.0.1:4002", link)


def link_file(path: Path, behind: EventSink) -> NewLinks:
    return NewLinks(partial(keep_link, path), behind)


class TestLinkFile:
    def test_it_has_the_newest_link(self, tmp_path: Path) -> None:
        heard = KeptEvents()
        sink = link_file(tmp_path / "link", heard)
        for link in (LINK, OTHER_LINK):
            sink.emit(serving(link))
            assert str(link_in(str(tmp_path / "link"))) == link
        assert heard.events == [serving(LINK), serving(OTHER_LINK)]
        assert [file.name for file in tmp_path.iterdir()] == ["link"]
        (tmp_path / "link").unlink()
        sink.emit(serving(OTHER_LINK))
        assert not (tmp_path / "link").exists(), "the same link is not written again"

    @pytest.mark.parametrize("trap", [".link.part", "link"])
    def test_a_link_that_another_user_laid_there_is_not_followed(self, tmp_path: Path, trap: str) -> None:
        (tmp_path / "precious").write_text("mine")
        (tmp_path / trap).symlink_to(tmp_path / "precious")
        link_file(tmp_path / "link", KeptEvents()).emit(serving(LINK))
        assert (tmp_path / "precious").read_text() == "mine"
        assert str(link_in(str(tmp_path / "link"))) == LINK

    def test_the_name_of_the_partial_file_is_random(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        moved: list[str] = []
        monkeypatch.setattr("os.replace", lambda source, target: moved.append(Path(source).name))
        for _ in range(2):
            link_file(tmp_path / "link", KeptEvents()).emit(serving(LINK))
        assert len({*moved}) == 2

    def test_a_node_goes_on_without_it(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        heard = KeptEvents()
        link_file(tmp_path / "nowhere" / "link", heard).emit(serving(LINK))
        assert len(heard.events) == 1
        assert "cannot write the join link" in caplog.text

    def test_the_node_writes_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        joined(monkeypatch, LINK, SKIPSTONE_LINK_FILE=str(tmp_path / "link"))
        assert str(link_in(str(tmp_path / "link"))) == LINK


class Probe:
    """A UDP socket of a machine with the addresses 192.0.2.5 and 2001:db8::5 that finds all hosts but one."""

    def __init__(self, family: int, kind: int) -> None:
        self.own = "2001:db8::5" if family == socket.AF_INET6 else "192.0.2.5"

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *error: object) -> None: ...

    def connect(self, address: tuple[str, int]) -> None:
        if address[0] == "unknown.example":
            raise socket.gaierror("no such host")

    def getsockname(self) -> tuple[str, int]:
        return self.own, 9


class TestAddresses:
    @pytest.mark.parametrize(
        ("listen", "hosts", "own"),
        [
            ("0.0.0.0", ["ip4/203.0.113.7"], ["192.0.2.5"]),
            ("0.0.0.0", ["dns4/unknown.example", "dns6/node.example"], ["2001:db8::5"]),
            ("::", ["ip6/2001:db8::1"], ["2001:db8::5"]),
            ("0.0.0.0", ["dns4/unknown.example"], ["192.0.2.5"]),
            ("::", [], ["192.0.2.5", "2001:db8::5"]),
            ("25.0.0.9", ["ip6/2001:db8::1"], ["25.0.0.9"]),
        ],
    )
    def test_our_address_is_that_of_the_route_to_a_peer_or_outside(
        self, monkeypatch: pytest.MonkeyPatch, listen: str, hosts: list[str], own: list[str]
    ) -> None:
        monkeypatch.setattr(socket, "socket", Probe)
        assert Whereabouts(listen).advertised_hosts(tuple(f"/{host}/tcp/4001/p2p/{PEER}" for host in hosts)) == own

    def test_without_a_route_it_is_this_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("node.network.session.address_towards", lambda host: None)
        assert [Whereabouts(all_of).advertised_hosts() for all_of in ("0.0.0.0", "::")] == [["127.0.0.1"], ["::1"]]

    @pytest.mark.parametrize(
        ("listen", "local"),
        [("0.0.0.0", "127.0.0.1:4002"), ("::", "[::1]:4002"), ("2001:db8::1", "[2001:db8::1]:4002")],
    )
    def test_brackets_are_where_host_and_port_are_joined(self, listen: str, local: str) -> None:
        assert Whereabouts(listen).local(4002) == local

    @pytest.mark.parametrize("written", ["::1", "[::1]", "::", "[::]", "2001:db8::1"])
    def test_ip6_may_be_written_with_brackets(self, written: str) -> None:
        options = NodeOptions(**(BASE | {"listen": written, "advertise": "[2001:db8::1]"}))
        assert (options.listen, options.advertise) == (written.strip("[]"), "2001:db8::1")


def test_ports_are_the_same_at_each_start_unless_they_are_in_use() -> None:
    first, second = free_ports("127.0.0.1", "node", 2)
    assert free_ports("127.0.0.1", "node", 2) == [first, second]
    with socket.create_server(("127.0.0.1", first)):
        assert free_ports("127.0.0.1", "node", 1) == [second]


BASE = {"link": None, "manifest_path": Path("run.toml"), "identity_path": Path("key")}


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"manifest_path": None}, "neither a join link nor a manifest"),
        ({"port": 65_536}, "port must be from 0 to 65535"),
        ({"dht_port": -1}, "dht_port must be"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"slots": 0}, "slots must be"),
        ({"window": -3}, "window must be"),
        ({"steps": 0}, "steps must be"),
        ({"stage": "-1"}, "stage must be a stage or STAGE.EXPERT"),
        *(
            ({"stages": text}, "stages must be stages as 2-4")
            for text in ("", "x", "4-2", "2,2", "1-3,2", "0-64", "1,")
        ),
        ({"stages": "0-9999"}, "stages must be stages as 2-4"),
        ({"stages": "1-2", "stage": "1"}, "--stages already says what to host"),
        ({"stages": "1-2", "modules": 2}, "--stages already says what to host"),
        ({"modules": 0}, "modules must be at least 1"),
        ({"name": "A" * 33}, "name must have at most 32 characters"),
        ({"memory": "-1"}, "is not a size"),
        ({"advertise": "127.0.0.1:4002"}, "advertise must be .* without a port"),
        ({"advertise": "[2001:db8::1]:4002"}, "advertise must be .* without a port"),
        ({"advertise": "::"}, "advertise must be"),
        ({"advertise": "no host"}, "advertise must be"),
        ({"advertise": f"{'a' * 60}.example"}, "advertise must be"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        NodeOptions(**(BASE | settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "stages"),
    [("3", [3]), ("2-4", [2, 3, 4]), ("3,0", [0, 3]), ("7,2-4", [2, 3, 4, 7]), ("0-63", [*range(64)])],
)
def test_each_of_several_stages_has_options_of_its_own(text: str, stages: list[int]) -> None:
    options = NodeOptions(**(BASE | {"stages": text, "port": 4001}))
    of_each = options.of_each_module()
    assert [(each.asked_stage, each.stages, each.port) for each in of_each] == [
        (stage, None, 4001 + number) for number, stage in enumerate(stages)
    ]
    assert not any(each.may_move or each.may_host_more for each in (options, *of_each))
    assert {each.port for each in dataclasses.replace(options, port=0).of_each_module()} == {0}


def test_further_modules_need_ports_too() -> None:
    with pytest.raises(ConfigError, match="port must be from 0 to 65535, not 65536"):
        NodeOptions(**(BASE | {"stages": "1-2", "port": 65_535})).of_each_module()


def test_only_a_node_without_a_stage_hosts_more() -> None:
    may = [NodeOptions(**(BASE | more)).may_host_more for more in ({}, {"modules": 2}, {"modules": 1}, {"stage": "1"})]
    assert may == [True, True, False, False]


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("1024", 1024), ("512MiB", 2**29), ("1.5 gib", 3 * 2**29), ("2GB", 2 * 10**9)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e9", "5 parsecs", "1GiB2"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)


def test_where_the_key_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPSTONE_HOME", "/srv/skipstone")
    assert default_identity_path() == Path("/srv/skipstone/identity.key")
    monkeypatch.delenv("SKIPSTONE_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert default_identity_path() == Path("/data/skipstone/identity.key")


def test_without_a_home_it_says_where_a_key_can_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_entry(user: int) -> None:
        raise KeyError(user)

    for name in ("SKIPSTONE_HOME", "XDG_DATA_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", no_entry)
    manifest, key = tmp_path / "run.toml", tmp_path / "key"
    refused = CliRunner().invoke(app, ["new", str(manifest)])
    assert refused.exit_code == 78
    assert all(word in refused.output for word in ("HOME is not set", "--identity", "SKIPSTONE_HOME"))
    assert CliRunner().invoke(app, ["new", str(manifest), "--identity", str(key)]).exit_code == 0
    assert not is_default_identity(key)
