"""What a node that trains does not import."""

from __future__ import annotations

import json
import subprocess
import sys

UNWANTED = ("hivemind", "sympy", "torch._dynamo", "torch._inductor")

STEP = f"""
import json, sys, torch
import node.runtime.node
from node.model.optimizers.adamw import AdamW
from node.model.passes import backward, forward
from protocol.manifest.training import InnerSection

part = torch.nn.Linear(3, 3)
gradients = backward(part, forward(part, torch.ones(2, 3)), torch.ones(2, 3))
for parameter, gradient in zip(part.parameters(), gradients.parameters):
    parameter.grad = gradient
AdamW(part.parameters(), InnerSection()).step(0.1)
print(json.dumps([name for name in {UNWANTED} if name in sys.modules]))
"""


def test_a_step_imports_neither_a_compiler_nor_symbolic_mathematics() -> None:
    ran = subprocess.run([sys.executable, "-c", STEP], check=True, capture_output=True, text=True)
    assert json.loads(ran.stdout) == []
