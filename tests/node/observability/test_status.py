"""A status survives the trip through JSON with the keys that it always had, and whatever a peer sends can be read."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.observability.events import MicrobatchCounts
from node.observability.status import (
    Accusation,
    AttachmentStatus,
    CodecChoice,
    CodecStatus,
    DownloadStatus,
    LinkStatus,
    PathStatus,
    PeerStatus,
    ReachStatus,
    RelayStatus,
    RoundStatus,
    RouteStatus,
    StagePrice,
    Status,
    SwarmStatus,
    parse_status,
)
from node.observability.typed_json import to_json
from swarm.vocabulary.errors import ProtocolViolation
from swarm.workload.microbatch_sizes import SizeSummary

RECORDED: dict[str, Any] = {
    "peer": "12D3KooWa",
    "module": "0.0",
    "state": "serving",
    "addresses": ["192.0.2.1:4002"],
    "via": ["12D3KooWb"],
    "reach": {"step": "direct", "reason": "2 of 2 peers connected"},
    "relay": {
        "at": "/ip4/192.0.2.1/tcp/4001/p2p/12D3KooWa",
        "carried_bytes": 1,
        "left_bytes": 2,
        "attached": 3,
        "tunnels": 4,
        "opened": 5,
        "refused": 6,
        "cut_off": 7,
    },
    "relays": [{"relay": "/ip4/192.0.2.2/tcp/4001/p2p/12D3KooWb", "standing": True, "reason": ""}],
    "unix_ms": 1_795_000_000_000,
    "slots": 8,
    "free_slots": 5,
    "round": 3,
    "digest": "ab12",
    "rounds": "round 3; all 2 replicas stand on our anchor",
    "last_round": {"members": 2, "seconds_ago": 4.5, "codec": "int8", "codec_reason": "fits"},
    "accused": [{"peer": "12D3KooWc", "round": 2, "why": "sent nothing"}],
    "catching_up": {"round": 4, "bytes": 5, "total_bytes": 6},
    "codecs": {
        "allowed": {"activations": ["none", "int8"], "gradients": ["none"]},
        "too_coarse": ["gradients: int4"],
        "links": {"abcdef": {"bytes_per_s": 1000, "activations": {"codec": "int8", "why": "slow"}}},
    },
    "steps": 12,
    "accumulated": 48,
    "recomputed": 1,
    "tokens": 24_576,
    "tokens_per_s": 512.5,
    "codec_s": 0.25,
    "counts": {"started": 50, "completed": 48, "abandoned": 2, "duplicated": 0},
    "loss_first": 5.5,
    "loss_last": 3.25,
    "waiting_for": ["2.0"],
    "visits": {"1": 24, "2": 24},
    "measured": ["12D3KooWb"],
    "paths": {
        "stages": {"1": {"launched": 50, "share": 0.5, "ahead": -1.5, "price_s": -0.25}},
        "waiting_s": {"12D3KooWb": 0.0125},
    },
    "sizes": {
        "microbatches": 64,
        "tokens": 8190.5,
        "tokens_spread": 0.012,
        "cost": 12_300.25,
        "cost_spread": 0.004,
        "documents": 17.5,
        "padding": 0.013,
    },
}
"""What a data node answered before its status was typed, with something at every key."""

TYPED = Status(
    peer="12D3KooWa",
    module="0.0",
    state="serving",
    addresses=("192.0.2.1:4002",),
    via=("12D3KooWb",),
    reach=ReachStatus("direct", "2 of 2 peers connected"),
    relay=RelayStatus("/ip4/192.0.2.1/tcp/4001/p2p/12D3KooWa", 1, 2, 3, 4, 5, 6, 7),
    relays=(AttachmentStatus("/ip4/192.0.2.2/tcp/4001/p2p/12D3KooWb", standing=True),),
    unix_ms=1_795_000_000_000,
    slots=8,
    free_slots=5,
    round=3,
    digest="ab12",
    rounds="round 3; all 2 replicas stand on our anchor",
    last_round=RoundStatus(2, 4.5, "int8", "fits"),
    accused=(Accusation("12D3KooWc", 2, "sent nothing"),),
    catching_up=DownloadStatus(4, 5, 6),
    codecs=CodecStatus(
        {"activations": ("none", "int8"), "gradients": ("none",)},
        ("gradients: int4",),
        {"abcdef": LinkStatus(1000, CodecChoice("int8", "slow"))},
    ),
    steps=12,
    accumulated=48,
    recomputed=1,
    tokens=24_576,
    tokens_per_s=512.5,
    codec_s=0.25,
    counts=MicrobatchCounts(50, 48, 2, 0),
    loss_first=5.5,
    loss_last=3.25,
    waiting_for=("2.0",),
    visits={"1": 24, "2": 24},
    measured=("12D3KooWb",),
    paths=PathStatus({"1": StagePrice(50, 0.5, -1.5, -0.25)}, {"12D3KooWb": 0.0125}),
    sizes=SizeSummary(64, 8190.5, 0.012, 12_300.25, 0.004, 17.5, 0.013),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def parsed(table: Any) -> Status:
    return parse_status(json.dumps(table).encode())


def test_its_keys_are_those_of_before() -> None:
    assert to_json(TYPED) == RECORDED
    assert parsed(RECORDED) == TYPED


def test_versions_mix() -> None:
    assert parsed({}) == Status()
    assert parsed({**RECORDED, "colour": "green", "reach": {**RECORDED["reach"], "speed": 3}}) == TYPED
    assert parsed({"steps": 3, "last_round": {"members": 2}}) == Status(steps=3, last_round=RoundStatus(2))


@pytest.mark.parametrize("answer", [b"", b"[]", b"7", b"[" * 50_000, b"9" * 5000])
def test_what_is_no_object_is_no_answer(answer: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        parse_status(answer)


@pytest.mark.parametrize("odd", [None, True, "x", 1e400, 10**400, -(2**63), [], {}, [[]], {"a": []}])
def test_malformed_fields_have_their_defaults(odd: Any) -> None:
    for key in RECORDED:
        read, others = parsed({**RECORDED, key: odd}), to_json(TYPED)
        assert {name: value for name, value in to_json(read).items() if name != key} == {
            name: value for name, value in others.items() if name != key
        }
        assert type(getattr(read, key)) in (type(getattr(TYPED, key)), type(None))
    assert parsed({"tokens_per_s": odd}).tokens_per_s == 0.0
    assert parsed({"steps": odd}).steps == 0
    assert parsed({"loss_last": odd}).loss_last is None


def test_of_lists_and_maps_what_is_well_formed_is_taken() -> None:
    assert parsed({"via": ["a", 5, None, "b"]}).via == ("a", "b")
    assert parsed({"visits": {"1": 2, "2": "x", "3": True}}).visits == {"1": 2}
    assert parsed({"accused": [{"peer": 3}, {"peer": "a", "round": "y"}, "x"]}).accused == (Accusation("a"),)


@given(st.dictionaries(st.sampled_from(sorted(RECORDED)) | st.text(max_size=8), JSON))
def test_whatever_a_peer_sends_can_be_read_summed_up_and_written(answer: dict[str, Any]) -> None:
    said = parsed(answer)
    with_experts = PeerStatus(peer="p", module="0.0", state="serving", answered=said)
    json.dumps(to_json(SwarmStatus.of("9f86", "demo", 2, (with_experts,) * 2, ("0.0", "1.0", "1.1"))), allow_nan=False)
    peer = PeerStatus(peer="p", module="0.0", state="serving", answered=said)
    swarm = SwarmStatus.of("9f86", "demo", 2, (peer, peer))
    json.dumps(to_json(swarm), allow_nan=False)
    assert math.isfinite(swarm.tokens_per_s)


def test_a_swarm_is_the_sum_of_its_data_nodes() -> None:
    hop = PeerStatus(peer="h", module="1.0", state="serving", answered=Status(steps=99, tokens=5))
    silent = PeerStatus(peer="s", module="0.0", state="serving")
    data = [PeerStatus(peer=name, module="0.0", state="serving", answered=TYPED) for name in "ab"]
    summed = to_json(SwarmStatus.of("9f86", "demo", 3, (*data, hop, silent)))
    peers = summed.pop("peers")
    assert summed == {
        "run": "9f86",
        "name": "demo",
        "stages": 3,
        "step": 12,
        "loss": 3.25,
        "tokens": 2 * 24_576,
        "tokens_per_s": 1025.0,
        "microbatches": {"started": 100, "completed": 96, "abandoned": 4, "duplicated": 0},
        "waiting_for": ["2.0"],
    }
    assert peers[0]["answered"] == RECORDED
    assert peers[3] == {
        "peer": "s",
        "module": "0.0",
        "state": "serving",
        "addresses": [],
        "via": [],
        "tokens_per_s": 0.0,
        "slots": 0,
        "free_slots": 0,
        "steps": 0,
        "round": 0,
        "digest": "",
        "answered": None,
    }
    assert SwarmStatus.of("9f86", "demo", 3, (hop, silent)).step is None


def test_the_routes_of_a_swarm_are_those_of_its_data_nodes() -> None:
    modules = ("0.0", "1.0", "1.1")
    told = [{"experts": [0], "visits": 30, "loss": 2.0}, {"experts": [1], "visits": 10, "rerouted": 4, "loss": 1e300}]
    said = parsed({"routes": told, "module_visits": {"1.0": 34, "1.1": 6}, "rerouted": {"1.1": 4}})
    data = [PeerStatus(peer=name, module="0.0", state="serving", answered=said) for name in "ab"]
    swarm = SwarmStatus.of("9f86", "demo", 2, (*data, PeerStatus(peer="h", module="1.0", state="serving")), modules)
    assert swarm.routes == (RouteStatus((0,), 0.75, 60, 0, 2.0), RouteStatus((1,), 0.25, 20, 8, None))
    assert swarm.too_few_peers is None, "three peers, though two of them are data nodes"
    few = SwarmStatus.of("9f86", "demo", 2, tuple(data), modules)
    assert few.too_few_peers == "2 peers for 3 modules: documents of an unserved expert go to the next best"
    assert SwarmStatus.of("9f86", "demo", 2, ()).too_few_peers is None
