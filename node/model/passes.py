"""Parts of the model (block stacks, stage 0's embedding and head; parameters have full names), and their passes."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge

from node.model.blocks import Block, Documents, Linear, RMSNorm, Rotary, TokenRows
from node.model.initialization import initialise
from node.model.optimizer import fold
from node.model.optimizers.packed import NarrowCopy
from node.model.residual import Residual
from node.model.shapes import EMBEDDING
from protocol.manifest.manifest import Manifest, ModelSection
from swarm.vocabulary.types import ModuleId

IGNORED: Final = -100
STRIP: Final = 2**22  # Elements of the matrix gradient at a time if the product cannot accumulate into the sum


@dataclass(frozen=True, slots=True, eq=False)
class HeadSum:
    """Tensor `matrix` (float32 or wider) to which `weight` times the gradient of the head's matrix is added."""

    matrix: Tensor
    weight: float


@torch.no_grad()
def loss_and_gradient(
    hidden: Tensor, matrix: Tensor, labels: Tensor, logits_at_once: int, into: HeadSum | None = None
) -> tuple[Tensor, Tensor]:
    """Computes the summed cross entropy in nats (float32 scalar) and its gradient for `hidden`.

    The logits of each chunk are computed only once (unlike Cut Cross-Entropy, Wijmans et al. 2024, arXiv:2411.09009).

    Args:
        hidden: [positions, hidden].
        matrix: [vocabulary, hidden], same dtype as `hidden`.
        labels: [positions] int64; IGNORED positions have no loss.
        into: accumulates the gradient of `matrix`. If the pass fails, it is restored up to rounding.
    """
    gradient = torch.empty_like(hidden)
    done = 0
    workspace = _Workspace(hidden, matrix, logits_at_once, into)
    loss = hidden.new_zeros((), dtype=torch.float32)
    try:
        for piece in workspace.pieces(len(hidden)):
            found, of_logits = workspace.loss_and_gradient_of_logits(hidden[piece], labels[piece])
            torch.mm(of_logits, matrix, out=gradient[piece])
            workspace.add(of_logits, hidden[piece])
            loss.add_(found)
            done = piece.stop
    except BaseException:
        if into is not None and done:  # subtract the chunks that were added before the failure
            undo = HeadSum(into.matrix, -into.weight)
            loss_and_gradient(hidden[:done], matrix, labels[:done], logits_at_once, undo)
        raise
    return loss, gradient


@torch.no_grad()
def loss_alone(hidden: Tensor, matrix: Tensor, labels: Tensor, logits_at_once: int) -> Tensor:
    workspace = _Workspace(hidden, matrix, logits_at_once, None)
    loss = hidden.new_zeros((), dtype=torch.float32)
    for piece in workspace.pieces(len(hidden)):
        loss.add_(workspace.loss(hidden[piece], labels[piece]))
    return loss


class SummedLoss(torch.autograd.Function):
    """Summed cross-entropy as an autograd function: `apply(hidden, matrix, labels, logits_at_once)`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, matrix: Tensor, labels: Tensor, logits_at_once: int) -> Tensor:
        narrow = matrix.to(hidden.dtype)
        if not any(ctx.needs_input_grad):
            return loss_alone(hidden, narrow, labels, logits_at_once)
        total = torch.zeros_like(matrix)
        into = HeadSum(total, 1.0) if ctx.needs_input_grad[1] else None
        loss, gradient = loss_and_gradient(hidden, narrow, labels, logits_at_once, into)
        ctx.gradients = [gradient, total]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gradient, total = ctx.gradients
        ctx.gradients = None  # scaled in place below, so they can be used only once
        return gradient.mul_(factor), total.mul_(factor), None, None


class _Workspace:
    """Buffers for the chunks of one pass over the head, all allocated before the first sum changes."""

    def __init__(self, hidden: Tensor, matrix: Tensor, logits_at_once: int, into: HeadSum | None) -> None:
        vocabulary, width = matrix.shape
        self._matrix, self._into = matrix, into
        self._at_once = max(1, min(len(hidden), logits_at_once // vocabulary))
        self._logits = hidden.new_empty(self._at_once, vocabulary)
        self._floats = self._logits if hidden.dtype is torch.float32 else self._logits.float()
        self._strip = max(1, STRIP // width)
        if into is not None and into.matrix.dtype is not hidden.dtype:
            self._products = hidden.new_empty(self._strip, width)
            self._wide = torch.empty_like(self._products, dtype=into.matrix.dtype)

    def pieces(self, positions: int) -> list[slice]:
        return [slice(start, min(start + self._at_once, positions)) for start in range(0, positions, self._at_once)]

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return self._losses(hidden, labels)[0].sum()

    def loss_and_gradient_of_logits(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a chunk's summed loss and the gradient of its logits. The next call overwrites this gradient."""
        losses, odds, total, is_scored, places = self._losses(hidden, labels)
        odds.mul_(is_scored / total).scatter_add_(1, places, -is_scored)  # softmax minus one-hot
        if odds.dtype is not hidden.dtype:
            odds = self._logits[: len(hidden)].copy_(odds)
        return losses.sum(), odds

    def _losses(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Returns losses [positions, 1], exponentials of logits, their sums, 1 or 0 (IGNORED), and label indices."""
        count = len(hidden)
        logits = torch.mm(hidden, self._matrix.t(), out=self._logits[:count])
        floats = self._floats[:count]
        if floats.dtype is not logits.dtype:
            floats.copy_(logits)
        ignored = (labels == IGNORED).unsqueeze(1)
        places = labels.unsqueeze(1).masked_fill(ignored, 0)
        floats.sub_(floats.amax(1, keepdim=True))  # subtract the maximum, so that exp cannot overflow
        of_label = floats.gather(1, places)
        total = floats.exp_().sum(1, keepdim=True)
        losses = (total.log() - of_label).masked_fill(ignored, 0.0)
        return losses, floats, total, (~ignored).to(floats.dtype), places

    def add(self, of_logits: Tensor, hidden: Tensor) -> None:
        if self._into is None:
            return
        total, weight = self._into.matrix, self._into.weight
        if total.dtype is hidden.dtype:
            total.addmm_(of_logits.t(), hidden, alpha=weight)
            return
        # Mixed dtypes: multiply in the narrow one, accumulate in the wide one, a strip of the vocabulary at a time.
        for start in range(0, len(total), self._strip):
            strip = total[start : start + self._strip]
            products, wide = self._products[: len(strip)], self._wide[: len(strip)]
            torch.mm(of_logits[:, start : start + len(strip)].t(), hidden, out=products)
            strip.add_(wide.copy_(products), alpha=weight)


LOGITS_AT_ONCE: Final = 2**25  # Logits in memory at a time, in elements (128 MiB in float32)


class BlockStack(nn.Module):
    """Consecutive transformer blocks, from the model's block `first`. Maps hidden states to the same shape."""

    def __init__(self, section: ModelSection, first: int, count: int, seed: int) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"layers": _layers(section, first, count)})
        self.rotary = Rotary(section)
        self.residual = Residual(section, seed)

    def forward(self, hidden: Tensor, documents: Documents = ()) -> Tensor:
        return _through(self.model["layers"], hidden, self.rotary, documents, self.residual)

    def split_weights(self) -> None:
        """Calls `Linear.split` on every linear layer, to store its weight in two 16-bit halves."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.split()


class EmbeddingPart(nn.Module):
    """First part of stage 0, computed at the start of every path: the embedding, and stage 0's blocks if any."""

    def __init__(self, section: ModelSection, blocks: int, seed: int) -> None:
        super().__init__()
        size = section.vocabulary, section.stream
        embedding = nn.Embedding(*size, _weight=torch.empty(size))  # not initialised
        self.model = nn.ModuleDict({"embed_tokens": embedding, "layers": _layers(section, 0, blocks)})
        self.rotary = Rotary(section)
        self.residual = Residual(section, seed)

    def forward(self, tokens: Tensor, documents: Documents = ()) -> Tensor:
        """Maps int64 tokens [rows, tokens] to hidden states [rows, tokens, channels]."""
        return _through(self.model["layers"], self.embed(tokens), self.rotary, documents, self.residual)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.residual.begin(self.model["embed_tokens"](tokens), tokens)


class HeadPart(nn.Module):
    """Second part of stage 0, computed at the end of every path: final norm, LM head and loss."""

    def __init__(self, section: ModelSection, seed: int, logits_at_once: int = LOGITS_AT_ONCE) -> None:
        super().__init__()
        self.residual = Residual(section, seed)
        self.model = nn.ModuleDict({"norm": RMSNorm(section.hidden, section.norm_epsilon)})
        if section.token_rank:
            self.model["token_rows"] = TokenRows(section)
        self.lm_head = Linear(section.hidden, section.vocabulary)
        self.logits_at_once = logits_at_once

    @property
    def reader(self) -> "_HeadReader":
        return _HeadReader(self.residual, self.model)

    def logits(self, hidden: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Maps hidden states [..., channels] to float32 logits [..., vocabulary]. `tokens`: see `Residual.stream`."""
        logits: Tensor = self.lm_head(self.reader(hidden, tokens))
        return logits.float()

    def forward(self, hidden: Tensor, labels: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Returns the mean loss in nats per token of [rows, tokens, channels], with int64 labels [rows, tokens]."""
        normed = self.reader(hidden, tokens).flatten(0, -2)
        loss: Tensor = SummedLoss.apply(normed, self.lm_head.weight, labels.flatten(), self.logits_at_once)  # type: ignore[no-untyped-call]
        return loss / labels.numel()


class _HeadReader(nn.Module):
    """Maps hidden states [..., channels] to the normed input of the LM head, [..., hidden]."""

    def __init__(self, residual: Residual, model: nn.ModuleDict) -> None:
        super().__init__()
        self.residual, self.model = residual, model

    def forward(self, hidden: Tensor, tokens: Tensor | None = None) -> Tensor:
        stream = self.residual.stream(hidden, tokens)
        if "token_rows" in self.model:
            stream = self.model["token_rows"](stream, hidden.dtype)
        normed: Tensor = self.model["norm"](stream.read(hidden))
        return normed


def _layers(section: ModelSection, first: int, count: int) -> nn.ModuleDict:
    return nn.ModuleDict({str(index): Block(section) for index in range(first, first + count)})


def _through(layers: nn.Module, hidden: Tensor, rotary: Rotary, documents: Documents, residual: Residual) -> Tensor:
    angles, stream = rotary(hidden.shape[1], documents, dtype=hidden.dtype), residual.stream(hidden)
    for block in layers.children():  # a ModuleDict keeps insertion order, which is by depth
        hidden = block(hidden, angles, documents, stream=stream)
    return hidden


def build_block_stack(manifest: Manifest, module: ModuleId) -> BlockStack:
    """Builds and initialises a module of any stage but 0. Raises ValueError if the manifest has no such module."""
    if module.stage == 0 or not manifest.has(module):
        raise ValueError(f"module {module} is not a stack of blocks of this run")
    blocks = manifest.stages.blocks
    stack = BlockStack(manifest.model, sum(blocks[: module.stage]), blocks[module.stage], manifest.seed)
    _fill(manifest, stack)
    return stack


def build_embedding(manifest: Manifest) -> EmbeddingPart:
    part = EmbeddingPart(manifest.model, manifest.stages.blocks[0], manifest.seed)
    _fill(manifest, part)
    return part


def build_head(manifest: Manifest, embedding: EmbeddingPart | None = None) -> HeadPart:
    """Builds and initialises stage 0's head. With tied embeddings, it shares the matrix of `embedding`."""
    part = HeadPart(manifest.model, manifest.seed)
    if not manifest.model.tied_embeddings:
        _fill(manifest, part)
        return part
    assert embedding is not None, "tied embeddings are one matrix"
    _fill(manifest, part.model)
    part.lm_head.weight = embedding.get_parameter(EMBEDDING)
    return part.to(part.lm_head.weight.device)


@torch.no_grad()
def _fill(manifest: Manifest, part: nn.Module) -> None:
    """Initialises a part from the run's seed. If the run starts from a model, fills it with zeros, replaced later."""
    if manifest.start is None:
        gain = math.sqrt(manifest.model.hidden / manifest.model.stream)
        initialise([part], seed=manifest.seed, gain=gain)
    else:
        for parameter in part.parameters():
            parameter.zero_()


Around = Callable[[], AbstractContextManager[object]]  # Makes the context in which each thread computes a forward pass


@dataclass(frozen=True, slots=True, eq=False)
class PassState:
    """State kept between forward and backward pass: the detached input, and the output with its graph."""

    source: Tensor
    result: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """Gradients of a part's input (`source`; None for the embedding, whose input is tokens) and parameters."""

    source: Tensor | None
    parameters: tuple[Tensor, ...]


class Passes(Protocol):
    """Interface to compute forward and backward passes of one model part, on one device or several."""

    def forward(self, source: Tensor, documents: tuple[int, ...], around: Around = nullcontext) -> PassState:
        """Computes the part's output for `source` [rows, tokens(, hidden)], and keeps the graph."""

    def backward(self, visit: PassState, gradient: Tensor) -> Gradients:
        """Computes the gradients of input and parameters from the output's `gradient`, and frees the graph."""

    def evaluate(self, source: Tensor, documents: tuple[int, ...]) -> Tensor: ...

    def parameters_changed(self) -> None:
        """Marks copies of the parameters as outdated, after the parameters changed. Older graphs become invalid."""

    def storages(self) -> set[int]:
        """Returns the data pointers of parameters and constants, which are in memory independently of a graph."""

    def weights(self) -> tuple[Tensor, ...]:
        """Returns the tensors that represent the parameters in graphs. They change in place. Empty if not supported."""


class OneDevice:
    """Forward and backward passes of a model part on the one device that holds it."""

    def __init__(self, part: nn.Module) -> None:
        self._part = part

    def forward(self, source: Tensor, documents: tuple[int, ...], around: Around = nullcontext) -> PassState:
        return forward(self._part, source, documents, around=around)

    def backward(self, visit: PassState, gradient: Tensor) -> Gradients:
        return backward(self._part, visit, gradient)

    def evaluate(self, source: Tensor, documents: tuple[int, ...]) -> Tensor:
        with torch.no_grad():
            result: Tensor = self._part(source, documents)
        return result

    def parameters_changed(self) -> None:
        """Does nothing: the part has no copies of its parameters."""

    def storages(self) -> set[int]:
        return storages(self._part)

    def weights(self) -> tuple[Tensor, ...]:
        return tuple(self._part.parameters())


class HeadPasses(Protocol):
    """Interface to compute the head's loss and gradients, on one device or several."""

    def loss(self, hidden: Tensor, labels: Tensor) -> float:
        """Computes the mean loss in nats per token of `hidden` [rows, tokens, hidden], without a graph."""

    def loss_into(self, hidden: Tensor, labels: Tensor, sums: Sequence[Tensor], weight: int) -> "HeadVisit | None":
        """Computes the loss and adds `weight` times the gradients to `sums`, if any. None if they may not be finite."""

    def parameters_changed(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class HeadVisit:
    """Result of the head's forward and backward pass: the loss, and the gradient of the hidden states."""

    loss: float
    source: Tensor
    take_back: Callable[[], None]  # Subtracts the added gradients from the sums, up to rounding


class OneHead:
    """Loss and gradients of the head on the one device that holds it."""

    def __init__(self, head: HeadPart) -> None:
        self._head = head
        self._is_bounded: bool | None = None

    def loss(self, hidden: Tensor, labels: Tensor) -> float:
        with torch.no_grad():
            return float(self._head(hidden, labels).item())

    def loss_into(self, hidden: Tensor, labels: Tensor, sums: Sequence[Tensor], weight: int) -> HeadVisit | None:
        if not self._bounded():
            return None
        head, count = self._head, labels.numel()
        reader = head.reader
        visit = forward(reader, hidden)
        # One narrow copy per step is cheaper than a cast per microbatch.
        if head.lm_head.narrow is None and hidden.dtype is not head.lm_head.weight.dtype:
            head.lm_head.narrow = NarrowCopy(head.lm_head.weight, hidden.dtype)
        normed, matrix = visit.result.detach().flatten(0, -2), head.lm_head.matrix(hidden.dtype).detach()
        wanted = labels.flatten()

        def added(factor: float) -> tuple[Tensor, Tensor]:
            into = HeadSum(sums[-1], factor / count) if sums else None
            return loss_and_gradient(normed, matrix, wanted, head.logits_at_once, into)

        def take_back() -> None:
            if sums:
                added(-weight)
                fold(sums[:-1], of_reader.parameters, -weight)

        loss, gradient = added(weight)
        try:
            of_reader = backward(reader, visit, gradient.div_(count).view_as(visit.result))
            assert of_reader.source is not None
            found = HeadVisit(float(loss.item()) / count, of_reader.source, take_back)
        except BaseException:
            if sums:  # leave the sums as they were, so that a retry counts once
                added(-weight)
            raise
        fold(sums[:-1], of_reader.parameters, weight)
        return found

    def parameters_changed(self) -> None:
        self._is_bounded = None
        if self._head.lm_head.narrow is not None:
            self._head.lm_head.narrow.changed()

    def _bounded(self) -> bool:
        """Tells whether the head's weights are too small to make logits or gradients overflow (by Cauchy-Schwarz)."""
        if self._is_bounded is None:
            scale = self._head.get_parameter("model.norm.weight").detach()
            matrix = self._head.lm_head.weight.detach()
            length = torch.linalg.vector_norm(matrix) * torch.linalg.vector_norm(scale, ord=float("inf"))
            # Far below the largest float32 and bfloat16 (3e38)
            self._is_bounded = float(length.item()) * math.sqrt(matrix.shape[1]) < 1e30
        return self._is_bounded


def storages(part: nn.Module) -> set[int]:
    """Returns the data pointers of a part's parameters, to recognise them in a graph."""
    return {parameter.untyped_storage().data_ptr() for parameter in part.parameters()}


def forward(part: nn.Module, source: Tensor, *constants: object, around: Around = nullcontext) -> PassState:
    """Computes the part's output for `source` [rows, tokens(, hidden)]. `constants` get no gradient."""
    source = source.detach()
    if source.is_floating_point():
        source.requires_grad_()
    with torch.enable_grad(), around():
        return PassState(source, part(source, *constants))


def backward(part: nn.Module, visit: PassState, gradient: Tensor | None = None) -> Gradients:
    """Computes gradients of input and parameters, and frees the graph. `gradient`: of the output; None for a loss."""
    parameters = list(part.parameters())
    if not visit.source.requires_grad:
        return Gradients(None, gradients_of(visit, gradient, parameters))
    source, *rest = gradients_of(visit, gradient, [visit.source, *parameters])
    return Gradients(source, tuple(rest))


def gradients_of(
    visit: PassState, gradient: Tensor | None, wanted: Sequence[Tensor] | Sequence[GradientEdge]
) -> tuple[Tensor, ...]:
    """Computes only the wanted gradients, and frees the graph. `gradient`: of the output; None for a loss."""
    end = visit.result if gradient is None else _End.apply(visit.result, gradient)  # type: ignore[no-untyped-call]
    return torch.autograd.grad(end, wanted)


class _End(torch.autograd.Function):
    """A scalar made from `result`, whose derivative with respect to `result` is defined as `gradient`."""

    # Passing the gradient to `torch.autograd.grad` would import sympy to compare shapes: 0.6 s and 34 MB in every node.

    @staticmethod
    def forward(ctx: Any, result: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return result.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None
