"""Frames of questions and answers. What they are about decides which message of link.proto they consist of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, get_type_hints

from google.protobuf.message import DecodeError

from protocol.frames.codec import Around, Converter, MessageType, checked_version, field_converter, inner_type
from protocol.generated import link_pb2 as wire
from protocol.interfaces.transport import Question, QuestionAbout
from swarm.vocabulary.bounds import Detail, Length
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import AnchorVersion

MAX_ANSWER_BYTES: Final = 68 * 1024

_QUESTION: Final[MessageType] = wire.Question.DESCRIPTOR
_ANSWER: Final[MessageType] = wire.Answer.DESCRIPTOR
_ANSWER_FIELDS: Final = {about: about.value for about in QuestionAbout} | {QuestionAbout.EVALUATE: "evaluation"}
_ANSWER_KINDS: Final = {field: about for about, field in _ANSWER_FIELDS.items()}


@dataclass(frozen=True, slots=True)
class QuestionFrame:
    """A question as a frame: the number that its answer repeats, and what is asked."""

    id: int
    question: Question


@dataclass(frozen=True, slots=True)
class AnswerFrame:
    """An answer as a frame. A refusal has `about` None and its text in `content`."""

    id: int
    about: QuestionAbout | None
    content: bytes


def _parts(about: QuestionAbout) -> dict[str, Converter]:
    """The fields of a Question that are asked with; none of them may be missing."""
    hints = get_type_hints(Question, include_extras=True)
    asked: MessageType = _QUESTION.fields_by_name[about.value].message_type
    return {
        field.name: field_converter(inner_type(hints[field.name]) or hints[field.name], field, f"Question.{field.name}")
        for field in asked.fields
    }


_ABOUT: Final = {about: _parts(about) for about in QuestionAbout}
_REFUSAL: Final = field_converter(Detail, _ANSWER.fields_by_name["refused"], "a refusal")
_CONTENT: Final = field_converter(
    Annotated[bytes, Length(0, MAX_ANSWER_BYTES)], _ANSWER.fields_by_name["status"], "an answer"
)


def _write_question(frame: QuestionFrame, _: Around) -> dict[str, Any]:
    question = frame.question
    fields = {name: part.write(getattr(question, name), None) for name, part in _ABOUT[question.about].items()}
    return {"id": frame.id, question.about.value: fields}


def _read_question(question: wire.Question, _: Around) -> QuestionFrame:
    kind = question.WhichOneof("about")
    if kind is None:
        raise ProtocolViolation("a question about nothing known")
    about, said = QuestionAbout(kind), getattr(question, kind)
    fields = {name: part.read(getattr(said, name), None) for name, part in _ABOUT[about].items()}
    return QuestionFrame(question.id, Question(about, **fields))


def _write_answer(answer: AnswerFrame, _: Around) -> dict[str, Any]:
    if answer.about is None:
        return {"id": answer.id, "refused": _REFUSAL.write(answer.content.decode(errors="replace"), None)}
    return {"id": answer.id, _ANSWER_FIELDS[answer.about]: answer.content}


def _read_answer(answer: wire.Answer, _: Around) -> AnswerFrame:
    kind = answer.WhichOneof("about")
    if kind is None:
        raise ProtocolViolation("an answer without content")
    if kind == "refused":
        return AnswerFrame(answer.id, None, _REFUSAL.read(answer.refused, None).encode())
    return AnswerFrame(answer.id, _ANSWER_KINDS[kind], _CONTENT.read(getattr(answer, kind), None))


CONVERTERS: Final[dict[type, Converter]] = {
    QuestionFrame: Converter(_write_question, _read_question),
    AnswerFrame: Converter(_write_answer, _read_answer),
}


HASH_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class HashList:
    """The content that a digest covers, but for the chunks themselves."""

    version: AnchorVersion
    elements: int  # Of the parameters; the momentum has as many
    chunk_elements: int
    hashes: tuple[bytes, ...]  # BLAKE3 of each chunk of the parameters, then of the momentum


def encode_hash_list(hash_list: HashList) -> bytes:
    """Serialises a hash list, at most 64 KiB for up to 10^9 elements."""
    version = hash_list.version
    data: bytes = wire.HashList(
        round=version.round,
        steps=version.steps,
        tokens=version.tokens,
        fragment=version.fragment,
        elements=hash_list.elements,
        chunk_elements=hash_list.chunk_elements,
        hashes=b"".join(hash_list.hashes),
    ).SerializeToString()
    return data


def decode_hash_list(data: bytes, *, digest: bytes, elements: int, chunk_elements: int) -> HashList:
    """Parses a peer's hash list; the caller checks by hashing that it leads to `digest`. Raises ProtocolViolation."""
    if len(data) > MAX_ANSWER_BYTES:
        raise ProtocolViolation(f"hash list: {len(data)} bytes are more than {MAX_ANSWER_BYTES}")
    try:
        said = wire.HashList.FromString(data)
    except DecodeError:
        raise ProtocolViolation(f"hash list: {len(data)} bytes are none") from None
    if (said.elements, said.chunk_elements) != (elements, chunk_elements):
        raise ProtocolViolation(
            f"hash list: {said.elements} elements in chunks of {said.chunk_elements};"
            f" this module has {elements} in chunks of {chunk_elements}"
        )
    count = 2 * -(-elements // chunk_elements)
    if len(said.hashes) != count * HASH_BYTES:
        raise ProtocolViolation(f"hash list: {len(said.hashes)} bytes are not {count} hashes of {HASH_BYTES} bytes")
    version = checked_version(AnchorVersion(said.round, said.steps, said.tokens, said.fragment, digest))
    hashes = tuple(said.hashes[at : at + HASH_BYTES] for at in range(0, len(said.hashes), HASH_BYTES))
    return HashList(version, elements, chunk_elements, hashes)
