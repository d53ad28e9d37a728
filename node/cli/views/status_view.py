"""Views of `skipstone status`. Text from peers is escaped. The page (`node.web`) shows more."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from node.cli.views import text
from node.cli.views.live import download_cell
from node.observability.status import PeerStatus, SwarmStatus

# A swarm of strangers may be large: tables stay readable.
MOST_ACCUSED: Final = 16
MOST_ROWS: Final = 48
ADDRESSES_FROM: Final = 100  # Columns of a terminal from which addresses are shown


def status_views(status: SwarmStatus, width: int = ADDRESSES_FROM) -> Iterator[RenderableType]:
    """Yields all views for a terminal of `width` columns."""
    yield status_headline(status)
    yield status_table(status, width)
    yield from accused_lines(status)
    yield from left_lines(status)
    yield from data_node_lines(status)


def status_headline(status: SwarmStatus) -> Text:
    """Formats the run's name, step, loss and speed, and the modules that no peer serves."""
    line = Text(text.harmless(status.name), style="bold")
    line.append(f"  run {text.harmless(status.run)[:12]}", style="not bold dim")
    if status.step is not None:
        figures = f"  step {text.count(status.step)}  loss {text.loss_text(status.loss)}"
        line.append(f"{figures}  {text.count(status.tokens_per_s)} tokens/s", style="not bold")
    if status.waiting_for:
        modules = ", ".join(map(text.harmless, status.waiting_for))
        line.append(f"\nwaiting: no peer serves {modules}", style="bold yellow")
    if status.too_few_peers is not None:
        line.append(f"\n{status.too_few_peers}", style="bold yellow")
    return line


def status_table(status: SwarmStatus, width: int = ADDRESSES_FROM) -> Table:
    """Builds a table with one row per peer, ordered by stage, and a red row per unserved stage or module."""
    table = text.plain_table("module", "peer", "state", right=("steps", "tokens/s", "slots"))
    table.add_column("round", min_width=len("3 peers"))
    for column in table.columns:
        column.no_wrap = True
    if width >= ADDRESSES_FROM:  # otherwise addresses would fold each row
        table.add_column("address", overflow="fold")
    for stage in range(status.stages):
        peers = [peer for peer in status.peers if peer.hosts(stage)]
        for peer in peers:
            table.add_row(*_status_row(peer)[: len(table.columns)])
        if not peers:
            table.add_row(Text(f"stage {stage}", style="red"), Text("none", style="red"))
        hosted = {peer.module for peer in peers}
        for module in status.modules or () if peers else ():
            if module.partition(".")[0] == str(stage) and module not in hosted:
                table.add_row(Text(module, style="red"), Text("none", style="red"))
    return table


def _status_row(peer: PeerStatus) -> tuple[RenderableType, ...]:
    names = text.harmless(peer.module or "-"), text.peer_name(peer.peer)
    state = text.harmless("no answer" if peer.answered is None else peer.state)
    figures = text.count(peer.steps), text.count(peer.tokens_per_s), f"{peer.slots - peer.free_slots}/{peer.slots}"
    return *map(Text, (*names, state, *figures)), _round_cell(peer), Text(_address_text(peer))


def _address_text(peer: PeerStatus) -> str:
    where = f"via {', '.join(map(text.peer_name, peer.via))}" if peer.via else ", ".join(peer.addresses)
    if peer.said.reach.step != "unknown":
        where = f"{where} ({peer.said.reach.step})".strip()
    if peer.said.relay.at:
        where += f", relay: {text.megabytes(peer.said.relay.carried_bytes)} carried"
    return text.harmless(where)


def _round_cell(peer: PeerStatus) -> RenderableType:
    download, last = peer.said.catching_up, peer.said.last_round
    if download is not None:
        return download_cell(download.bytes, download.total_bytes)
    if last is None:
        return Text(text.count(peer.round))
    company = "alone" if last.members == 1 else text.counted(last.members, "peer")
    return Text(f"{text.count(peer.round)}  {company}  {text.duration(last.seconds_ago)} ago")


def accused_lines(status: SwarmStatus) -> Iterator[Text]:
    """Yields a line for each replica that an audit of a round convicted, those with most accusers first."""
    by: defaultdict[str, set[str]] = defaultdict(set)
    latest: dict[str, tuple[int, str]] = {}
    for peer in status.peers:
        for said in peer.said.accused:
            found = (said.round, said.why)
            by[said.peer].add(peer.peer)
            latest[said.peer] = max(latest.get(said.peer, found), found)
    for name in sorted(by, key=lambda name: (-len(by[name]), name))[:MOST_ACCUSED]:
        number, why = latest[name]
        who = f"accused by {len(by[name])}: {text.peer_name(name)}"
        yield Text(f"{who} {text.harmless(why)} (round {text.count(number)})", style="yellow")


def left_lines(status: SwarmStatus) -> Iterator[Text]:
    """Yields a line for each replica that replaced its anchor by others' one within the last hour."""
    found = [(peer, left) for peer in status.peers if (left := peer.said.left) is not None]
    for peer, left in found[:MOST_ACCUSED]:
        kept = "; the snapshot before is in its checkpoint's folder `left`" if left.kept else ""
        who = f"{text.harmless(str(peer.module))} {text.peer_name(peer.peer)}"
        what = f"left its anchor of round {text.count(left.round)} for others'"
        if left.followed > left.round:  # mostly because it missed rounds
            what = f"caught up with others from round {text.count(left.round)} to {text.count(left.followed)},"
        yield Text(f"{who} {what} {text.duration(left.seconds_ago)} ago{kept}")


def data_node_lines(status: SwarmStatus) -> Iterator[Text]:
    """Yields a line for each replica with two or more data nodes: their shares of its last inner steps."""
    for peer in status.peers[:MOST_ROWS]:
        shares = Counter(peer.said.data_nodes or {}).most_common(MOST_ACCUSED)
        if len(shares) > 1:
            of_each = ", ".join(f"{text.peer_name(name)} {share:.0%}" for name, share in shares)
            style = "yellow" if shares[0][1] > 0.5 else "dim"
            yield Text(f"data nodes of {text.peer_name(peer.peer)}: {of_each}", style=style)
