"""Frames of questions and answers. What they are about decides which message of link.proto they consist of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, get_type_hints

from protocol.frames.codec import Around, Converter, MessageType, field_converter, inner_type
from protocol.generated import link_pb2 as wire
from protocol.interfaces.transport import Question, QuestionAbout
from swarm.vocabulary.bounds import Detail, Length
from swarm.vocabulary.errors import ProtocolViolation

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
    """An answer as a frame. `about` is None exactly when the question was refused; then `content` is the refusal's text
    in UTF-8.
    """

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
"""By class."""
