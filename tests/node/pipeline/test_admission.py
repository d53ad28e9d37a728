"""Each thing that no honest peer sends is a violation that says what was wrong."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    return None


def admission(own: PeerId = A, stage: int = 1) -> Admission:
    return Admission(MANIFEST, own, ModuleId(stage), signed, signed)


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
def test_an_honest_neighbour_may_send(own: PeerId, stage: int, sender: PeerId, message: MicrobatchTensor) -> None:
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
    with pytest.raises(ProtocolViolation, match=r"this run has \(2, 16, 16\) FLOAT32"):
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


@pytest.mark.parametrize(
    ("rules", "sender", "message", "why"),
    [
        (admission(), A, forward(position=1), "for another peer"),
        *((admission(), peer, forward(), "may send on this path") for peer in (A, B, PeerId("stranger"))),
        *((admission(), peer, backward(), "may send on this path") for peer in (DATA, A)),
        (admission(DATA, 0), A, forward(position=-1), "to the start"),
        (admission(DATA, 0), B, backward(position=2), "to the end"),
        *((admission(), DATA, made(position=off), "not on") for made in (forward, backward) for off in (-2, 3, 255)),
    ],
)
def test_only_a_neighbour_may_send(rules: Admission, sender: PeerId, message: MicrobatchTensor, why: str) -> None:
    with pytest.raises(ProtocolViolation, match=why):
        rules.check(sender, message, TENSOR)


def test_a_module_that_was_hosted_once_is_no_violation_but_not_hosted() -> None:
    moved = admission(A, 2)
    moved.check(DATA, forward(), TENSOR)
    assert not moved.hosts(forward())
    assert moved.hosts(forward(position=2)), "an end is no hop"
    assert moved.hosts(backward(position=-1))


def test_the_rule_for_paths_is_about_training() -> None:
    """The whole model may be measured, each stage once, and in order."""
    rules = Admission(small_manifest(stages__per_path=1), A, ModuleId(1), signed, signed)
    measured = replace(forward(), purpose=Purpose.EVALUATE)
    rules.check(DATA, measured, TENSOR)
    again, back = path_of((1, A), (2, B), (2, B)), path_of((1, A), (2, B), (1, B))
    for message in (forward(), backward(), replace(measured, path=again), replace(measured, path=back)):
        with pytest.raises(ProtocolViolation, match="different stages"):
            rules.check(B if isinstance(message, Backward) else DATA, message, TENSOR)


def test_a_path_of_a_run_that_skips_stages_may_have_lost_one_more() -> None:
    manifest = small_manifest(stages__blocks=(0, 1, 1, 1, 1), stages__per_path=3)
    rules = Admission(manifest, A, ModuleId(1), signed, signed)
    for stages in ((1, 2, 4), (1, 3)):
        rules.check(DATA, forward(path_of(*((stage, A if stage == 1 else B) for stage in stages))), TENSOR)
    for stages in ((1,), (1, 2, 3, 4)):
        with pytest.raises(ProtocolViolation, match="not 3 different stages"):
            rules.check(DATA, forward(path_of(*((stage, A if stage == 1 else B) for stage in stages))), TENSOR)


def test_a_route_must_be_signed_but_is_not_better_for_that_where_the_run_does_not_have_it() -> None:
    for modules, why in (((1, 1), "different stages"), ((2, 1), "may not follow"), ((1,), "not 2 different stages")):
        route = SignedRoute(tuple(ModuleId(stage) for stage in modules), 60.0, bytes(64))
        for message in (forward(replace(AB, route=route)), backward(replace(AB, route=route))):
            with pytest.raises(ProtocolViolation, match=why):
                admission().check(B if isinstance(message, Backward) else DATA, message, TENSOR)
    rules = Admission(MANIFEST, A, ModuleId(1), lambda message: "the route's signature is not its data node's", signed)
    for sender, message in ((DATA, forward()), (B, backward())):
        with pytest.raises(ProtocolViolation, match=r"data#1: the route's signature is not its data node's"):
            rules.check(sender, message, TENSOR)


def of_labels(labels: int) -> Path:
    return replace(AB, route=SignedRoute(tuple(hop.module for hop in AB.hops), 60.0, bytes(64), labels=labels))


def test_labels_are_told_where_some_tokens_are_none_and_of_what_is_trained_on() -> None:
    talks = small_manifest(data__source="path:talks", data__labels="assistant")
    rules, most = Admission(talks, A, ModuleId(1), signed, signed), talks.microbatch_tokens
    tensor = hidden(*talks.hidden_shape)
    for labels in (1, most):
        rules.check(DATA, forward(of_labels(labels)), tensor)
        rules.check(B, backward(of_labels(labels)), tensor)
    rules.check(DATA, replace(forward(of_labels(0)), purpose=Purpose.EVALUATE), tensor)
    others = Admission(small_manifest(), A, ModuleId(1), signed, signed)
    wrong = [(rules, forward(of_labels(labels))) for labels in (0, most + 1, 2**32 - 1)]
    wrong += [(rules, replace(forward(of_labels(1)), purpose=Purpose.EVALUATE)), (others, forward(of_labels(1)))]
    for admission, message in wrong:
        with pytest.raises(ProtocolViolation, match=r"announces \d+ labels"):
            admission.check(DATA, message, tensor)


def test_hidden_states_alone_have_token_numbers_and_only_in_a_narrow_run() -> None:
    narrow = small_manifest(model__residual=5)
    rules, tensor = Admission(narrow, A, ModuleId(1), signed, signed), hidden_tensor(narrow)
    assert (tensor.shape, tensor.token_bytes, tensor.byte_length) == ((2, 16, 5), 2, 2 * 16 * (4 * 5 + 2))
    gradient = replace(tensor, token_bytes=0)
    rules.check(DATA, forward(), tensor)
    rules.check(B, backward(), gradient)
    for lie in (gradient, replace(tensor, token_bytes=1), replace(tensor, token_bytes=3)):
        with pytest.raises(ProtocolViolation, match=r"announces \d bytes per token number, not 2"):
            rules.check(DATA, forward(), lie)
    for each, sender, message, lie in (
        (rules, B, backward(), tensor),
        (admission(), DATA, forward(), replace(TENSOR, token_bytes=2)),
    ):
        with pytest.raises(ProtocolViolation, match="not 0"):
            each.check(sender, message, lie)
    with pytest.raises(ProtocolViolation, match=r"this run has \(2, 16, 5\)"):
        rules.check(DATA, forward(), replace(tensor, shape=(2, 15, 5)))


OF_DOCUMENTS = small_manifest(model__attention="documents")
LARGEST = OF_DOCUMENTS.microbatch_tokens
LONGEST = OF_DOCUMENTS.model.sequence


def of_documents(*documents: int) -> Path:
    return replace(AB, route=SignedRoute(tuple(hop.module for hop in AB.hops), 60.0, bytes(64), documents))


def hidden(*shape: int) -> TensorSpec:
    return TensorSpec(shape, DType.FLOAT32)


@pytest.mark.parametrize("documents", [(1,), (LONGEST,), (LONGEST,) * (LARGEST // LONGEST), (1,) * LARGEST, (3, 1, 7)])
def test_a_tensor_is_as_long_as_its_documents(documents: tuple[int, ...]) -> None:
    rules = Admission(OF_DOCUMENTS, A, ModuleId(1), signed, signed)
    tensor = hidden(1, sum(documents), OF_DOCUMENTS.model.hidden)
    rules.check(DATA, forward(of_documents(*documents)), tensor)
    rules.check(B, backward(of_documents(*documents)), tensor)


@pytest.mark.parametrize(
    ("documents", "shape"),
    [
        ((), (1, LONGEST, 16)),  # none
        ((), (2, LONGEST, 16)),  # rows of a stream
        ((5, 6), (1, 10, 16)),  # lying about their lengths
        ((5, 6), (11, 1, 16)),  # laid out otherwise
        ((5, 6), (11, 16)),
        ((5, 6), (1, 11, 32)),
        ((0, 5), (1, 5, 16)),  # an empty one
        ((-5, 10), (1, 5, 16)),
        ((LONGEST + 1,), (1, LONGEST + 1, 16)),  # too long for positions
        ((LONGEST,) * (LARGEST // LONGEST) + (1,), (1, LARGEST + 1, 16)),  # too many tokens
    ],
)
def test_documents_that_no_honest_data_node_has(documents: tuple[int, ...], shape: tuple[int, ...]) -> None:
    rules = Admission(OF_DOCUMENTS, A, ModuleId(1), signed, signed)
    for sender, message in ((DATA, forward(of_documents(*documents))), (B, backward(of_documents(*documents)))):
        with pytest.raises(ProtocolViolation, match="with the tokens of the documents"):
            rules.check(sender, message, hidden(*shape))


@given(
    st.lists(st.integers(-2, LONGEST + 2), max_size=12).map(tuple),
    st.one_of(st.none(), st.lists(st.integers(0, 40), min_size=1, max_size=4).map(tuple)),
)
def test_documents_that_a_fuzzer_makes_up(documents: tuple[int, ...], shape: tuple[int, ...] | None) -> None:
    true_shape = (1, sum(documents), OF_DOCUMENTS.model.hidden)
    shape = shape or true_shape
    rules = Admission(OF_DOCUMENTS, A, ModuleId(1), signed, signed)
    honest = bool(documents) and all(1 <= tokens <= LONGEST for tokens in documents) and sum(documents) <= LARGEST
    with nullcontext() if honest and shape == true_shape else pytest.raises(ProtocolViolation):
        rules.check(DATA, forward(of_documents(*documents)), hidden(*shape))


def test_documents_come_in_no_run_of_rows_and_with_no_more_bytes_than_their_tokens() -> None:
    for documents, tensor in (((LONGEST, LONGEST), TENSOR), ((5,), hidden(1, 5, 16))):
        with pytest.raises(ProtocolViolation, match="announces a tensor"):
            admission().check(DATA, forward(of_documents(*documents)), tensor)
