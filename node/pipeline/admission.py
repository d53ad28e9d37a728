"""Checks of a received tensor's header against the manifest, before memory is allocated for the tensor."""

from collections.abc import Callable
from itertools import pairwise

from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.manifest.manifest import Manifest
from swarm.compression.microbatch_codecs import Traffic, codec_levels
from swarm.routing.path_rules import FAR, PathRules
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.pipeline_messages import Backward, Forward, MicrobatchTensor, Purpose
from swarm.vocabulary.types import Codec, ModuleId, PeerId, short


def path_rules(manifest: Manifest) -> PathRules:
    """Returns the run's rules for paths: number of stages, stages visited per path, jumps, and experts per stage."""
    stages, paths = manifest.stages, manifest.paths
    jump = FAR if paths.max_jump is None else paths.max_jump + 1
    return PathRules(
        stages.count,
        stages.visited_per_path,
        max_forward_jump=jump,
        max_end_jump=jump,
        visit_ratio=stages.visit_ratio,
        experts=stages.experts_of_each if stages.has_experts else (),
        full_every=paths.full_every,
    )


RouteFault = Callable[[MicrobatchTensor], str | None]


def hidden_tensor(manifest: Manifest) -> TensorSpec:
    """Returns shape and type of hidden states; with packed documents, the largest. Gradients have no token numbers."""
    model = manifest.model
    dtype = DType.BFLOAT16 if model.dtype == "bfloat16" else DType.FLOAT32
    return TensorSpec((*manifest.hidden_shape[:-1], model.stream), dtype, token_bytes=model.token_bytes)


def allowed_codecs(manifest: Manifest) -> dict[Traffic, tuple[Codec, ...]]:
    """Returns the codecs allowed for activations and gradients, least compressed first. The sender chooses one."""
    half = hidden_tensor(manifest).dtype is DType.BFLOAT16
    limits = {Traffic.ACTIVATIONS: manifest.codecs.activations, Traffic.GRADIENTS: manifest.codecs.gradients}
    return {traffic: codec_levels(Codec[limit.upper()], half_precision=half) for traffic, limit in limits.items()}


class Admission:
    """Checks of the microbatch tensors that other peers send to a peer that hosts `module`."""

    def __init__(
        self, manifest: Manifest, own: PeerId, module: ModuleId, route_fault: RouteFault, uninvited: RouteFault
    ) -> None:
        self._own = own
        self.uninvited = uninvited  # No violation: other hops may disagree
        self._route_fault = route_fault
        self._module = module
        self._tensor = hidden_tensor(manifest)
        self._packs_documents, self._longest = manifest.packs_documents, manifest.model.sequence
        self._tells_labels = manifest.tells_labels
        self._codecs = allowed_codecs(manifest)
        self._modules = frozenset(manifest.modules()) - {ModuleId(0)}
        self._rules = path_rules(manifest)

    def check(self, sender: PeerId, message: MicrobatchTensor, tensor: TensorSpec) -> None:
        """Raises ProtocolViolation if an honest peer could not have sent this header: shape, codec, path or sender."""
        numbered = self._tensor.token_bytes if isinstance(message, Forward) else 0
        if tensor.token_bytes != numbered:
            raise ProtocolViolation(f"the header announces {tensor.token_bytes} bytes per token number, not {numbered}")
        if not self._is_of_this_run(tensor, message.path.documents):
            raise ProtocolViolation(self._of_another_run(tensor, message.path.documents))
        rows, tokens, _ = tensor.shape
        fewest, most = (1, rows * tokens) if self._tells_labels and not _only_evaluates(message) else (0, 0)
        if not fewest <= message.path.labels <= most:
            raise ProtocolViolation(f"the header announces {message.path.labels} labels; valid are {fewest} to {most}")
        codecs = self._codecs[Traffic.ACTIVATIONS if isinstance(message, Forward) else Traffic.GRADIENTS]
        if tensor.codec not in codecs or tensor.byte_length > tensor.raw_bytes:
            raise ProtocolViolation(
                f"the header announces {tensor.byte_length} bytes as {tensor.codec.name}; this run allows"
                f" {', '.join(codec.name for codec in codecs)}"
            )
        path = message.path
        if path.data_node != message.microbatch.data_node:
            raise ProtocolViolation("the path belongs to another data node than the microbatch")
        stages = [hop.module.stage for hop in path.hops]
        unknown = [str(hop.module) for hop in path.hops if hop.module not in self._modules]
        if unknown:
            raise ProtocolViolation(f"the path visits module {unknown[0]}, which is not in the manifest")
        evaluated = _only_evaluates(message)
        self._check_order(stages, evaluated=evaluated)
        if path.route is not None:  # after a repair the path may differ from the signed route, so check both
            self._check_order([module.stage for module in path.route.modules], evaluated=evaluated)
        if not -1 <= message.position <= len(path.hops):
            raise ProtocolViolation(f"position {message.position} is not on a path of {len(path.hops)} hops")
        if path.peer_at(message.position) != self._own:
            raise ProtocolViolation("the message is for another peer on the path")
        self._check_sender(sender, message)
        fault = self._route_fault(message)
        if fault is not None:
            raise ProtocolViolation(f"{message.microbatch}: {fault}")

    def _is_of_this_run(self, tensor: TensorSpec, documents: tuple[int, ...]) -> bool:
        """Tells whether type and shape of a tensor fit the run and the lengths of the packed documents."""
        if tensor.dtype is not self._tensor.dtype:
            return False
        if not self._packs_documents:
            return not documents and tensor.shape == self._tensor.shape
        _, most, hidden = self._tensor.shape
        tokens = sum(documents)
        fits = 0 < tokens <= most and min(documents) >= 1 and max(documents) <= self._longest
        return fits and tensor.shape == (1, tokens, hidden)

    def _of_another_run(self, tensor: TensorSpec, documents: tuple[int, ...]) -> str:
        announced = f"the header announces a tensor {tensor.shape} {tensor.dtype.name}"
        own = f"{self._tensor.shape} {self._tensor.dtype.name}"
        if self._packs_documents:
            most = f"this run has at most {own}, with the tokens of the documents"
            return f"{announced} with {len(documents)} documents; {most}"
        of = f" with {len(documents)} documents" if documents else ""
        return f"{announced}{of}; this run has {own} without documents"

    def _check_order(self, stages: list[int], *, evaluated: bool) -> None:
        """Raises ProtocolViolation unless a path may visit these stages; evaluations: any in ascending order."""
        if evaluated:
            in_order = all(one < other for one, other in pairwise(stages))
            fault = None if in_order else f"not different stages in ascending order: {stages}"
        else:
            fault = self._rules.fault_as_taken(stages)
        if fault is not None:
            raise ProtocolViolation(f"this run does not allow the path: {fault}")

    def hosts(self, message: MicrobatchTensor) -> bool:
        """Tells whether the message is for our module. If this peer moved, an honest sender may not know yet."""
        hops, position = message.path.hops, message.position
        return not 0 <= position < len(hops) or hops[position].module == self._module

    def _check_sender(self, sender: PeerId, message: MicrobatchTensor) -> None:
        """Checks that the sender is our neighbour on the path, upstream for Forward and downstream for Backward."""
        match message:
            case Forward(position=position) if position < 0:
                raise ProtocolViolation("a Forward cannot go to the start of its path")
            case Backward(position=position) if position >= len(message.path.hops):
                raise ProtocolViolation("a Backward cannot go to the end of its path")
            case Forward(position=position):
                neighbour = message.path.peer_at(position - 1)
            case Backward(position=position):
                neighbour = message.path.peer_at(position + 1)
        if neighbour != sender:
            raise ProtocolViolation(f"{short(sender)} sent a tensor that only {short(neighbour)} may send on this path")


def _only_evaluates(message: MicrobatchTensor) -> bool:
    return isinstance(message, Forward) and message.purpose is Purpose.EVALUATE
