"""Questions and answers of one link: numbered, few at once, each with a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from protocol.frames.frames import SmallFrame
from protocol.frames.rpc import MAX_ANSWER_BYTES, AnswerFrame, QuestionFrame
from protocol.interfaces.transport import LinkHandler, Question, QuestionAbout
from protocol.transport.settings import MAX_OPEN_QUESTIONS
from swarm.vocabulary.errors import PeerError, ProtocolViolation, Rejected, Stalled
from swarm.vocabulary.types import PeerId, short


class Asking:
    """The open questions to a peer."""

    def __init__(self, peer: PeerId) -> None:
        self._peer = peer
        self._places = asyncio.Semaphore(MAX_OPEN_QUESTIONS)
        self._open: dict[int, tuple[QuestionAbout, asyncio.Future[bytes]]] = {}
        self._next_id = 1
        self._closed: PeerError | None = None

    async def ask(self, question: Question, timeout_s: float, say: Callable[[SmallFrame], None]) -> bytes:
        """Asks and waits for the answer. Errors as `Transport.ask`; the time limit includes waiting for one of the
        places.
        """
        try:
            async with asyncio.timeout(timeout_s), self._places:
                return await self._ask(question, say)
        except TimeoutError:
            raise Stalled(
                f"{short(self._peer)} did not answer a {question.about.value} question within {timeout_s:g} s"
            ) from None

    def answered(self, answer: AnswerFrame) -> None:
        """Takes an answer; one that came too late is dropped.

        Raises:
            ProtocolViolation: it answers another kind of question.
        """
        about, result = self._open.get(answer.id, (None, None))
        if result is None or result.done():
            return
        if answer.about is None:
            result.set_exception(Rejected(f"{short(self._peer)} refused to answer: {answer.content.decode()}"))
        elif answer.about is about:
            result.set_result(answer.content)
        else:
            raise ProtocolViolation(f"answer {answer.id} is about something else than the question")

    def close(self, error: PeerError) -> None:
        self._closed = error
        for _, result in self._open.values():
            if not result.done():
                result.set_exception(error)

    async def _ask(self, question: Question, say: Callable[[SmallFrame], None]) -> bytes:
        if self._closed is not None:
            raise self._closed
        number, self._next_id = self._next_id, self._next_id % (2**32 - 1) + 1
        result: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._open[number] = (question.about, result)
        try:
            say(QuestionFrame(number, question))
            return await result
        finally:
            del self._open[number]


class Answering:
    """The open questions of a peer, each answered in a task of the link's group."""

    def __init__(
        self, peer: PeerId, handler: LinkHandler, tasks: asyncio.TaskGroup, say: Callable[[SmallFrame], None]
    ) -> None:
        self._peer = peer
        self._handler = handler
        self._tasks = tasks
        self._say = say
        self._open = 0

    def asked(self, frame: QuestionFrame) -> None:
        if self._open >= MAX_OPEN_QUESTIONS:
            self._say(_refusal(frame, f"{MAX_OPEN_QUESTIONS} questions are open already"))
            return
        self._open += 1
        self._tasks.create_task(self._answer(frame))

    async def _answer(self, frame: QuestionFrame) -> None:
        try:
            content = await self._handler.answer(self._peer, frame.question)
        except PeerError as error:
            answer = _refusal(frame, str(error))
        else:
            answer = (
                AnswerFrame(frame.id, frame.question.about, content)
                if len(content) <= MAX_ANSWER_BYTES
                else _refusal(
                    frame, f"the answer has {len(content)} bytes, more than the {MAX_ANSWER_BYTES} that travel"
                )
            )
        finally:
            self._open -= 1
        self._say(answer)


def _refusal(frame: QuestionFrame, why: str) -> AnswerFrame:
    return AnswerFrame(frame.id, None, why.encode())
