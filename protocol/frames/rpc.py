"""Questions and answers as they travel. What they are about decides which message of link.proto they consist of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, get_type_hints

from protocol.frames.codec import Around, Converter, MessageConverter, field_converter, inner_type
from protocol.frames.fields import read_detail
from protocol.generated import link_pb2 as wire
from protocol.interfaces.transport import Question, QuestionAbout
from swarm.vocabulary.bounds import DETAIL_CHARACTERS
from swarm.vocabulary.errors import ProtocolViolation

MAX_ANSWER_BYTES: Final = 64 * 1024

_ANSWER_FIELDS: Final = {about: about.value for about in QuestionAbout} | {QuestionAbout.EVALUATE: "evaluation"}
_ANSWER_KINDS: Final = {field: about for about, field in _ANSWER_FIELDS.items()}


@dataclass(frozen=True, slots=True)
class QuestionFrame:
    id: int
    question: Question


@dataclass(frozen=True, slots=True)
class AnswerFrame:
    """`about` is None exactly when the question was refused; then `content` is the refusal's text in UTF-8."""

    id: int
    about: QuestionAbout | None
    content: bytes


def _parts(about: QuestionAbout) -> dict[str, Converter]:
    """The fields of a Question that are asked with; none of them may be missing."""
    hints = get_type_hints(Question, include_extras=True)
    fields = wire.Question.DESCRIPTOR.fields_by_name[about.value].message_type.fields
    return {
        field.name: field_converter(inner_type(hints[field.name]) or hints[field.name], field, f"Question.{field.name}")
        for field in fields
    }


_PARTS: Final = {about: _parts(about) for about in QuestionAbout}


def _write_question(frame: QuestionFrame, _: Around) -> dict[str, Any]:
    question, about = frame.question, frame.question.about
    fields = {
        name: part.write(getattr(question, name), None) if part.write else getattr(question, name)
        for name, part in _PARTS[about].items()
    }
    return {"id": frame.id, about.value: fields}


def _read_question(question: wire.Question, _: Around) -> QuestionFrame:
    kind = question.WhichOneof("about")
    if kind is None:
        raise ProtocolViolation("a question about nothing known")
    about, said = QuestionAbout(kind), getattr(question, kind)
    fields = {
        name: part.read(getattr(said, name), None) if part.read else getattr(said, name)
        for name, part in _PARTS[about].items()
    }
    return QuestionFrame(question.id, Question(about, **fields))


def _write_answer(answer: AnswerFrame, _: Around) -> dict[str, Any]:
    if answer.about is None:
        return {"id": answer.id, "refused": answer.content.decode(errors="replace")[:DETAIL_CHARACTERS]}
    return {"id": answer.id, _ANSWER_FIELDS[answer.about]: answer.content}


def _read_answer(answer: wire.Answer, _: Around) -> AnswerFrame:
    kind = answer.WhichOneof("about")
    if kind is None:
        raise ProtocolViolation("an answer without content")
    if kind == "refused":
        return AnswerFrame(answer.id, None, read_detail(answer.refused).encode())
    content: bytes = getattr(answer, kind)
    if len(content) > MAX_ANSWER_BYTES:
        raise ProtocolViolation(f"an answer of {len(content)} bytes is longer than {MAX_ANSWER_BYTES}")
    return AnswerFrame(answer.id, _ANSWER_KINDS[kind], content)


CONVERTERS: Final = {
    QuestionFrame: MessageConverter(_write_question, _read_question),
    AnswerFrame: MessageConverter(_write_answer, _read_answer),
}
"""By class."""
