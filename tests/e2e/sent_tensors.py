"""A node that lists the tensors of microbatches that it sends to other processes:
`python -m tests.e2e.sent_tensors FILE join ...`, the rest as `skipstone` has it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from node.__main__ import main
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.transport.link import Link
from swarm.vocabulary.pipeline_messages import Backward, Forward, TensorMessage


def list_sent(file: Path) -> None:
    """Appends a line `MICROBATCH RECEIVER` for each tensor before it is sent over a stream."""
    send, lines = Link.send, file.open("a", buffering=1)

    async def listed(self: Link, message: TensorMessage, tensor: TensorSpec, data: memoryview) -> None:
        if isinstance(message, Forward | Backward):
            lines.write(f"{message.microbatch} {self.peer}\n")
        await send(self, message, tensor, data)

    Link.send = listed  # type: ignore[method-assign]


if __name__ == "__main__":
    list_sent(Path(sys.argv.pop(1)))
    main()
