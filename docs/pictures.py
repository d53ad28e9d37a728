"""Draws docs/pictures: six plots of the kept results, and the view of a real `skipstone up`. `make pictures` runs it.

Each plot names the digest of its results; tests/test_results.py finds a stale one.
`python -m docs.pictures links` draws one picture.
"""

import argparse
import asyncio
import hashlib
import io
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from docs.generate_results import PICTURES, RESULTS, ROOT, result

FOLDER: Final = ROOT / "docs" / "pictures"
STEPS: Final = 60
SHOWN_AT: Final = 48
"""Step of the run at which its view is taken."""
WIDTH: Final = 88
PEERS_STARTED: Final = 7
RED, ORANGE, BLUE, SKY, GREEN, VIOLET, GRAY = (
    "#c2410c",
    "#fb923c",
    "#1d4ed8",
    "#93c5fd",
    "#0f766e",
    "#7c3aed",
    "#64748b",
)


def digest(name: str) -> str:
    """The digest of the results that a picture shows."""
    return hashlib.sha256((RESULTS / f"{PICTURES[name][0]}.json").read_bytes()).hexdigest()


# ---- plots -----------------------------------------------------------------------------------------------------------


def links(axes: Any, found: dict[str, Any]) -> None:
    arms = {
        "skip-pipe": ("Skipstone", RED),
        "pipe": ("torch 1F1B", BLUE),
        "hivemind-local": ("hivemind, local steps", GREEN),
        "torchft-diloco": ("torchft DiLoCo", VIOLET),
        "ddp": ("torch DDP", GRAY),
    }
    best: dict[tuple[str, str], float] = {}
    for run in found["runs"]:
        key = run["arm"], run["link"]
        best[key] = max(best.get(key, 0), run["tokens_s"])
    series = {name: [best.get((arm, link), 0) for link in ("lo", "100x20", "20x80")] for arm, name in arms.items()}
    _bars(axes, ["loopback", "100 Mbit/s, 20 ms", "20 Mbit/s, 80 ms"], series)
    axes.set_ylabel("tokens/s, best run")


def averaging(axes: Any, found: dict[str, Any]) -> None:
    sizes = ["4 MB, 4 peers", "40 MB, 4 peers", "200 MB, 4 peers"]
    ours, theirs = ([found["ms"][size][system] for size in sizes] for system in ("ours", "hivemind"))
    series = {
        ("Skipstone, float32", RED): [each[0] for each in ours],
        ("Skipstone, 8 bits", ORANGE): [each[1] for each in ours],
        ("hivemind, float32", BLUE): [each[0] for each in theirs],
        ("hivemind, 8 bits", SKY): [each[1] for each in theirs],
        ("gloo, no TLS, no agreement", GRAY): [found["ms"][size].get("gloo", 0) for size in sizes],
    }
    axes.set_yscale("log")
    _bars(axes, sizes, series)
    axes.set_ylabel("ms a round")


def recovery(axes: Any, found: dict[str, Any]) -> None:
    rows = sorted(found["scenarios_2026_11_22_quiet"], key=lambda row: (max(row["recovery_s"]), row["scenario"]))
    names = [row["scenario"] for row in rows]
    axes.barh(names, [row["allowed_s"] for row in rows], color="#e5e7eb", label="allowed")
    axes.barh(names, [max(row["recovery_s"]) for row in rows], color=RED, label="until the pace is back")
    axes.tick_params(axis="y", labelsize=6, length=0)
    axes.margins(y=0.01)
    axes.set_xlabel("seconds; without a bar: at once")
    axes.legend(loc="center right")


def skipping(axes: Any, found: dict[str, Any]) -> None:
    colors = {"full": GRAY, "3/4": SKY, "3/4, r 1.5": BLUE, "2/3": ORANGE, "2/3, r 1.5": RED}
    for arm, ran in found["seeds"][0]["arms"].items():
        label = "full paths" if arm == "full" else arm.replace(", r 1.5", ", unequal visits")
        axes.plot(*_columns(ran["curve"][2:]), color=colors[arm], label=label)
    axes.set_xlabel("emulated seconds, seed 1")
    axes.set_ylabel("held-out loss, nats a byte")
    axes.legend(title="stages a path")


def codecs(axes: Any, found: dict[str, Any]) -> None:
    for name, (bytes_a_token, *losses) in list(found["boundaries"].items())[1:]:
        axes.plot([bytes_a_token] * 2, losses, "o", color=RED)
        place = {"xytext": (8, -4)} if "forward" in name else {"xytext": (0, 6), "ha": "center"}
        axes.annotate(name, (bytes_a_token, max(losses)), textcoords="offset points", size=8, **place)
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=0.02)
    axes.margins(0.12)
    axes.set_xlabel("bytes a token and stage boundary, both ways")
    axes.set_ylabel("nats a byte above float32, two seeds")


def optimizers(axes: Any, found: dict[str, Any]) -> None:
    for arm, label, color in (("adamw", "AdamW", GRAY), ("muon", "Muon", RED), ("soap", "SOAP", BLUE)):
        for run in found["runs"]:
            if (run["arm"], run["rate"]) == (arm, found["summary"][arm]["rate"]):
                steps, _, losses = _columns(run["curve"])
                axes.plot(steps, losses, color=color, label=label if run["seed"] == 1 else None)
    axes.set_ylim(1.7, 3.6)
    axes.set_xlabel("steps; a line a seed, each with its best rate")
    axes.set_ylabel("held-out loss, nats a byte")
    axes.legend()


def _bars(axes: Any, groups: list[str], series: dict[tuple[str, str], list[float]]) -> None:
    """Draws groups of bars. `series` has the height in each group by label and color; 0 is no bar."""
    for place, ((label, color), heights) in enumerate(series.items()):
        columns = [column + 0.16 * (place - len(series) // 2) for column in range(len(groups))]
        axes.bar(columns, [height or float("nan") for height in heights], 0.15, color=color, label=label)
    axes.set_xticks(range(len(groups)), groups)
    axes.legend(ncols=2)


def _columns(rows: list[list[float]]) -> list[list[float]]:
    return [list(column) for column in zip(*rows, strict=True)]


DRAWN_BY: Final[dict[str, Callable[[Any, dict[str, Any]], None]]] = {
    draw.__name__: draw for draw in (links, averaging, recovery, skipping, codecs, optimizers)
}


def plot(name: str) -> None:
    """Draws one plot into its file."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    style = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9, "axes.spines.top": False}
    with pyplot.rc_context({**style, "axes.spines.right": False, "legend.frameon": False, "legend.fontsize": 8}):
        figure, axes = pyplot.subplots(figsize=(7, 4.6 if name == "recovery" else 3.4), layout="constrained")
        DRAWN_BY[name](axes, result(PICTURES[name][0]))
        axes.set_title(PICTURES[name][1], loc="left", size=10)
        figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None, "Description": digest(name)})
        pyplot.close(figure)


# ---- the view of a run -----------------------------------------------------------------------------------------------


async def up() -> str:
    """Trains a local swarm and returns its view, with every peer serving, as a picture of a terminal."""
    from rich.console import Console

    from node.cli.views.live import render
    from node.local_swarm.default_manifest import default_manifest
    from node.local_swarm.local_swarm import LocalSwarm
    from node.local_swarm.setup import LocalSwarmOptions

    manifest = default_manifest(seed=1)
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(f"[dim]$[/] skipstone up --peers {PEERS_STARTED} --steps {STEPS}\n", highlight=False)
    async with LocalSwarm(manifest, LocalSwarmOptions(peers=PEERS_STARTED, steps=STEPS)) as swarm:
        began, taken = time.monotonic(), False
        async for _ in swarm.events():
            if not taken and swarm.progress.step >= SHOWN_AT:
                now = time.monotonic()
                console.print(render(replace(swarm.progress, notes=()), manifest.name, now - began, now), "")
                taken = True
            if swarm.progress.is_over:
                swarm.request_stop()
    return console.export_svg(title="skipstone up", unique_id="up")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", nargs="*", help=f"which to draw [default: all]: {', '.join([*PICTURES, 'up'])}")
    for each in parser.parse_args().picture or [*PICTURES, "up"]:
        if each == "up":
            FOLDER.joinpath("up.svg").write_text(asyncio.run(up()))
        else:
            plot(each)
