"""Writes docs/results.md and the table of figures in README.md from benchmarks/results. Run it with `make docs`."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "benchmarks" / "results"
TARGET: Final = ROOT / "docs" / "results.md"
README: Final = ROOT / "README.md"
BEGIN: Final = "<!-- figures -->"
END: Final = "<!-- /figures -->"
SUBJECTS: Final = (
    "Other systems",
    "Hops",
    "GPU (H100)",
    "Rounds",
    "Failures",
    "Liars and intruders",
    "Far links",
    "Paths",
    "Skipping stages",
    "Text and balance",
    "Experts",
    "Optimizers and idle time",
    "Codecs",
    "Memory",
    "First minutes",
)
# The results of each picture, and its title.
PICTURES: Final = {
    "links": ("peers", "Four peers over slower links"),
    "averaging": ("averaging", "Rounds, with hivemind and gloo"),
    "recovery": ("chaos", "Recovery from 35 kinds of faults"),
    "skipping": ("skipping_time", "Loss over time with skipped stages"),
    "codecs": ("codecs", "Loss over bytes between stages"),
    "optimizers": ("optimizers", "Loss over steps by inner optimizer"),
}
PAPERS: Final = ("SkipPipe", "Hybrid compression", "DiPaCo", "PipeFisher", "WLB-LLM", "MuLoCo")
OLD: Final = "before the cut"
HEAD: Final = (
    "# Results",
    "",
    "CPU: AMD EPYC virtual machine, 2 shared cores, 24 GiB, Debian 12, Python 3.11, torch 2.13. "
    "GPU: one NVIDIA H100 80GB, torch 2.11.",
    "",
    "Each row is a claim in `benchmarks/results`, where its file has the whole command, the commit, the reason for a "
    "miss and raw figures. `hop` means `python benchmarks/hop.py`, run at that commit. Days are in November 2026. "
    f"†: measured {OLD} of 2026-11-26, not again.",
    "",
)


def result(name: str) -> dict[str, Any]:
    """One kept result."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def results() -> list[dict[str, Any]]:
    """The kept results in the order of the document."""
    found = [result(path.stem) for path in sorted(RESULTS.glob("*.json"))]
    return sorted(found, key=lambda each: SUBJECTS.index(each["subject"]))


def document() -> str:
    """The text of docs/results.md."""
    found = results()
    tables = [*HEAD, *_claims(found), "", *_papers(found), ""]
    return "\n".join([*tables, "## Pictures", "", *_pictures(), "", *_dropped(found), ""])


def readme(text: str) -> str:
    """`text` with a fresh region between the markers, if it has them."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    return "\n".join([head + BEGIN, *_figures(results()), END + tail]) if begin and end else text


def value(number: float | str | None, unit: str = "") -> str:
    """A figure with its unit, in the form that documents use."""
    if number is None or isinstance(number, str):
        return number or ""
    text = f"{number:,}" if abs(number) >= 1000 and number == int(number) else f"{number:.6g}"
    return f"{text.replace('e-0', 'e-')}{'' if unit == 'x' else ' '}{unit}".rstrip()


def _claims(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield from _row("claim", "ours", "best peer", "bar", "missed?", "command", "day")
    yield from _row(*["---"] * 7)
    subject = ""
    for each in found:
        claims = [claim for claim in each["claims"] if "paper" not in claim]  # those are in the table below
        if claims and each["subject"] != subject:
            subject = each["subject"]
            yield from _row(f"**{subject}**", *[""] * 6)
        for claim in claims:
            peer = claim["peer"]
            yield from _row(
                claim["claim"],
                value(claim["ours"], claim["unit"]),
                "" if peer is None else f"{peer['name']}: {value(peer['value'])}",
                value(claim["bar"]),
                "missed" if claim["missed"] else "",
                *_where(claim, each),
            )


def _where(claim: dict[str, Any], each: dict[str, Any]) -> tuple[str, str]:
    day = claim.get("date", each["date"])[-2:] + ("†" if OLD in claim.get("note", "") else "")
    return f"`{_short(claim.get('command', each['command']))}`", day


def _papers(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What the papers claim beside what we measured, with the control arm."""
    yield from ("## The papers' claims", "")
    yield from _row("paper", "it says", "here", "ours", "control", "seeds", "verdict", "command", "day")
    yield from _row(*["---"] * 9)
    shown = [(claim["paper"], claim, each) for each in found for claim in each["claims"] if "paper" in claim]
    for paper, claim, each in sorted(shown, key=lambda row: PAPERS.index(row[0]["name"])):
        ours = (claim["claim"], value(claim["ours"], claim["unit"]))
        more = (paper["control"], str(paper["seeds"]), paper["verdict"])
        yield from _row(paper["name"], paper["says"], *ours, *more, *_where(claim, each))


def _figures(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield from _row("question", "Skipstone", "peer", "measured")
    yield from _row(*["---"] * 4)
    for each in found:
        for claim in each["claims"]:
            if "question" in claim:
                peer, unit = claim["peer"], claim["unit"]
                ours, theirs = value(claim["ours"], unit), f"{peer['name']}: {value(peer['value'], unit)}"
                yield from _row(claim["question"], ours, theirs, claim.get("date", each["date"]))


def _pictures() -> Iterator[str]:
    for name, (_, title) in PICTURES.items():
        yield f"![{title}](pictures/{name}.svg)"


def _dropped(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield from ("## Tried and dropped", "")
    for each in found:
        yield from (f"* {line}" for line in each.get("dropped", ()))


def _short(command: str) -> str:
    """The program without its options: `hop` for `python benchmarks/hop.py --rounds 3`."""
    plain = re.sub(r"^python (-m )?(benchmarks[/.])?|\.py\b|\(.*", "", command)
    return re.split(r" -| docker/| [A-Z]|, ", plain)[0].strip()


def _row(*cells: str) -> Iterator[str]:
    yield f"|{'|'.join(cells)}|"


if __name__ == "__main__":
    TARGET.write_text(document())
    README.write_text(readme(README.read_text()))
