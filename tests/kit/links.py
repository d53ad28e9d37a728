"""A transport on which nothing goes."""

from protocol.interfaces.tensor_spec import TensorSpec
from protocol.interfaces.transport import LinkFigures, Question
from swarm.vocabulary.errors import Unreachable
from swarm.vocabulary.pipeline_messages import ControlMessage, TensorMessage
from swarm.vocabulary.types import PeerId


class NoLinks:
    """`protocol.interfaces.transport.Transport` without links, for tests that make some of it work."""

    async def send(self, peer: PeerId, message: TensorMessage, tensor: TensorSpec, data: memoryview) -> None:
        raise Unreachable("nobody takes tensors here")

    async def send_control(self, peer: PeerId, message: ControlMessage) -> None:
        raise Unreachable("nothing is told here")

    async def ask(self, peer: PeerId, question: Question, timeout_s: float) -> bytes:
        raise Unreachable("nobody answers questions here")

    def announce(self, record: bytes) -> None:
        return

    def figures(self) -> dict[PeerId, LinkFigures]:
        return {}
