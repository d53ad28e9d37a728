"""Questions and answers as they travel: link.proto's as plain data, and the way between the two.

Every `read_...` raises ProtocolViolation for what may not come, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from protocol.frames.fields import (
    DETAIL_CHARACTERS,
    checked_digest,
    checked_peer,
    read_detail,
    read_module,
    read_record,
    wire_module,
)
from protocol.generated import link_pb2 as wire
from protocol.interfaces.transport import Question, QuestionAbout
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import MAX_STAGES

MAX_ANSWER_BYTES: Final = 64 * 1024
MAX_EVALUATION_MICROBATCHES: Final = 256

_ANSWER_FIELDS: Final = {
    QuestionAbout.MANIFEST: "manifest",
    QuestionAbout.STATUS: "status",
    QuestionAbout.EVALUATE: "evaluation",
    QuestionAbout.STATE: "state",
    QuestionAbout.DIAL_BACK: "dial_back",
    QuestionAbout.CALL: "call",
    QuestionAbout.CALLED: "called",
}
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


def wire_question(frame: QuestionFrame) -> wire.Question:
    """What `read_question` reads back."""
    question = frame.question
    match question.about:
        case QuestionAbout.MANIFEST:
            return wire.Question(id=frame.id, manifest=wire.ManifestQuestion())
        case QuestionAbout.STATUS:
            return wire.Question(id=frame.id, status=wire.StatusQuestion())
        case QuestionAbout.EVALUATE:
            evaluate = wire.EvaluateQuestion(microbatches=question.microbatches, stages=question.stages)
            return wire.Question(id=frame.id, evaluate=evaluate)
        case QuestionAbout.STATE:
            assert question.module is not None
            state = wire.StateQuestion(module=wire_module(question.module), digest=question.digest)
            return wire.Question(id=frame.id, state=state)
        case QuestionAbout.DIAL_BACK:
            return wire.Question(id=frame.id, dial_back=wire.DialBackQuestion(port=question.port))
        case QuestionAbout.CALL:
            call = wire.CallQuestion(peer=question.peer, record=question.record)
            return wire.Question(id=frame.id, call=call)
        case QuestionAbout.CALLED:
            return wire.Question(id=frame.id, called=wire.CalledQuestion(record=question.record))


def read_question(question: wire.Question) -> QuestionFrame:
    """Raises ProtocolViolation."""
    kind = question.WhichOneof("about")
    if kind is None:
        raise ProtocolViolation("a question about nothing known")
    match QuestionAbout(kind):
        case QuestionAbout.EVALUATE:
            microbatches = _read_microbatches(question.evaluate.microbatches)
            asked = Question(QuestionAbout.EVALUATE, microbatches, stages=_read_stages(question.evaluate.stages))
        case QuestionAbout.STATE:
            module, digest = read_module(question.state.module), checked_digest(question.state.digest)
            asked = Question(QuestionAbout.STATE, module=module, digest=digest)
        case QuestionAbout.DIAL_BACK:
            asked = Question(QuestionAbout.DIAL_BACK, port=_read_port(question.dial_back.port))
        case QuestionAbout.CALL:
            peer, record = checked_peer(question.call.peer), read_record(question.call.record)
            asked = Question(QuestionAbout.CALL, peer=peer, record=record)
        case QuestionAbout.CALLED:
            asked = Question(QuestionAbout.CALLED, record=read_record(question.called.record))
        case about:
            asked = Question(about)
    return QuestionFrame(question.id, asked)


def _read_microbatches(microbatches: int) -> int:
    if not 1 <= microbatches <= MAX_EVALUATION_MICROBATCHES:
        raise ProtocolViolation(
            f"an evaluation of {microbatches} microbatches; 1 to {MAX_EVALUATION_MICROBATCHES} can be asked"
        )
    return microbatches


def _read_port(port: int) -> int:
    if not 0 < port < 65536:
        raise ProtocolViolation(f"port {port} does not exist")
    return port


def _read_stages(stages: Sequence[int]) -> tuple[int, ...]:
    """In rising order, so that none comes twice."""
    read = tuple(stages)
    if any(later <= earlier for earlier, later in pairwise((0, *read, MAX_STAGES))):
        raise ProtocolViolation(f"an evaluation's stages do not rise from at least 1 to at most {MAX_STAGES - 1}")
    return read


def wire_answer(answer: AnswerFrame) -> wire.Answer:
    """What `read_answer` reads back; the text of a refusal is cut to its bound."""
    result = wire.Answer(id=answer.id)
    if answer.about is None:
        result.refused = answer.content.decode(errors="replace")[:DETAIL_CHARACTERS]
    else:
        setattr(result, _ANSWER_FIELDS[answer.about], answer.content)
    return result


def read_answer(answer: wire.Answer) -> AnswerFrame:
    """Raises ProtocolViolation."""
    kind = answer.WhichOneof("about")
    if kind is None:
        raise ProtocolViolation("an answer without content")
    if kind == "refused":
        return AnswerFrame(answer.id, None, read_detail(answer.refused).encode())
    content: bytes = getattr(answer, kind)
    if len(content) > MAX_ANSWER_BYTES:
        raise ProtocolViolation(f"an answer of {len(content)} bytes is longer than {MAX_ANSWER_BYTES}")
    return AnswerFrame(answer.id, _ANSWER_KINDS[kind], content)
