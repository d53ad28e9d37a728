"""Error feedback: nothing is lost but late, and an attempt that is dissolved leaves no trace."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.error_feedback import DECAYS, ErrorFeedback
from node.averaging.anchor.shared_vector import Vector
from protocol.codecs import decode_into, encode_into, encoded_bytes
from protocol.interfaces.tensor_spec import KEPT
from swarm.vocabulary.errors import StateError
from swarm.vocabulary.types import Codec

ALL = slice(0, 6)


def vector(*values: float) -> Vector:
    return np.array(values, np.float32)


def normal(elements: int, seed: int) -> Vector:
    return np.random.default_rng(seed).standard_normal(elements).astype(np.float32)


def sent(codec: Codec, values: Vector) -> Vector:
    """What others have of it."""
    data, out = bytearray(encoded_bytes(codec, len(values))), np.empty_like(values)
    encode_into(codec, values, memoryview(data))
    decode_into(codec, memoryview(data), out)
    return out


def a_round(feedback: ErrorFeedback, codec: Codec, gradient: Vector, part: slice) -> Vector:
    wanted = gradient.copy()
    feedback.compensate(part, wanted)
    decoded = sent(codec, wanted)
    feedback.keep(part, wanted, decoded)
    return decoded


def test_worked_out_by_hand() -> None:
    feedback = ErrorFeedback(6, decay=0.5)
    wanted = vector(1, 2, 3, 4)
    feedback.compensate(slice(1, 5), wanted)
    assert wanted.tolist() == [1, 2, 3, 4]
    feedback.keep(slice(1, 5), wanted, vector(1, 0, 3, 8))
    feedback.commit()
    assert feedback.residual.tolist() == [0, 0, 2, 0, -4, 0]
    again = vector(10, 10, 10)
    feedback.compensate(slice(2, 5), again)
    assert again.tolist() == [11, 10, 8]


def test_what_is_kept_counts_from_the_commit_on() -> None:
    feedback = ErrorFeedback(6, decay=1.0)
    feedback.keep(ALL, vector(1, 1, 1, 1, 1, 1), vector(0, 0, 0, 0, 0, 0))
    assert not feedback.residual.any()
    feedback.discard()
    feedback.commit()
    assert not feedback.residual.any()


def test_another_attempt_with_other_pieces_replaces_the_first() -> None:
    feedback = ErrorFeedback(6, decay=1.0)
    feedback.keep(slice(0, 4), vector(1, 1, 1, 1), vector(0, 0, 0, 0))
    feedback.discard()
    feedback.keep(slice(0, 3), vector(5, 5, 5), vector(0, 0, 0))
    feedback.keep(slice(0, 3), vector(7, 7, 7), vector(0, 0, 0))
    feedback.commit()
    assert feedback.residual.tolist() == [7, 7, 7, 0, 0, 0]


def test_parts_that_no_piece_covered_stay_as_they_were() -> None:
    feedback = ErrorFeedback(6, decay=0.95)
    feedback.restore(vector(1, 2, 3, 4, 5, 6))
    feedback.keep(slice(2, 4), vector(0, 0), vector(-1, -1))
    feedback.commit()
    assert feedback.residual.tolist() == [1, 2, 1, 1, 5, 6]


@pytest.mark.parametrize("codec", [Codec.INT4, Codec.TOP_K_4, Codec.TOP_K_2])
def test_without_decay_all_encodings_add_up_to_all_gradients_but_for_one_residual(codec: Codec) -> None:
    elements, rounds = 10_000, 60
    feedback = ErrorFeedback(elements, decay=1.0)
    gradients, decoded = np.zeros(elements), np.zeros(elements)
    constant = normal(elements, 0)
    for number in range(rounds):
        gradient = constant + normal(elements, number + 1)
        gradients += gradient
        for part in (slice(0, 4096), slice(4096, elements)):
            decoded[part] += a_round(feedback, codec, gradient[part], part)
        feedback.commit()
    np.testing.assert_allclose(decoded + feedback.residual, gradients, rtol=0, atol=1e-3)
    assert np.linalg.norm(feedback.residual) < 0.8 * np.linalg.norm(gradients)


def test_small_elements_move_only_with_feedback() -> None:
    gradient = np.full(4096, 0.1, np.float32)
    gradient[:64] = 1.0
    feedback, moved = ErrorFeedback(4096, decay=0.95), np.zeros(4096, np.float32)
    for _ in range(50):
        moved += a_round(feedback, Codec.TOP_K_4, gradient, slice(0, 4096))
        feedback.commit()
    alone = sent(Codec.TOP_K_4, gradient)
    assert np.count_nonzero(alone) == KEPT[Codec.TOP_K_4]
    assert np.count_nonzero(moved) > 2000


def test_the_residual_stays_bounded_with_decay() -> None:
    feedback, gradient = ErrorFeedback(4096, DECAYS[Codec.TOP_K_2]), normal(4096, 1)
    for _ in range(200):
        a_round(feedback, Codec.TOP_K_2, gradient, slice(0, 4096))
        feedback.commit()
    assert np.linalg.norm(feedback.residual) <= np.linalg.norm(gradient) / (1 - DECAYS[Codec.TOP_K_2])


def test_a_residual_goes_through_a_checkpoint() -> None:
    first, second = ErrorFeedback(6, 0.95), ErrorFeedback(6, 0.95)
    first.keep(ALL, vector(1, 2, 3, 4, 5, 6), np.zeros(6, np.float32))
    first.commit()
    saved = first.residual.copy()
    second.restore(saved)
    saved[:] = 0
    assert second.residual.tolist() == [1, 2, 3, 4, 5, 6]


def test_a_reset_forgets_everything() -> None:
    feedback = ErrorFeedback(6, 0.95)
    feedback.restore(vector(1, 2, 3, 4, 5, 6))
    feedback.keep(slice(0, 1), vector(9), vector(0))
    feedback.reset()
    feedback.commit()
    assert not feedback.residual.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_what_is_not_finite_never_gets_into_the_residual(bad: float) -> None:
    feedback = ErrorFeedback(6, 1.0)
    with pytest.raises(StateError, match="left out"):
        feedback.keep(slice(0, 2), vector(bad, 1), vector(0, 0))
    with pytest.raises(StateError, match="saved residual"):
        feedback.restore(vector(1, 2, 3, 4, 5, bad))
    feedback.commit()
    assert not feedback.residual.any()


def test_a_residual_of_another_module_is_refused() -> None:
    with pytest.raises(StateError, match="6 finite elements"):
        ErrorFeedback(6, 1.0).restore(vector(1, 2, 3))


@pytest.mark.parametrize("decay", [0.0, -1.0, 1.01, float("nan")])
def test_a_decay_that_makes_no_sense(decay: float) -> None:
    with pytest.raises(ValueError, match="decay"):
        ErrorFeedback(6, decay)
