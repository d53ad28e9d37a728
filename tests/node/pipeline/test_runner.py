"""Microbatches between real workers: right gradients, and nothing left behind whatever happens to them on the way."""

from dataclasses import replace

import pytest
import torch

from node.pipeline import runner as runner_module
from node.pipeline.runner import MAX_LINKS, Job, LinkCodecs, Output
from node.pipeline.worker import HopWorker, host_hop, host_stage_zero
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.interfaces.transport import Refusal
from swarm.compression.microbatch_codecs import MOST_ERROR, Traffic
from swarm.pipeline.custody import ASK_S, RETRY_S, Phase, Work
from swarm.vocabulary.errors import OutOfMemory, ProtocolViolation, Unreachable
from swarm.vocabulary.pipeline_messages import Backward, Close, Direction, Forward, MicrobatchTensor, Purpose, Stranded
from swarm.vocabulary.types import Codec, Hop, MicrobatchId, ModuleId, Path, PeerId, SignedRoute
from tests.node.network.small_swarm import (
    A2,
    CPU,
    DATA,
    LIFETIME_S,
    LONG_S,
    A,
    B,
    HardestCodec,
    SmallSwarm,
    path_by,
    small_swarm,
    text_of,
    until,
)
from tests.node.small_manifest import small_manifest

AB = path_by(A, B)


def hop(swarm: SmallSwarm, peer: PeerId) -> HopWorker:
    worker = swarm[peer].worker.inner
    assert isinstance(worker, HopWorker)
    return worker


def mean_gradients(worker: HopWorker) -> list[torch.Tensor]:
    worker.deferred.finish()
    worker.unapplied.hand_over_mean()
    return [parameter.grad for parameter in worker.part.parameters() if parameter.grad is not None]


def of_one_process(swarm: SmallSwarm, number: int) -> tuple[float, list[torch.nn.Module]]:
    """The loss of a text, and the modules of stages 1 and 2 with its gradients."""
    manifest, text = swarm.manifest, text_of(swarm.manifest, number)
    zero = host_stage_zero(manifest, CPU).stage
    parts: list[torch.nn.Module] = [host_hop(manifest, ModuleId(stage), CPU, 0).part for stage in (1, 2)]
    hidden = zero.embedding(text.tokens)
    for part in parts:
        hidden = part(hidden)
    loss = zero.head(hidden, text.labels)
    loss.backward()
    return loss.item(), parts


async def test_a_microbatch_goes_out_and_back_with_the_gradients_of_one_process() -> None:
    async with small_swarm(A, B) as swarm:
        microbatch = swarm.launch(5, AB)
        await until(lambda: swarm.ends.done == [microbatch])
        await swarm.all_clear()
        loss, parts = of_one_process(swarm, 5)
        assert swarm.ends.losses[microbatch] == pytest.approx(loss, abs=1e-6)
        for peer, part in zip((A, B), parts, strict=True):
            for ours, theirs in zip(mean_gradients(hop(swarm, peer)), part.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs.grad, rtol=1e-5, atol=1e-7)
        assert [hop(swarm, peer).accumulated for peer in (A, B)] == [1, 1]
        reports = {(sender, receipt.direction, receipt.position) for sender, receipt in swarm.ends.reports}
        assert {(A, Direction.FORWARD, 0), (B, Direction.FORWARD, 1), (B, Direction.BACKWARD, 1)} <= reports


async def test_an_inner_step_that_is_due_is_owed_until_it_is_taken() -> None:
    async with small_swarm(A, B) as swarm:
        data = swarm[DATA]
        gate = swarm.close(DATA, "step")
        for number in range(swarm.manifest.microbatches_per_step):
            swarm.launch(number, AB)
        await until(lambda: gate.reached and len(swarm.ends.done) == swarm.manifest.microbatches_per_step)
        await data.runner.nothing_owed(0.01)
        assert not data.visits.steps
        assert not data.runner.is_empty
        swarm.open(gate)
        await data.runner.nothing_owed(LONG_S)
        assert [figures.step for figures in data.visits.steps] == [1]


async def test_what_is_only_evaluated_leaves_nothing_behind() -> None:
    async with small_swarm(A, B) as swarm:
        microbatch = swarm.launch(5, AB, Purpose.EVALUATE)
        await until(lambda: microbatch in swarm.ends.losses)
        await swarm.all_clear()
        assert swarm.ends.done == []
        assert hop(swarm, A).accumulated == 0
        assert not any(total.any() for total in hop(swarm, A).unapplied.sums)


@pytest.mark.parametrize(
    ("phase", "position", "peer", "gate_at"),
    [
        (Phase.RECEIVING, 0, A, (DATA, "halfway", Forward)),
        (Phase.FORWARD, 0, A, (A, Work.FORWARD, None)),
        (Phase.HANDING_ON, 0, A, (A, "halfway", Forward)),
        (Phase.GUARDING, 0, A, (B, Work.FORWARD, None)),
        (Phase.AWAITING, 0, A, (DATA, Work.LOSS, None)),
        (Phase.BACKWARD, 0, A, (A, Work.BACKWARD, None)),
        (Phase.HANDING_BACK, 0, A, (A, "halfway", Backward)),
        (Phase.GUARDING_BACK, 1, B, (A, Work.BACKWARD, None)),
        (Phase.FORWARD, -1, DATA, (DATA, Work.FORWARD, None)),
        (Phase.FORWARD, 2, DATA, (DATA, Work.LOSS, None)),
        (Phase.BACKWARD, -1, DATA, (DATA, Work.BACKWARD, None)),
    ],
)
async def test_nothing_is_left_when_it_is_abandoned_in(
    phase: Phase, position: int, peer: PeerId, gate_at: tuple[PeerId, str | Work, type[MicrobatchTensor] | None]
) -> None:
    async with small_swarm(A, B) as swarm:
        gate = swarm.close(*gate_at)
        microbatch = swarm.launch(1, AB)
        await until(lambda: gate.reached and swarm[peer].phase(microbatch, position) is phase)
        swarm.ends.lost(microbatch, "the test gives it up")
        await until(lambda: all(member.runner.is_empty for member in swarm.members.values()))
        swarm.open(gate)
        await swarm.all_clear()
        had_added = peer is not DATA and phase in (Phase.BACKWARD, Phase.HANDING_BACK, Phase.GUARDING_BACK)
        assert swarm[peer].visits.taken_back == [microbatch] * had_added
        assert peer is DATA or hop(swarm, peer).accumulated == 0
        after = swarm.launch(2, AB)
        await until(lambda: swarm.ends.done == [after])
        await swarm.all_clear()


@pytest.mark.parametrize(("sender", "kind"), [(DATA, Forward), (A, Forward), (DATA, Backward), (B, Backward)])
async def test_a_transfer_that_breaks_is_made_again(sender: PeerId, kind: type[MicrobatchTensor]) -> None:
    async with small_swarm(A, B) as swarm:
        gate = swarm.close(sender, "halfway", kind, Unreachable("the link broke"))
        microbatch = swarm.launch(1, AB)
        await until(lambda: gate.reached)
        swarm.open(gate)
        await until(lambda: swarm.wait(RETRY_S) or swarm.ends.done == [microbatch])
        await swarm.all_clear()
        assert [hop(swarm, peer).accumulated for peer in (A, B)] == [1, 1]


async def test_hidden_states_that_are_not_finite_strand_the_microbatch_and_add_nothing() -> None:
    async with small_swarm(A, B) as swarm:
        with torch.no_grad():
            next(hop(swarm, A).part.parameters()).fill_(torch.nan)
        microbatch = swarm.launch(1, AB)
        await until(lambda: swarm.ends.given_up)
        assert swarm.ends.given_up == {microbatch: "the tensor has elements that are not finite"}
        await swarm.all_clear()
        assert [hop(swarm, peer).accumulated for peer in (A, B)] == [0, 0]


@pytest.mark.parametrize("relieved", [False, True])
async def test_want_of_memory_costs_microbatches_or_the_module(monkeypatch: pytest.MonkeyPatch, relieved: bool) -> None:
    """Its runner ends with the error, on which the node takes a smaller module; one success in between starts anew."""
    monkeypatch.setattr(runner_module, "MOST_SHORT_OF_MEMORY", 3)

    def too_little(job: Job) -> Output:
        raise OutOfMemory("the compute device is out of memory")

    async def launches(swarm: SmallSwarm, number: int) -> None:
        given_up = len(swarm.ends.given_up)
        swarm.launch(number, AB)
        await until(lambda: len(swarm.ends.given_up) > given_up)

    async def lasting() -> None:
        async with small_swarm(A, B) as swarm:
            compute = hop(swarm, A).compute
            monkeypatch.setattr(hop(swarm, A), "compute", too_little)
            for number in (1, 2):
                await launches(swarm, number)
            if relieved:
                monkeypatch.setattr(hop(swarm, A), "compute", compute)
                swarm.launch(3, AB)
                await until(lambda: swarm.ends.done)
                monkeypatch.setattr(hop(swarm, A), "compute", too_little)
            await launches(swarm, 4)
            assert hop(swarm, A).accumulated == 1, "relieved"

    if relieved:
        await lasting()
    else:
        with pytest.raises(OutOfMemory, match="the compute device is out of memory"):
            await lasting()


@pytest.mark.parametrize(("lack", "why"), [("of buffers", "buffers"), ("of memory for one", "no memory")])
async def test_without_a_buffer_a_tensor_is_refused(monkeypatch: pytest.MonkeyPatch, lack: str, why: str) -> None:
    def nothing_left(size_bytes: int) -> bytearray:
        raise MemoryError

    async with small_swarm(A, B) as swarm:
        pool = swarm[A].runner._pool
        taken = [pool.take() for _ in range(pool.limit if lack == "of buffers" else 0)]
        if not taken:
            monkeypatch.setattr("protocol.codecs.memory.bytearray", nothing_left, raising=False)
        microbatch = swarm.launch(1, AB)
        await until(lambda: swarm.refused)
        peer, refusal = swarm.refused[0]
        assert (peer, refusal.busy) == (A, True)
        assert why in refusal.detail
        assert pool.in_use == len(taken)
        monkeypatch.undo()
        for buffer in taken:
            pool.give_back(buffer)
        swarm.wait(refusal.retry_after_s)
        await until(lambda: swarm.ends.done == [microbatch])
        await swarm.all_clear()


async def test_without_a_slot_a_tensor_is_refused_as_busy_and_no_buffer_is_taken() -> None:
    async with small_swarm(A, B) as swarm:
        runner, tensor = swarm[A].runner, hop(swarm, A).tensor
        forwards = [Forward(MicrobatchId(DATA, n), AB, 0, Purpose.TRAIN, LIFETIME_S) for n in range(5)]
        admitted = [runner.admit(DATA, message, tensor) for message in forwards]
        refused = [answer for answer in admitted if isinstance(answer, Refusal)]
        assert refused
        assert all(refusal.busy and refusal.retry_after_s > 0 for refusal in refused)
        assert runner._pool.in_use == runner.custody.used_slots == 5 - len(refused)
        for message, answer in zip(forwards, admitted, strict=True):
            if isinstance(answer, memoryview):
                runner.broken_off(DATA, message, answer)
        await swarm.all_clear()


async def test_what_is_closed_before_its_computation_begins_is_given_back_once() -> None:
    async with small_swarm(A, B) as swarm:
        runner, worker = swarm[A].runner, hop(swarm, A)
        forward = Forward(MicrobatchId(DATA, 1), AB, 0, Purpose.TRAIN, LIFETIME_S)
        buffer = runner.admit(DATA, forward, worker.tensor)
        assert isinstance(buffer, memoryview)
        runner.received(DATA, forward, worker.tensor, buffer)
        runner.receive(DATA, Close(forward.microbatch, "over"))  # in the same turn of the loop: no task has run yet
        microbatch = swarm.launch(2, AB)
        await until(lambda: swarm.ends.done == [microbatch])
        await swarm.all_clear()
        assert runner._pool.in_use == 0
        assert len({id(free) for free in runner._pool._free}) == len(runner._pool._free)
        assert worker._kept == {}


async def test_a_gradient_that_nobody_asked_for_is_given_back_when_its_input_cannot_be_had() -> None:
    async with small_swarm(A, B) as swarm:
        runner, orphan = swarm[A].runner, Backward(MicrobatchId(DATA, 1), AB, 0)
        buffer = runner.admit(B, orphan, hop(swarm, A).tensor)
        assert isinstance(buffer, memoryview)
        assert runner.custody.used_slots == 1
        runner.received(B, orphan, hop(swarm, A).tensor, buffer)
        await swarm.all_clear()
        assert hop(swarm, A).accumulated == 0


async def test_another_replica_stands_in_for_one_that_dies_on_the_way_back() -> None:
    async with small_swarm(A, A2, B) as swarm:
        gate = swarm.close(B, "before", Backward, Unreachable("the link broke"))
        microbatch = swarm.launch(5, AB)
        await until(lambda: gate.reached)
        swarm.dead.add(A)
        swarm.open(gate)
        await until(lambda: swarm.wait(RETRY_S) or swarm.ends.done == [microbatch])
        await until(lambda: swarm[A2].visits.counted == [microbatch])
        assert swarm.ends.paths[microbatch] == path_by(A2, B)
        assert [hop(swarm, peer).accumulated for peer in (A, A2, B)] == [0, 1, 1]
        assert (swarm[A].visits.counted, swarm[B].visits.counted) == ([], [microbatch])
        await until(lambda: swarm[A2].is_clear and swarm[B].is_clear and swarm[DATA].is_clear)
        gradients = mean_gradients(hop(swarm, A2))
    async with small_swarm(A, B) as swarm:
        microbatch = swarm.launch(5, AB)
        await until(lambda: swarm.ends.done == [microbatch])
        torch.testing.assert_close(gradients, mean_gradients(hop(swarm, A)))


async def test_one_that_comes_back_too_late_takes_its_gradient_back() -> None:
    async with small_swarm(A, A2, B) as swarm:
        gate = swarm.close(A, "before", Backward)
        microbatch = swarm.launch(5, AB)
        await until(lambda: gate.reached and swarm[B].phase(microbatch, 1) is Phase.GUARDING_BACK)
        swarm.dead.add(A)

        def over() -> bool:
            swarm.wait(RETRY_S)
            swarm[B].runner.link_down(A, Unreachable("silent"))
            return swarm.ends.done == [microbatch]

        await until(over)
        assert hop(swarm, A).accumulated == 1
        swarm.dead.clear()
        swarm.open(gate)
        await until(lambda: swarm.wait(ASK_S) or swarm[A].visits.taken_back == [microbatch])
        await swarm.all_clear()
        assert [hop(swarm, peer).accumulated for peer in (A, A2, B)] == [0, 1, 1]
        assert not any(total.abs().max() > 1e-12 for total in hop(swarm, A).unapplied.sums)
        assert [swarm[peer].visits.counted for peer in (A, A2, B)] == [[], [microbatch], [microbatch]]


async def test_hidden_states_for_a_microbatch_that_is_over_or_for_another_stage_are_refused() -> None:
    async with small_swarm(A, B) as swarm:
        late = Forward(MicrobatchId(DATA, 1), AB, 2, Purpose.TRAIN, LIFETIME_S)
        answer = swarm[DATA].runner.admit(B, late, hop(swarm, A).tensor)
        assert answer == Refusal(False, "this microbatch is not in flight")
        elsewhere = Path(DATA, (Hop(ModuleId(1), B), Hop(ModuleId(2), A)))
        other_stage = Forward(MicrobatchId(DATA, 1), elsewhere, 0, Purpose.TRAIN, LIFETIME_S)
        answer = swarm[B].runner.admit(DATA, other_stage, hop(swarm, B).tensor)
        assert answer == Refusal(False, "this module is not hosted here")


async def test_only_who_was_given_a_microbatch_may_strand_it() -> None:
    async with small_swarm(A, A2, B) as swarm:
        gate, signature = swarm.close(B, Work.FORWARD), b"s" * 64
        route = SignedRoute(tuple(hop.module for hop in AB.hops), LIFETIME_S, signature)
        microbatch = swarm.launch(1, replace(AB, route=route))
        await until(lambda: gate.reached)
        for proof in (b"", b"x" * 64):
            swarm[DATA].runner.receive(A2, Stranded(microbatch, Direction.FORWARD, 1, "a lie", proof))
        assert swarm.ends.given_up == {}
        swarm[DATA].runner.receive(B, Stranded(microbatch, Direction.FORWARD, 1, "it cannot be computed", signature))
        assert swarm.ends.given_up == {microbatch: "it cannot be computed"}
        swarm.open(gate)
        await swarm.all_clear()


async def test_a_step_that_is_asked_for_twice_is_taken_once() -> None:
    async with small_swarm(A, B) as swarm:
        worker = swarm[A].worker
        compute, asked = worker.compute, []

        def always_due(job: Job) -> Output:
            output = compute(job)
            if job.work is Work.BACKWARD:
                asked.append(job.key)
                return replace(output, step_due=True)
            return output

        worker.compute = always_due  # type: ignore[method-assign]
        started = [swarm.launch(number, AB) for number in (1, 2)]
        await until(lambda: sorted(swarm.ends.done) == started)
        await swarm.all_clear()
        assert len(asked) == 2
        assert [figures.visits for figures in swarm[A].visits.steps] == [(2,)]


async def test_a_peer_that_leaves_takes_nothing_new_but_finishes_what_it_holds() -> None:
    async with small_swarm(A, B) as swarm:
        runner, tensor = swarm[A].runner, hop(swarm, A).tensor
        held, new = (Forward(MicrobatchId(DATA, n), AB, 0, Purpose.TRAIN, LIFETIME_S) for n in range(2))
        assert isinstance(runner.admit(DATA, held, tensor), memoryview)
        runner.take_new_work(False)
        assert runner.admit(DATA, new, tensor) == Refusal(False, "this peer is leaving the module")
        again = runner.admit(DATA, held, tensor)
        assert isinstance(again, memoryview), "its sender tries again over a new link"
        runner.broken_off(DATA, held, again)
        orphan = Backward(MicrobatchId(DATA, 1), AB, 0)
        assert runner.admit(B, orphan, tensor) == Refusal(False, "this peer is leaving the module"), "no substitute"


@pytest.mark.parametrize(("limit", "tolerance"), [("bf16", 2e-2), ("int8", 4e-2), ("int4", 0.5)])
async def test_encoded_both_ways_the_gradients_are_nearly_those_of_one_process(limit: str, tolerance: float) -> None:
    async with small_swarm(A, B, codecs={"activations": limit, "gradients": limit}) as swarm:
        microbatch = swarm.launch(5, AB)
        await until(lambda: swarm.ends.done == [microbatch])
        await swarm.all_clear()
        loss, parts = of_one_process(swarm, 5)
        assert swarm.ends.losses[microbatch] == pytest.approx(loss, rel=tolerance)
        for peer, part in zip((A, B), parts, strict=True):
            ours = torch.cat([gradient.flatten() for gradient in mean_gradients(hop(swarm, peer))])
            theirs = torch.cat([p.grad.flatten() for p in part.parameters() if p.grad is not None])
            assert torch.linalg.vector_norm(ours - theirs) < tolerance * torch.linalg.vector_norm(theirs)
        used = swarm[A].runner.codecs
        assert isinstance(used, HardestCodec)
        size = hop(swarm, A).tensor.raw_bytes
        sent = [octets for peer, octets in swarm.sent if peer == A]
        assert len(sent) == 2
        assert all(octets < 0.52 * size for octets in sent)
        assert [(kind, codec) for kind, codec, _ in used.errors] == [(Traffic.ACTIVATIONS, Codec[limit.upper()])]
        assert used.errors[0][2] <= MOST_ERROR[Codec[limit.upper()]]


async def test_what_a_codec_cannot_express_goes_as_a_wider_one_and_is_refused_as_ever() -> None:
    async with small_swarm(A, B, codecs={"activations": "int8", "gradients": "int8"}) as swarm:
        with torch.no_grad():
            next(swarm[DATA].worker.inner.stage.embedding.parameters()).fill_(torch.inf)  # type: ignore[union-attr]
        microbatch = swarm.launch(5, AB)
        await until(lambda: microbatch in swarm.ends.given_up)
        await swarm.all_clear()
        assert "not finite" in swarm.ends.given_up[microbatch]


async def test_a_codec_that_the_run_does_not_allow_is_a_violation() -> None:
    async with small_swarm(A, B, codecs={"activations": "int8", "gradients": "none"}) as swarm:
        runner, tensor = swarm[A].runner, hop(swarm, A).tensor
        out = Forward(MicrobatchId(DATA, 1), AB, 0, Purpose.TRAIN, LIFETIME_S)
        back = Backward(MicrobatchId(DATA, 1), AB, 0)
        for sender, message, codec in ((DATA, out, Codec.INT4), (B, back, Codec.INT8), (B, back, Codec.BF16)):
            with pytest.raises(ProtocolViolation, match="this run allows"):
                runner.admit(sender, message, replace(tensor, codec=codec, outliers=0))
        buffer = runner.admit(DATA, out, replace(tensor, codec=Codec.INT8, outliers=1))
        assert buffer.nbytes == replace(tensor, codec=Codec.INT8, outliers=1).byte_length
        runner.broken_off(DATA, out, buffer)
        await swarm.all_clear()


LINK_TENSOR = TensorSpec((4, 512, 512), DType.FLOAT32)
VISIT_S = 0.4


class Links:
    def __init__(self, activations: str = "int4", gradients: str = "int8") -> None:
        self.carried: dict[PeerId, float] = {}
        manifest = small_manifest(codecs={"activations": activations, "gradients": gradients})
        self.codecs = LinkCodecs(manifest, LINK_TENSOR, lambda peer: VISIT_S, lambda peer: self.carried.get(peer, 0.0))

    def carry(self, to: PeerId, mbit_per_s: float) -> None:
        self.carried[to] = mbit_per_s / 8 * 1e6

    def chosen(self, to: PeerId) -> tuple[Codec, Codec]:
        return self.codecs.choose(to, Traffic.ACTIVATIONS), self.codecs.choose(to, Traffic.GRADIENTS)


def test_each_link_and_each_kind_of_traffic_gets_its_own() -> None:
    links = Links()
    assert links.chosen(A) == (Codec.NONE, Codec.NONE)
    links.carry(A, 1000)
    links.carry(B, 20)
    assert links.chosen(A) == (Codec.NONE, Codec.NONE)
    assert links.chosen(B) == (Codec.INT4, Codec.INT8)
    links.carry(B, 1000)
    assert links.chosen(B) == (Codec.NONE, Codec.NONE)


def test_a_codec_that_is_too_coarse_for_the_data_is_not_used_for_that_kind_again() -> None:
    links = Links("int4", "int4")
    links.carry(A, 1)
    links.codecs.measured(Traffic.GRADIENTS, Codec.INT4, 0.1)
    assert links.chosen(A) == (Codec.INT4, Codec.INT4)
    links.codecs.measured(Traffic.GRADIENTS, Codec.INT4, 0.5)
    assert links.chosen(A) == (Codec.INT4, Codec.INT8)
    assert links.codecs.describe().too_coarse == ("gradients: int4",)


def test_the_choice_and_its_reason_are_told() -> None:
    links = Links()
    links.carry(A, 20)
    links.chosen(A)
    described = links.codecs.describe()
    assert described.allowed == {"activations": ("none", "bf16", "int8", "int4"), "gradients": ("none", "bf16", "int8")}
    choice = described.links["a"].activations
    assert choice.codec == "int4"
    assert "20 Mbit/s" in choice.why


def test_lost_links_are_forgotten_and_only_so_many_remembered() -> None:
    links = Links()
    links.chosen(A)
    links.codecs.lost(A)
    assert links.codecs.describe().links == {}
    for number in range(MAX_LINKS + 10):
        links.codecs.choose(PeerId(str(number)), Traffic.ACTIVATIONS)
    assert len(links.codecs._chosen) == MAX_LINKS
