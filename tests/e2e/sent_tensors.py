"""A node that lists the tensors that it sends to other processes: `python -m tests.e2e.sent_tensors FILE join ...`."""

import sys
from pathlib import Path

from node.__main__ import main
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.transport.link import Link
from swarm.vocabulary.pipeline_messages import Backward, Forward, TensorMessage

if __name__ == "__main__":
    send, lines = Link.send, Path(sys.argv.pop(1)).open("a", buffering=1)  # noqa: SIM115 - until the node ends

    async def listed(self: Link, message: TensorMessage, tensor: TensorSpec, data: memoryview) -> None:
        if isinstance(message, Forward | Backward):
            lines.write(f"{message.microbatch} {self.peer}\n")
        await send(self, message, tensor, data)

    Link.send = listed  # type: ignore[method-assign]
    main()
