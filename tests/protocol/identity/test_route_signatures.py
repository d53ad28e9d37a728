"""What a data node has signed, and what nobody else can make of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.frames.frames import decode, encode
from protocol.frames.tensors import TensorFrame
from protocol.identity import signatures as routes
from protocol.identity.keys import Identity
from protocol.identity.signatures import Routes, signed_bytes
from protocol.interfaces.tensor_spec import DType, TensorSpec
from swarm.vocabulary.pipeline_messages import Backward, Forward, MicrobatchTensor, Purpose
from swarm.vocabulary.types import Hop, MicrobatchId, ModuleId, Path, RunId, SignedRoute

RUN, OTHER_RUN = RunId("ab" * 32), RunId("cd" * 32)
DATA_NODE, HOP = Identity.generate(), Identity.generate()
NUMBER = MicrobatchId(DATA_NODE.peer, 7)
PATH = Path(DATA_NODE.peer, tuple(Hop(ModuleId(stage), HOP.peer) for stage in (1, 2, 3)))
LIFETIME_S = 61.23456
NOT_ITS = "the route's signature is not its data node's"


def signed(purpose: Purpose = Purpose.TRAIN) -> Path:
    return Routes(DATA_NODE, RUN).signed(NUMBER, PATH, purpose, LIFETIME_S)


def forward(path: Path, microbatch: MicrobatchId = NUMBER, purpose: Purpose = Purpose.TRAIN) -> Forward:
    return Forward(microbatch, path, 1, purpose, LIFETIME_S)


def read_by_another(message: MicrobatchTensor) -> str | None:
    """What a hop finds wrong with it when it comes by the wire."""
    frame = decode(encode(TensorFrame(message, TensorSpec((2, 1024), DType.FLOAT32), 1, 1)))
    assert isinstance(frame, TensorFrame)
    assert isinstance(frame.message, Forward | Backward)
    return Routes(HOP, RUN).fault(frame.message)


def test_what_is_signed_is_written_out() -> None:
    modules = (ModuleId(1), ModuleId(258, 3))
    assert signed_bytes(RUN, NUMBER, Purpose.TRAIN, 1.5, modules) == (
        b"skipstone-route:2\0" + b"\xab" * 32 + bytes([0, 0, 0, 0, 0, 0, 0, 7, 1, 0, 0, 5, 220])
        + bytes([0, 1, 0, 0, 1, 2, 0, 3])
    )  # fmt: skip


def test_documents_are_signed_apart_from_modules() -> None:
    """Else what was signed as modules could be shown as documents."""
    modules = (ModuleId(1), ModuleId(258, 3))
    assert signed_bytes(RUN, NUMBER, Purpose.TRAIN, 1.5, modules, (5, 70000)) == (
        b"skipstone-route-documents:1\0" + b"\xab" * 32 + bytes([0, 0, 0, 0, 0, 0, 0, 7, 1, 0, 0, 5, 220])
        + bytes([0, 2, 0, 1, 0, 0, 1, 2, 0, 3, 0, 0, 0, 5, 0, 1, 17, 112])
    )  # fmt: skip


def test_nobody_on_the_way_makes_others_mask_it_otherwise() -> None:
    path = Routes(DATA_NODE, RUN).signed(NUMBER, PATH, Purpose.TRAIN, LIFETIME_S, (5, 6))
    assert path.route is not None
    assert path.documents == (5, 6)
    assert read_by_another(forward(path)) is None
    assert read_by_another(Backward(NUMBER, path, 1)) is None
    for documents in ((6, 5), (11,), (5, 6, 1), ()):
        lie = replace(path, route=replace(path.route, documents=documents))
        assert read_by_another(forward(lie)) == NOT_ITS
    counted = Routes(DATA_NODE, RUN).signed(NUMBER, PATH, Purpose.TRAIN, LIFETIME_S, (5, 6), 7)
    assert counted.route is not None
    assert counted.labels == 7
    assert read_by_another(Backward(NUMBER, counted, 1)) is None
    for route in (replace(counted.route, labels=6), replace(counted.route, labels=0), replace(path.route, labels=7)):
        assert read_by_another(forward(replace(counted, route=route))) == NOT_ITS
    unsigned = signed()
    assert unsigned.route is not None
    assert read_by_another(forward(replace(unsigned, route=replace(unsigned.route, documents=(11,))))) == NOT_ITS


def test_a_signed_route_holds_out_and_back_at_every_hop() -> None:
    path = signed()
    for position in range(3):
        assert read_by_another(Forward(NUMBER, path, position, Purpose.TRAIN, LIFETIME_S)) is None
        assert read_by_another(Backward(NUMBER, path, position)) is None
    assert read_by_another(forward(signed(Purpose.EVALUATE), purpose=Purpose.EVALUATE)) is None


def test_a_route_comes_back_as_it_was_signed() -> None:
    """Else the data node takes it for another one, and its microbatch is lost."""
    sent = Backward(NUMBER, signed(), 1)
    frame = decode(encode(TensorFrame(sent, TensorSpec((2, 1024), DType.FLOAT32), 1, 1)))
    assert isinstance(frame, TensorFrame)
    assert isinstance(frame.message, Backward)
    assert frame.message.path == sent.path


def test_repair_may_replace_peers_and_leave_modules_out() -> None:
    path = signed()
    for repaired in (path.with_peer(1, DATA_NODE.peer), path.without(0), path.without(1), path.without(2)):
        assert read_by_another(forward(repaired)) is None
        assert read_by_another(Backward(NUMBER, repaired, 0)) is None


def tampered(**changes: object) -> Path:
    path = signed()
    assert path.route is not None
    return replace(path, route=replace(path.route, **changes))  # type: ignore[arg-type]


def flipped(at: int) -> bytes:
    route = signed().route
    assert route is not None
    signature = bytearray(route.signature)
    signature[at] ^= 1
    return bytes(signature)


@pytest.mark.parametrize(
    "message",
    [
        forward(signed(), MicrobatchId(DATA_NODE.peer, 8)),
        forward(replace(signed(), data_node=HOP.peer), MicrobatchId(HOP.peer, 7)),
        forward(signed(), purpose=Purpose.EVALUATE),
        forward(signed(Purpose.EVALUATE)),
        Backward(NUMBER, signed(Purpose.EVALUATE), 1),
        replace(forward(tampered(lifetime_s=3600.0)), lifetime_s=3600.0),
        Backward(NUMBER, tampered(lifetime_s=3600.0), 1),
        forward(tampered(modules=(ModuleId(1), ModuleId(2), ModuleId(3), ModuleId(4)))),
        forward(tampered(signature=flipped(0))),
        forward(tampered(signature=flipped(63))),
    ],
)
def test_another_number_purpose_lifetime_or_module_is_not_signed(message: MicrobatchTensor) -> None:
    assert read_by_another(message) == NOT_ITS


def test_a_signature_holds_in_its_run_only() -> None:
    assert Routes(HOP, OTHER_RUN).fault(forward(signed())) == NOT_ITS


@pytest.mark.parametrize("stages", [(1, 3, 2), (2, 1), (1, 2, 3, 4), (1, 1), (4,)])
def test_a_path_that_leaves_the_route(stages: tuple[int, ...]) -> None:
    path = replace(signed(), hops=tuple(Hop(ModuleId(stage), HOP.peer) for stage in stages))
    for message in (forward(path), Backward(NUMBER, path, 0)):
        assert read_by_another(message) == "the path visits other modules than its data node has signed"


def test_a_path_without_a_signature() -> None:
    assert read_by_another(forward(PATH)) == "its data node has not signed the route"
    assert read_by_another(Backward(NUMBER, PATH, 0)) == "its data node has not signed the route"


def test_a_signature_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "REMEMBERED", 2)
    checked: list[bytes] = []
    honest = routes.verify

    def verify(key: bytes, signature: bytes, data: bytes) -> bool:
        checked.append(signature)
        return honest(key, signature, data)

    monkeypatch.setattr(routes, "verify", verify)
    hop, own = Routes(HOP, RUN), Routes(DATA_NODE, RUN)
    path = own.signed(NUMBER, PATH, Purpose.TRAIN, LIFETIME_S)
    assert own.fault(forward(path)) is None
    assert checked == [], "what it has signed itself it knows"
    for message in (forward(path), Backward(NUMBER, path, 0), forward(path.with_peer(0, DATA_NODE.peer))):
        assert hop.fault(message) is None
    assert len(checked) == 1
    forged = forward(replace(path, route=replace(_route(path), lifetime_s=1.0)))
    for _ in range(3):
        assert hop.fault(forged) == NOT_ITS
    assert len(checked) == 4, "only what is good is remembered"
    for number in range(3):
        other = MicrobatchId(DATA_NODE.peer, 100 + number)
        assert hop.fault(forward(own.signed(other, PATH, Purpose.TRAIN, LIFETIME_S), other)) is None
    assert hop.fault(forward(path)) is None
    assert len(checked) == 8, "it had been forgotten: the memory is bounded"


def _route(path: Path) -> SignedRoute:
    assert path.route is not None
    return path.route
