"""Decisions of the reachability ladder. No peer is trusted alone: half of those asked must have connected."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from node.network.reach_status import ReachStep, Standing
from node.reachability.port_mapping import Mapping, NotMapped, Router
from node.reachability.reach_test import Ask, Attempt
from protocol.nat.dial_back import DialBackOutcome


def judge(attempts: Sequence[Attempt], port: int, told_host: str | None) -> Standing:
    """The verdict of the peers' attempts at `port`. A `told_host` is never replaced by what others see."""
    # A witness in our own network proves little; those that see a public address count first.
    tried = [t for t in attempts if t.result.outcome is not DialBackOutcome.NOT_TRIED]
    if not tried:
        return Standing(ReachStep.UNKNOWN, "no peer of the run could be asked to connect")
    counted = [t for t in tried if ipaddress.ip_address(t.result.host).is_global] or tried
    reached = [t for t in counted if t.result.outcome is DialBackOutcome.REACHED]
    if 2 * len(reached) >= len(counted):
        host = _most_common(reached)
        said = f"{len(reached)} of {len(counted)} peers asked have connected to {joined(host, port)}"
        address = None if told_host is not None else joined(host, port)
        return Standing(ReachStep.DIRECT, said, address, seen_host=host)
    host = _most_common(counted)
    if told_host is not None and told_host != host:
        said = (
            f"others see this machine at {host}, where port {port} does not answer; whether {told_host} "
            "leads here cannot be tested"
        )
        return Standing(ReachStep.UNKNOWN, said, seen_host=host)
    return _unreachable(counted, host, port)


async def climb(port: int, told_host: str | None, ask: Ask, router: Router | None) -> Standing:
    """Tries the steps from the top. Keeps a mapping only if it has made the node reachable; no `router`, no mapping."""
    if router is not None and router.mapping is not None:
        standing = await _tested(router.mapping, told_host, ask)
        if standing.step is not ReachStep.UNREACHABLE:
            return standing
        await router.close()
    standing = judge(await ask(port), port, told_host)
    if standing.step is not ReachStep.UNREACHABLE or not standing.translated or router is None:
        return standing
    mapping = await router.open(port)
    if isinstance(mapping, NotMapped):
        return replace(standing, reason=f"{standing.reason}; {mapping.reason}")
    again = await _tested(mapping, told_host, ask)
    if again.step is ReachStep.MAPPED:
        return again
    await router.close()
    return replace(standing, reason=f"{standing.reason}; {_why_in_vain(mapping, again)}")


def joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _tested(mapping: Mapping, told_host: str | None, ask: Ask) -> Standing:
    standing = judge(await ask(mapping.external_port), mapping.external_port, told_host)
    if standing.step is not ReachStep.DIRECT:
        return standing
    address = joined(told_host or standing.seen_host, mapping.external_port)
    return replace(
        standing, step=ReachStep.MAPPED, address=address, reason=f"mapped by {mapping.how}: {standing.reason}"
    )


def _unreachable(counted: Sequence[Attempt], host: str, port: int) -> Standing:
    translated = any(t.local_host not in (None, t.result.host) for t in counted)
    failed = [t.result.outcome for t in counted if t.result.outcome is not DialBackOutcome.REACHED]
    why = _IN_WORDS[Counter(failed).most_common(1)[0][0]]
    said = f"{len(failed)} of {len(counted)} peers asked could not connect to {joined(host, port)}: {why}"
    local = next((t.local_host for t in counted if t.local_host is not None), None)
    fix = (
        (
            f"Switch on UPnP or NAT-PMP in your router, or forward TCP port {port} there to {local}:{port}; keep "
            f"the port with --port {port}."
        )
        if translated
        else (
            f"Let TCP port {port} in through the firewall of this machine or of its network; keep the port "
            f"with --port {port}."
        )
    )
    return Standing(ReachStep.UNREACHABLE, said, fix=fix, translated=translated, seen_host=host)


_IN_WORDS = {
    DialBackOutcome.CLOSED: "the connection was refused",
    DialBackOutcome.SILENT: "nothing came back",
    DialBackOutcome.ANOTHER: "something else answers there",
}


def _why_in_vain(mapping: Mapping, tested: Standing) -> str:
    """Why a port that the router says it has mapped is not reached."""
    if mapping.external_host and tested.seen_host and mapping.external_host != tested.seen_host:
        return (
            f"the router has mapped a port, but its own address is {mapping.external_host}, and others see "
            f"{tested.seen_host}:"
            " there is a second router before it, often the provider's"
        )
    return f"the router has mapped port {mapping.external_port} by {mapping.how}, and still: {tested.reason}"


def _most_common(attempts: Sequence[Attempt]) -> str:
    return Counter(t.result.host for t in attempts).most_common(1)[0][0]
