"""The two main ways through the code, step by step: one microbatch, and one round. Failures, links and handshakes are
left out. `docs/generate_architecture.py` writes them into docs/ARCHITECTURE.md with how often a reader changes the file
and comes back to one; tests/test_docs.py finds a step that the code no longer has.

A step is a function in a file; further functions of the same file follow after a comma.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeAlias

Way: TypeAlias = dict[str, str]
"""By stage: its steps, one file after the other."""

MICROBATCH: Final[Way] = {
    "text": """
        node/data/prefetch.py: _pack
        node/data/feed.py: next
        node/data/packing.py: next
        node/data/documents.py: endless
        node/data/tokenizers.py: encode
        node/data/sources.py: read
    """,
    "plan": """
        node/routing/launcher.py: run
        swarm/pipeline/in_flight.py: may_start
        node/routing/launcher.py: _launch
        swarm/routing/planner.py: in_flight_by_peer, plan, _home_soonest
        swarm/membership/membership.py: replicas
        swarm/routing/measured_times.py: wait_s
        swarm/routing/route_search.py: cheapest_in_order
        swarm/routing/planner.py: _joined
    """,
    "launch": """
        node/routing/launcher.py: _launch
        node/data/prefetch.py: ready
        swarm/pipeline/in_flight.py: start
        node/data/reading_position.py: sent
        swarm/routing/latency_attribution.py: launched
        node/routing/evaluation.py: depart
        protocol/identity/route_signatures.py: signed
        node/concurrency/machine_runner.py: handle
    """,
    "embed": """
        swarm/pipeline/custody.py: handle
        swarm/pipeline/arrival.py: start
        swarm/pipeline/ledger.py: put
        node/pipeline/microbatch_runner.py: _carry_out
        node/pipeline/tensor_store.py: take_input
        node/pipeline/microbatch_runner.py: _begin_with, _computation, _codec_for
        node/pipeline/codec_selection.py: choose
        swarm/compression/microbatch_codecs.py: choose
        node/pipeline/worker_thread.py: compute
        node/concurrency/compute_thread.py: run
        node/pipeline/data_worker.py: compute, _embed
        node/model/passes.py: forward
        node/model/parts.py: EmbeddingPart
        node/pipeline/tensor_io.py: output
        protocol/codecs/__init__.py: encode
    """,
    "hand on": """
        node/pipeline/microbatch_runner.py: _computed
        swarm/pipeline/custody.py: handle, _computed
        swarm/pipeline/arrival.py: computed
        swarm/pipeline/handover.py: hand
        swarm/pipeline/ledger.py: offered
        node/pipeline/microbatch_runner.py: _sending
        protocol/transport/grpc_transport.py: send
        protocol/transport/link.py: send
        protocol/transport/outbox.py: send
        protocol/transport/send_queue.py: share, add
        protocol/frames/tensor_transfer.py: next_frame
        protocol/frames/frames.py: encode
        protocol/frames/pipeline.py: _write_forward
        protocol/frames/fields.py: wire_header
        protocol/frames/chunks.py: encode_chunk
        protocol/transport/grpc_streams.py: write
    """,
    "admit, at a hop": """
        protocol/transport/link.py: _read
        protocol/frames/frames.py: decode
        protocol/frames/pipeline.py: _read_forward
        protocol/frames/fields.py: read_header
        protocol/interfaces/tensor_spec.py: fault
        protocol/transport/link.py: _dispatch
        protocol/transport/inbox.py: open
        node/network/dispatcher.py: admit
        node/pipeline/microbatch_runner.py: admit
        node/pipeline/admission.py: check
        swarm/routing/path_rules.py: fault_as_taken
        protocol/identity/route_signatures.py: fault
        node/pipeline/microbatch_runner.py: _refusal
        swarm/pipeline/custody.py: admit_forward
        swarm/pipeline/ledger.py: place_for, reserve
        protocol/transport/buffer_pool.py: take
    """,
    "receive": """
        protocol/frames/chunks.py: decode_chunk
        protocol/transport/inbox.py: add
        protocol/frames/tensor_transfer.py: add
        protocol/transport/rate_limits.py: exchanged
        node/network/dispatcher.py: received
        node/pipeline/microbatch_runner.py: received
        node/pipeline/tensor_store.py: arrived
        swarm/pipeline/custody.py: _tensor_arrived
        swarm/pipeline/arrival.py: forward, _take
        node/pipeline/microbatch_runner.py: _carry_out
        node/concurrency/machine_runner.py: send
    """,
    "compute": """
        node/pipeline/microbatch_runner.py: _computation
        node/pipeline/worker_thread.py: compute
        node/pipeline/stage_worker.py: compute, _forward
        node/pipeline/tensor_io.py: received
        protocol/codecs/__init__.py: decode
        node/pipeline/graph_budget.py: forward
        node/model/passes.py: forward
        node/model/parts.py: BlockStack
        node/model/blocks.py: Block
        node/pipeline/tensor_io.py: output
        node/pipeline/microbatch_runner.py: _computed
        swarm/pipeline/custody.py: _computed
        swarm/pipeline/handover.py: hand
        node/pipeline/microbatch_runner.py: _sending
    """,
    "receipts": """
        node/network/dispatcher.py: told
        node/pipeline/microbatch_runner.py: receive
        swarm/pipeline/custody.py: _arrived, _receipt
        swarm/pipeline/handover.py: receipt, _accepted
        swarm/pipeline/ledger.py: passed_on
    """,
    "receipts, at the data node": """
        node/pipeline/microbatch_runner.py: receive
        node/routing/launcher.py: may_have_held
        swarm/routing/planner.py: hosts_one_of
        swarm/pipeline/custody.py: touch
        node/routing/launcher.py: passed
        swarm/routing/latency_attribution.py: passed
        swarm/routing/measured_times.py: computed
    """,
    "loss": """
        node/pipeline/microbatch_runner.py: admit
        node/routing/launcher.py: expects
        swarm/pipeline/custody.py: _tensor_arrived
        swarm/pipeline/arrival.py: _take
        node/pipeline/data_worker.py: _loss
        node/model/passes.py: loss_into
        node/model/head_loss.py: loss_and_gradient
        node/model/optimizer.py: promise
        node/pipeline/microbatch_runner.py: _computed
        node/routing/launcher.py: loss_known
        swarm/pipeline/in_flight.py: returned
        swarm/routing/loss_outliers.py: returned
        swarm/pipeline/custody.py: _computed
        swarm/pipeline/handover.py: hand
    """,
    "way back, at a hop": """
        node/pipeline/microbatch_runner.py: admit
        swarm/pipeline/custody.py: admit_backward
        swarm/pipeline/arrival.py: expects
        node/pipeline/microbatch_runner.py: received
        swarm/pipeline/custody.py: _tensor_arrived
        swarm/pipeline/arrival.py: backward
        node/pipeline/stage_worker.py: _backward, _half_backward
        node/pipeline/deferred_weights.py: first_half
        node/model/passes.py: gradients_of
        node/pipeline/tensor_io.py: output
        node/pipeline/deferred_weights.py: put_off
        node/model/optimizer.py: promise
        swarm/pipeline/compute_queue.py: submit
    """,
    "weights' gradients, in idle time": """
        node/concurrency/compute_thread.py: _next_turn
        swarm/pipeline/compute_queue.py: take, compute_chunk
        node/pipeline/deferred_weights.py: _chunks
        node/model/optimizer.py: add_to
    """,
    "inner step": """
        node/pipeline/microbatch_runner.py: _step
        node/pipeline/worker_thread.py: step
        node/pipeline/stage_worker.py: step
        node/pipeline/deferred_weights.py: finish
        node/model/optimizer.py: step, learning_rate
        node/model/optimizers/adamw.py: step
        node/averaging/round_runner.py: after_inner_step
        node/averaging/replica_sync.py: after_inner_step
        node/runtime/role.py: stepped
        node/observability/events.py: InnerStep
    """,
    "end": """
        swarm/pipeline/handover.py: receipt, _release
        swarm/pipeline/settlement.py: enter
        node/pipeline/data_worker.py: _finish
        swarm/pipeline/arrival.py: computed, _completed
        swarm/pipeline/settlement.py: completed
        node/routing/launcher.py: finished
        swarm/routing/latency_attribution.py: completed
        node/data/reading_position.py: came_back
        swarm/pipeline/in_flight.py: complete
        node/observability/throughput.py: add
        node/observability/events.py: Completed
    """,
    "end, at a hop": """
        swarm/pipeline/settlement.py: settled
        node/runtime/role.py: visited
        node/pipeline/microbatch_runner.py: _forget
        node/pipeline/tensor_store.py: forget
        node/pipeline/microbatch_runner.py: _freeing
        protocol/transport/buffer_pool.py: give_back
    """,
}

ROUND: Final[Way] = {
    "work": """
        node/pipeline/stage_worker.py: step
        node/averaging/round_runner.py: after_inner_step
        node/averaging/replica_sync.py: after_inner_step
        node/pipeline/microbatch_runner.py: _step
        node/runtime/role.py: stepped
        node/averaging/round_runner.py: stepped
        node/concurrency/machine_runner.py: handle
        swarm/averaging/round_machine.py: handle, _worked
        swarm/averaging/replica_view.py: order
        swarm/averaging/schedule.py: leader_order
        node/concurrency/machine_runner.py: send
        protocol/transport/grpc_transport.py: tell
        protocol/frames/frames.py: encode
        protocol/frames/codec.py: Converter
    """,
    "hear": """
        protocol/frames/frames.py: decode
        node/network/dispatcher.py: told
        node/averaging/round_runner.py: receive
        swarm/averaging/round_machine.py: _arrived
        swarm/averaging/replica_view.py: worked
        node/averaging/round_runner.py: _look_around
        node/averaging/module_rounds.py: others
        swarm/membership/membership.py: with_state
        swarm/averaging/round_machine.py: _replicas_changed
    """,
    "due, convene": """
        swarm/averaging/round_machine.py: _follow_up, _lead_if_due
        swarm/averaging/replica_view.py: due
        swarm/averaging/schedule.py: due
        swarm/averaging/replica_view.py: may_lead
        swarm/averaging/attempts.py: open
        swarm/averaging/replica_view.py: next_attempt
        swarm/averaging/trust.py: excluded
        swarm/averaging/leader.py: open
    """,
    "enter": """
        swarm/averaging/attempts.py: _invited
        swarm/averaging/attempts.py: refusal_of
        swarm/averaging/attempts.py: _follow
        swarm/averaging/attempts.py: status
        node/averaging/round_runner.py: _take_snapshot
        node/averaging/round_runner.py: take_snapshot
        node/averaging/replica_sync.py: snapshot
        node/averaging/anchor/local_replica.py: read
        node/averaging/exchange/pseudo_gradient.py: squares
        node/averaging/anchor/shared_vector.py: squares_of_difference
        node/averaging/round_runner.py: _bandwidth
        swarm/averaging/attempts.py: _snapshot_taken
    """,
    "roster": """
        swarm/averaging/attempts.py: _for_leader
        swarm/averaging/leader.py: hear
        swarm/averaging/leader.py: Invitee
        swarm/averaging/attempts.py: advance
        swarm/averaging/leader.py: advance, _judge_entries, _fix
        swarm/averaging/roster.py: make_roster, weigh, shards
        swarm/compression/round_codecs.py: choose
        swarm/averaging/attempts.py: _roster_came
        swarm/averaging/roster.py: objection
    """,
    "exchange": """
        node/averaging/round_runner.py: _carry_out
        node/averaging/round_runner.py: exchange, _begin
        node/averaging/exchange/partition.py: Plan
        node/averaging/anchor/layout.py: Layout
        node/averaging/anchor/anchor.py: spare
        node/averaging/exchange/all_reduce.py: run, _send_contributions, _encode
        node/averaging/exchange/pseudo_gradient.py: encode
        protocol/codecs/__init__.py: encode_into
        node/averaging/exchange/pseudo_gradient.py: note
        node/averaging/exchange/all_reduce.py: _send
        protocol/transport/grpc_transport.py: send
        protocol/transport/link.py: send
        protocol/transport/outbox.py: send
        protocol/transport/inbox.py: open
        node/network/dispatcher.py: admit
        node/averaging/round_runner.py: admit
        node/averaging/exchange/arrivals.py: admit
        node/averaging/exchange/partition.py: piece_of
        node/network/dispatcher.py: received
        node/averaging/round_runner.py: received
        node/averaging/exchange/arrivals.py: received
        node/averaging/exchange/all_reduce.py: _take, _add, _check_and_add
        node/concurrency/compute_thread.py: run
        node/averaging/exchange/reduction.py: add
        node/averaging/exchange/partition.py: added
        node/averaging/exchange/all_reduce.py: _pass_on, _apply, _step
        node/averaging/exchange/reduction.py: add
        node/averaging/anchor/outer_step.py: apply, step
        node/averaging/anchor/anchor.py: hash_of
        node/averaging/exchange/all_reduce.py: _finish
        node/averaging/anchor/outer_step.py: finish
        node/averaging/anchor/anchor.py: version_of
        node/averaging/round_runner.py: _keep
    """,
    "commit": """
        swarm/averaging/attempts.py: _staged_came
        swarm/averaging/leader.py: _judge_exchange
        swarm/averaging/attempts.py: _settle, _commit_came, _adopt
        swarm/averaging/replica_view.py: stand_on
    """,
    "apply": """
        node/averaging/round_runner.py: _commit
        node/averaging/round_runner.py: take_staged
        node/averaging/anchor/anchor.py: put
        node/averaging/replica_sync.py: committed
        node/averaging/module_rounds.py: anchored
        node/network/local_peer.py: LocalPeer
        node/averaging/round_runner.py: _settle
        node/averaging/replica_sync.py: carry
        node/averaging/exchange/pseudo_gradient.py: rewrite
        node/averaging/anchor/local_replica.py: carry
        node/averaging/module_rounds.py: settled
        node/averaging/module_rounds.py: committed
        node/observability/events.py: RoundCommitted
        node/checkpoint/saver.py: request_save
    """,
}


def visits(stage: str) -> list[str]:
    """A stage's files in order, each with its functions."""
    return [line.strip() for line in stage.splitlines() if line.strip()]


def steps(way: Way) -> Iterator[tuple[str, str]]:
    """File and function of each step."""
    for stage in way.values():
        for visit in visits(stage):
            file, _, functions = visit.partition(": ")
            yield from ((file, function) for function in functions.split(", "))


def figures(way: Way) -> tuple[int, int, int, int]:
    """How many steps a way has, through how many files, with how many changes of the file, and how many of these return
    to one that was left before."""
    files = [file for file, _ in steps(way)]
    entered = [file for before, file in zip([None, *files[:-1]], files, strict=True) if file != before]
    return len(files), len(set(files)), len(entered) - 1, len(entered) - len(set(entered))
