"""What an encoding left out stays in the replica."""

from __future__ import annotations

import numpy as np
from torch import nn

from node.averaging.anchor.anchor import initial_anchor
from node.averaging.anchor.local_replica import LocalReplica
from node.averaging.anchor.shared_vector import Vector
from node.averaging.exchange.reduction import SentParts, Source
from protocol.codecs import decode_into, encoded_bytes
from swarm.vocabulary.types import Codec

CODEC = Codec.TOP_K_2
ELEMENTS = 3 * 4096
SENT = (slice(0, 4096), slice(4096, 2 * 4096))
OWN = slice(2 * 4096, ELEMENTS)


class _Schedule:
    steps = tokens = 0
    replicas = 1
    before_step = before_change = staticmethod(lambda: None)

    def start_anew(self, steps: int, tokens: int) -> None:
        raise AssertionError("nothing starts anew here")


class Setting:
    """A replica that has moved from its anchor, its snapshot, and work that came after."""

    def __init__(self) -> None:
        part = nn.Linear(96, 128, bias=False)
        self.replica = LocalReplica([part], 1, _Schedule())
        start = normal(0)
        self.source = Source(initial_anchor(self.replica.layout, start), start - normal(1))
        self.later = normal(2)
        self.replica.write(slice(0, ELEMENTS), self.source.snapshot + self.later)
        self.gradient = start - self.source.snapshot
        self.sent = SentParts(CODEC)

    def send(self, part: slice) -> Vector:
        """What the others have of it."""
        data, room = memoryview(bytearray(encoded_bytes(CODEC, 4096))), np.empty(4096, np.float32)
        self.source.encode(part, CODEC, data, room)
        self.sent.note(part, data)
        decoded = np.empty(4096, np.float32)
        decode_into(CODEC, data, decoded)
        data[:] = bytes(len(data))  # the room is used for the next piece
        return decoded


def normal(seed: int) -> Vector:
    return np.random.default_rng(seed).standard_normal(ELEMENTS).astype(np.float32)


def test_the_replica_stands_on_the_new_anchor_less_its_leftover_and_with_its_later_work() -> None:
    here, new = Setting(), normal(3)
    decoded = here.gradient.copy()
    for part in SENT:
        decoded[part] = here.send(part)
    here.sent.rewrite(here.source.anchor.parameters, here.source.snapshot)
    here.replica.carry(slice(0, ELEMENTS), here.source.snapshot, new)
    result = np.empty(ELEMENTS, np.float32)
    here.replica.read(slice(0, ELEMENTS), result)
    np.testing.assert_allclose(result, new - (here.gradient - decoded) + here.later, rtol=0, atol=1e-5)
    np.testing.assert_allclose(result[OWN], (new + here.later)[OWN], rtol=0, atol=1e-5)
    leftover = np.linalg.norm(here.gradient - decoded)
    assert leftover > 0.5 * np.linalg.norm(here.gradient)


def test_a_dissolved_attempt_leaves_no_trace() -> None:
    here = Setting()
    before = here.source.snapshot.copy()
    here.send(SENT[0])
    here.sent = SentParts(CODEC)
    here.send(SENT[1])
    assert np.array_equal(here.source.snapshot, before)
    here.sent.rewrite(here.source.anchor.parameters, here.source.snapshot)
    assert np.array_equal(here.source.snapshot[SENT[0]], before[SENT[0]])
    assert not np.array_equal(here.source.snapshot[SENT[1]], before[SENT[1]])


def test_it_is_rewritten_once() -> None:
    here = Setting()
    here.send(SENT[0])
    here.sent.rewrite(here.source.anchor.parameters, here.source.snapshot)
    once = here.source.snapshot.copy()
    here.sent.rewrite(here.source.anchor.parameters, here.source.snapshot)
    assert np.array_equal(here.source.snapshot, once)


def test_all_of_it_comes_in_the_rounds_after() -> None:
    """Nobody trains: the anchor gets to where the replica was."""
    here = Setting()
    replica, anchor, goal = here.replica, here.source.anchor, here.source.snapshot.copy()
    replica.write(slice(0, ELEMENTS), goal)
    whole = slice(0, ELEMENTS)
    parameters = anchor.parameters.copy()
    away = [float(np.linalg.norm(parameters - goal))]
    for _ in range(20):
        source = Source(initial_anchor(anchor.layout, parameters.copy()), np.empty(ELEMENTS, np.float32))
        replica.read(whole, source.snapshot)
        sent, data = SentParts(CODEC), memoryview(bytearray(encoded_bytes(CODEC, ELEMENTS)))
        source.encode(whole, CODEC, data, np.empty(ELEMENTS, np.float32))
        sent.note(whole, data)
        decoded = np.empty(ELEMENTS, np.float32)
        decode_into(CODEC, data, decoded)
        parameters = parameters - decoded
        sent.rewrite(source.anchor.parameters, source.snapshot)
        replica.carry(whole, source.snapshot, parameters)
        away.append(float(np.linalg.norm(parameters - goal)))
    assert away[0] > away[5] > away[10] > away[20]
    assert away[20] < 0.2 * away[0]
