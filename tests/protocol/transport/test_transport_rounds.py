"""Rounds over real links: their tensors, their words, their refusals, and microbatches beside them."""

from __future__ import annotations

import asyncio

import numpy as np

from protocol.codecs import decode_into, encode_into
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.interfaces.transport import Question, QuestionAbout, Refusal
from swarm.vocabulary.averaging_messages import Accepting, Contribution, Pulse, RoundId, StateChunk
from swarm.vocabulary.types import Codec, ModuleId, PeerId
from tests.protocol.transport.link_peers import FLOATS, LONG, Node, forward, pattern, two_nodes, with_settings

DIGEST = b"d" * 32


def round_of(peer: PeerId) -> RoundId:
    return RoundId(ModuleId(1), 3, 0, peer)


async def send_piece(sender: Node, receiver: Node, chunk: int, spec: TensorSpec, data: bytes) -> None:
    message = Contribution(round_of(sender.peer), chunk, chunk + 1, bytes(64))
    await sender.transport.send(receiver.peer, message, spec, memoryview(data))


async def test_an_encoded_vector_arrives_and_can_be_decoded_where_it_lies() -> None:
    values = np.random.default_rng(0).standard_normal(50_001).astype(np.float32)
    spec = TensorSpec(values.shape, DType.FLOAT32, Codec.INT8)
    encoded = bytearray(spec.byte_length)
    encode_into(Codec.INT8, values, memoryview(encoded))
    async with two_nodes() as (left, right):
        await send_piece(left, right, 7, spec, encoded)
        await right.handler.until(lambda: right.handler.tensors)
        sender, message, tensor, data = right.handler.tensors[0]
        assert (sender, message, tensor) == (left.peer, Contribution(round_of(left.peer), 7, 8), spec)
        result = np.empty_like(values)
        decode_into(tensor.codec, memoryview(data), result)
        assert np.linalg.norm(result - values) <= 7e-3 * np.linalg.norm(values)


async def test_a_chunk_of_state_arrives_as_it_is() -> None:
    spec = TensorSpec((4096,), DType.FLOAT32)
    async with two_nodes() as (left, right):
        message = StateChunk(ModuleId(1), DIGEST, 5)
        await left.transport.send(right.peer, message, spec, memoryview(pattern(spec, 1)))
        await right.handler.until(lambda: right.handler.tensors)
        assert right.handler.tensors == [(left.peer, message, spec, pattern(spec, 1))]


async def test_a_piece_that_is_not_wanted_is_cancelled_without_a_receipt_and_the_link_goes_on() -> None:
    spec = TensorSpec((2**20,), DType.FLOAT32)
    async with two_nodes() as (left, right):
        right.handler.refusal = Refusal(False, "an older round")
        for chunk in range(100):
            await send_piece(left, right, chunk, spec, bytes(spec.byte_length))
        await right.transport.send_control(left.peer, Accepting(round_of(left.peer)))
        await left.handler.until(lambda: left.handler.messages)
        assert left.handler.messages == [(right.peer, Accepting(round_of(left.peer)))]
        right.handler.refusal = None
        await send_piece(left, right, 0, spec, bytes(spec.byte_length))
        await right.handler.until(lambda: right.handler.tensors)
        assert not left.handler.downs


async def test_more_pieces_than_may_be_open_can_be_given_at_once_and_microbatches_pass_them() -> None:
    spec = TensorSpec((2**18,), DType.FLOAT32)
    data = bytes(spec.byte_length)
    async with two_nodes(with_settings(bulk_chunk_bytes=64 * 1024)) as (left, right), asyncio.timeout(LONG):
        pieces = [asyncio.create_task(send_piece(left, right, chunk, spec, data)) for chunk in range(100)]
        await right.handler.until(lambda: right.handler.tensors)
        message, floats = forward(left.peer, right.peer), memoryview(pattern(FLOATS, 1))
        await asyncio.gather(left.transport.send(right.peer, message, FLOATS, floats), *pieces)
        await right.handler.until(lambda: len(right.handler.tensors) == 101)
        order = [message for _, message, _, _ in right.handler.tensors]
        assert order.index(message) < 50
        assert sorted(piece.first_chunk for piece in order if isinstance(piece, Contribution)) == list(range(100))
        assert not left.handler.downs


async def test_words_and_the_question_for_a_hash_list_travel() -> None:
    question = Question(QuestionAbout.STATE, module=ModuleId(2, 1), digest=DIGEST)
    async with two_nodes() as (left, right):
        pulse = Pulse(round_of(left.peer), (left.peer,), (right.peer,))
        await left.transport.send_control(right.peer, pulse)
        await right.handler.until(lambda: right.handler.messages)
        assert right.handler.messages == [(left.peer, pulse)]
        right.handler.answering = lambda asked: repr(asked == question).encode()
        assert await left.transport.ask(right.peer, question, 10) == b"True"
