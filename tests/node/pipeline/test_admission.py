"""Each thing that no honest peer sends is a violation that says what was wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from node.pipeline.admission import Admission, hidden_tensor
from protocol.interfaces.tensor_spec import DType, TensorSpec
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.pipeline_messages import Backward, Forward, MicrobatchTensor, Purpose
from swarm.vocabulary.types import Hop, MicrobatchId, ModuleId, Path, PeerId, SignedRoute
from tests.node.small_manifest import small_manifest

DATA, A, B = PeerId("data"), PeerId("a"), PeerId("b")
MANIFEST = small_manifest()
TENSOR = hidden_tensor(MANIFEST)
AB = Path(DATA, (Hop(ModuleId(1), A), Hop(ModuleId(2), B)))


def signed(message: MicrobatchTensor) -> str | None:
    """Nothing is wrong with its signature."""
    return None


def admission(own: PeerId = A, stage: int = 1) -> Admission:
    return Admission(MANIFEST, own, ModuleId(stage), signed)


def forward(path: Path = AB, position: int = 0) -> Forward:
    return Forward(MicrobatchId(DATA, 1), path, position, Purpose.TRAIN, 60.0)


def backward(path: Path = AB, position: int = 0) -> Backward:
    return Backward(MicrobatchId(DATA, 1), path, position)


def path_of(*hops: tuple[int, PeerId], data_node: PeerId = DATA) -> Path:
    return Path(data_node, tuple(Hop(ModuleId(stage), peer) for stage, peer in hops))


@pytest.mark.parametrize(
    ("own", "stage", "sender", "message"),
    [
        (A, 1, DATA, forward(position=0)),
        (B, 2, A, forward(position=1)),
        (DATA, 0, B, forward(position=2)),
        (B, 2, DATA, backward(position=1)),
        (A, 1, B, backward(position=0)),
        (DATA, 0, A, backward(position=-1)),
    ],
)
def test_what_an_honest_neighbour_sends_passes(
    own: PeerId, stage: int, sender: PeerId, message: MicrobatchTensor
) -> None:
    admission(own, stage).check(sender, message, TENSOR)
    assert admission(own, stage).hosts(message)


@pytest.mark.parametrize(
    "tensor",
    [
        replace(TENSOR, shape=TENSOR.shape[:2]),
        replace(TENSOR, shape=(TENSOR.shape[0] * 2, TENSOR.shape[1] // 2, TENSOR.shape[2])),
        replace(TENSOR, dtype=DType.BFLOAT16),
        TensorSpec((2**20, 2**20), DType.FLOAT32),
    ],
)
def test_another_tensor_than_the_manifests(tensor: TensorSpec) -> None:
    with pytest.raises(ProtocolViolation, match=r"this run's are \(2, 16, 16\) FLOAT32"):
        admission().check(DATA, forward(), tensor)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        (path_of((1, A), (2, B), data_node=B), "another data node"),
        (path_of((1, A), (1, B)), "different stages"),
        (path_of((1, A)), "not 2 different stages"),
        (path_of((2, A), (1, B)), "stage 1 may not follow"),
        (path_of((1, A), (2, B), (2, B)), "not 2 different stages"),
        (path_of((1, A), (7, B)), r"module 7\.0"),
        (path_of((1, A), (0, B)), r"module 0\.0"),
        (Path(DATA, (Hop(ModuleId(1, 1), A),)), r"module 1\.1"),
    ],
)
def test_a_path_that_the_run_does_not_have(path: Path, why: str) -> None:
    with pytest.raises(ProtocolViolation, match=why):
        admission().check(DATA, forward(path), TENSOR)


def test_neighbours_may_change_places_where_the_manifest_says_so() -> None:
    manifest = small_manifest(stages__reordering="adjacent")
    rules = Admission(manifest, A, ModuleId(2), signed)
    rules.check(DATA, forward(path_of((2, A), (1, B))), TENSOR)
    assert rules.hosts(forward(path_of((2, A), (1, B))))


def test_a_message_for_somebody_else() -> None:
    with pytest.raises(ProtocolViolation, match="for another peer"):
        admission().check(A, forward(position=1), TENSOR)


@pytest.mark.parametrize(
    ("sender", "message"),
    [(B, forward()), (A, forward()), (DATA, backward()), (A, backward()), (PeerId("stranger"), forward())],
)
def test_only_the_neighbour_on_the_path_may_send(sender: PeerId, message: MicrobatchTensor) -> None:
    with pytest.raises(ProtocolViolation, match="may send on this path"):
        admission().check(sender, message, TENSOR)


def test_neither_end_can_be_passed() -> None:
    data_node = admission(DATA, 0)
    with pytest.raises(ProtocolViolation, match="to the start"):
        data_node.check(A, forward(position=-1), TENSOR)
    with pytest.raises(ProtocolViolation, match="to the end"):
        data_node.check(B, backward(position=2), TENSOR)


@pytest.mark.parametrize("position", [-2, 3, 255])
def test_a_position_off_the_path(position: int) -> None:
    for message in (forward(position=position), backward(position=position)):
        with pytest.raises(ProtocolViolation, match="not on"):
            admission().check(DATA, message, TENSOR)


def test_a_module_that_was_hosted_once_is_no_violation_but_not_hosted() -> None:
    moved = admission(A, 2)
    moved.check(DATA, forward(), TENSOR)
    assert not moved.hosts(forward())
    assert moved.hosts(forward(position=2)), "an end is no hop"
    assert moved.hosts(backward(position=-1))


def test_the_tensor_of_a_bfloat16_run() -> None:
    tensor = hidden_tensor(small_manifest(model__dtype="bfloat16"))
    assert tensor == TensorSpec((2, 16, 16), DType.BFLOAT16)


def test_the_rule_for_paths_is_about_training() -> None:
    """The whole model may be measured, each stage once, and in order: the rules are no way to keep a microbatch going
    to and fro."""
    manifest = small_manifest(stages__per_path=1)
    rules = Admission(manifest, A, ModuleId(1), signed)
    measured = replace(forward(), purpose=Purpose.EVALUATE)
    rules.check(DATA, measured, TENSOR)
    again, back = path_of((1, A), (2, B), (2, B)), path_of((1, A), (2, B), (1, B))
    for message in (forward(), backward(), replace(measured, path=again), replace(measured, path=back)):
        with pytest.raises(ProtocolViolation, match="different stages"):
            rules.check(B if isinstance(message, Backward) else DATA, message, TENSOR)


def test_a_path_of_a_run_that_skips_stages_may_have_lost_one_more() -> None:
    rules = Admission(small_manifest(stages__blocks=(0, 1, 1, 1, 1), stages__per_path=3), A, ModuleId(1), signed)
    for stages in ((1, 2, 4), (1, 3)):
        rules.check(DATA, forward(path_of(*((stage, A if stage == 1 else B) for stage in stages))), TENSOR)
    for stages in ((1,), (1, 2, 3, 4)):
        with pytest.raises(ProtocolViolation, match="not 3 different stages"):
            rules.check(DATA, forward(path_of(*((stage, A if stage == 1 else B) for stage in stages))), TENSOR)


def test_a_route_that_the_run_does_not_have_is_not_better_for_being_signed() -> None:
    for modules, why in (((1, 1), "different stages"), ((2, 1), "may not follow"), ((1,), "not 2 different stages")):
        route = SignedRoute(tuple(ModuleId(stage) for stage in modules), 60.0, bytes(64))
        for message in (forward(replace(AB, route=route)), backward(replace(AB, route=route))):
            with pytest.raises(ProtocolViolation, match=why):
                admission().check(B if isinstance(message, Backward) else DATA, message, TENSOR)


def test_what_its_data_node_has_not_signed() -> None:
    rules = Admission(MANIFEST, A, ModuleId(1), lambda message: "the route's signature is not its data node's")
    for sender, message in ((DATA, forward()), (B, backward())):
        with pytest.raises(ProtocolViolation, match=r"data#1: the route's signature is not its data node's"):
            rules.check(sender, message, TENSOR)
