"""The kept results have the agreed keys, and the documents and pictures that show them are fresh."""

import re
from pathlib import Path
from typing import Any

import pytest

from docs import generate_results, pictures
from docs.generate_results import BEGIN, END, PICTURES, README, RESULTS, ROOT, TARGET, result, results, value

KEYS = {"benchmark", "subject", "command", "commit", "date", "machine", "claims"}
CLAIM_KEYS = {"claim", "ours", "unit", "bar", "better", "peer", "missed"}
LARGEST_DOCUMENT = 12 * 1024
"""Size of docs/results.md, in bytes."""
FILES = sorted(path.stem for path in RESULTS.glob("*.json"))
OTHERS = [README, ROOT / "CONTRIBUTING.md", *sorted(set((ROOT / "docs").glob("*.md")) - {TARGET})]


def test_the_document_is_fresh_and_short() -> None:
    assert TARGET.read_text() == generate_results.document(), "stale: run `make docs`"
    assert TARGET.stat().st_size <= LARGEST_DOCUMENT


def test_the_figures_in_the_readme_are_fresh() -> None:
    text = README.read_text()
    assert generate_results.readme(text) == text, "stale: run `make docs`"


def test_the_readme_gets_ten_figures_with_a_peer() -> None:
    text = generate_results.readme(f"before\n{BEGIN}\nold\n{END}\nafter")
    assert re.fullmatch(f"before\n{BEGIN}\n(\\|.*\\|\n){{12}}{END}\nafter", text)
    assert all(claim["peer"] for claim in claims() if "question" in claim)


@pytest.mark.parametrize("name", FILES)
def test_a_result_has_the_agreed_keys(name: str) -> None:
    found = result(name)
    assert found.keys() >= KEYS
    assert found["benchmark"] == name
    for claim in found["claims"]:
        assert claim.keys() >= CLAIM_KEYS
        assert isinstance(claim["ours"], int | float)
        assert claim["better"] in ("higher", "lower")
        assert claim["missed"] == bool(claim.get("why")), "a missed bar has a reason"
        assert claim["peer"] is None or claim["peer"].keys() == {"name", "value", "source"}
        assert re.fullmatch(r"[0-9a-f]{7}", claim.get("commit", found["commit"]))
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", claim.get("date", found["date"]))


@pytest.mark.parametrize("name", FILES)
def test_a_bar_that_a_figure_does_not_reach_is_missed(name: str) -> None:
    for claim in result(name)["claims"]:
        if isinstance(claim["bar"], int | float):
            beyond = claim["ours"] < claim["bar"] if claim["better"] == "higher" else claim["ours"] > claim["bar"]
            assert claim["missed"] == beyond, claim["claim"]


@pytest.mark.parametrize("document", OTHERS, ids=lambda path: path.name)
def test_a_figure_appears_in_one_document(document: Path) -> None:
    text = re.sub(f"{BEGIN}.*{END}", "", document.read_text(), flags=re.DOTALL)
    for claim in claims():
        figure = value(claim["ours"])
        if claim["unit"] and len(re.sub(r"^[-0.]+|\D", "", figure)) > 2:  # a distinctive one
            repeated = re.search(rf"(?<![\d.,]){re.escape(figure)}\s*{re.escape(claim['unit'])}(?!\w)", text)
            assert not repeated, f"{repeated[0] if repeated else ''} is in docs/results.md"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_of_the_kept_results(name: str) -> None:
    assert pictures.digest(name) in (pictures.FOLDER / f"{name}.svg").read_text(), "stale: run `make pictures`"


def test_the_picture_of_a_run_shows_peers_that_serve() -> None:
    assert (pictures.FOLDER / "up.svg").read_text().count("serving") == pictures.PEERS_STARTED


def claims() -> list[dict[str, Any]]:
    return [claim for found in results() for claim in found["claims"]]
