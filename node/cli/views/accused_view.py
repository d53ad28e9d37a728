"""`skipstone status`: which replicas others have caught, and at what.

A module of its own, as the other views of `status` are: it reads what other machines have written, which may be
anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.text import Text

from node.cli.views.text import count, harmless, number_in, peer_name

MOST_SHOWN: Final = 16
"""Of the replicas that are accused."""


def accused_view(answer: Mapping[str, Any]) -> Iterator[Text]:
    """A line for each replica that is accused, those by the most peers first; nothing where nobody is. `answer` is what
    `query_status` returns."""
    by: defaultdict[str, set[str]] = defaultdict(set)
    latest: dict[str, tuple[float, str]] = {}
    for peer in answer["peers"]:
        said = (peer["answered"] or {}).get("accused")
        for one in said if isinstance(said, list) else ():
            if not isinstance(one, dict) or not isinstance(one.get("peer"), str):
                continue
            name, found = one["peer"], (number_in(one, "round"), str(one.get("why", "")))
            by[name].add(str(peer["peer"]))
            latest[name] = max(latest.get(name, found), found)
    for name in sorted(by, key=lambda name: (-len(by[name]), name))[:MOST_SHOWN]:
        number, why = latest[name]
        who = f"accused by {len(by[name])}: {peer_name(name)}"
        yield Text(f"{who} {harmless(why)} (round {count(number)})", style="yellow")
