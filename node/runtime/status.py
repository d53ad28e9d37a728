"""A node's reports of itself."""

from __future__ import annotations

import dataclasses
import json

from node.concurrency.compute_thread import ComputeThread
from node.network.local_peer import LocalPeer
from node.observability.events import BusySeconds, NodeSummary
from node.observability.status import AttachmentStatus, ComputeStatus, ReachStatus, RelayStatus, Status
from node.observability.typed_json import to_json
from node.runtime.role import NodeRole
from protocol.dht.directory import RelayTunnels


def node_summary(own: LocalPeer, role: NodeRole, compute: ComputeThread) -> NodeSummary:
    account = role.account()
    busy = BusySeconds(
        compute=compute.busy_s,
        codec=account.codec_s,
        wire=role.runner.wire_s,
        wait=compute.idle_s,
        idle_work=compute.idle_work_s,
    )
    return NodeSummary(
        peer=own.peer,
        module=str(own.module),
        steps=account.steps,
        loss_first=account.loss_first,
        loss_last=account.loss_last,
        tokens=account.tokens,
        tokens_per_s=account.tokens_per_s,
        microbatches=account.counts,
        accumulated=account.accumulated,
        busy_s=busy,
    )


def status_json(own: LocalPeer, role: NodeRole, compute: ComputeThread, tunnels: RelayTunnels) -> bytes:
    account, custody, rounds = role.account(), role.runner.custody, role.rounds
    status = Status(
        **{field.name: getattr(account, field.name) for field in dataclasses.fields(account)},
        peer=own.peer,
        module=str(own.module),
        state=own.state.name.lower(),
        addresses=own.addresses,
        via=own.via,
        reach=ReachStatus(own.reach.step.value, own.reach.reason),
        relay=RelayStatus(own.relay, **dataclasses.asdict(tunnels.carried())),
        relays=tuple(AttachmentStatus(each.relay, each.standing, each.reason) for each in tunnels.attachments()),
        unix_ms=int(own.clock.wall() * 1000),
        slots=custody.slots,
        free_slots=custody.slots - custody.used_slots,
        round=0 if own.anchor is None else own.anchor.round,
        digest="" if own.anchor is None else own.anchor.digest.hex(),
        rounds=rounds.describe(),
        last_round=rounds.news.last_round(),
        accused=rounds.news.accused_lately(),
        catching_up=rounds.news.catching_up(),
        codecs=role.runner.codecs.describe(),
        compute=ComputeStatus(
            round(compute.busy_s, 3), round(compute.idle_work_s, 3), round(compute.idle_s, 3), compute.idle_waiting
        ),
    )
    return json.dumps(to_json(status), allow_nan=False).encode()
