"""The benchmark of experts measures what it says, on texts so small that nothing is learnt from them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import experts
from benchmarks.experts_task import ARMS, Domain, MixedSource, domains_of
from node.data.sources import PIECE_BYTES
from swarm.vocabulary.errors import ConfigError


def two_domains(folder: Path) -> list[str]:
    """The options of a short run on two kinds of text that nobody takes for each other."""
    random = np.random.default_rng(1)
    files = [folder / name for name in ("letters", "digits")]
    for file, alphabet in zip(files, (b"abc ", b"012\n"), strict=True):
        file.write_bytes(random.choice(np.frombuffer(alphabet, np.uint8), 24 * PIECE_BYTES).tobytes())
    return ["--domains", *map(str, files), "--steps", "2", "--seeds", "1", "--hidden", "8", "--restarts", "1"]


def test_all_arms_are_measured_on_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = two_domains(tmp_path)
    monkeypatch.setattr(sys, "argv", ["experts.py", *options, "--json"])
    experts.main()
    (line,) = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert report["arms"].keys() == ARMS.keys()
    assert all(0 < arm["loss"] < 6 for arm in report["arms"].values())
    assert report["domains"] == {"letters": 24 * PIECE_BYTES, "digits": 24 * PIECE_BYTES}
    (routed,), (random_one,) = report["every_seed"]["routed"], report["every_seed"]["random"]
    measured = [sum(tokens for _, tokens in of["routes"].values()) for of in (routed, random_one)]
    assert measured[0] == measured[1]
    assert routed["again_every"]["once"] == pytest.approx(routed["loss"], abs=2e-3)
    assert routed["again_every"].keys() == {"once", "64", "256"}
    assert routed["router_us"] > 0


def test_short_texts_make_shorter_documents_and_each_length_of_text_the_same() -> None:
    domains = [Domain("letters", b"abc " * 16384), Domain("digits", b"012\n" * 16384)]
    whole, half = MixedSource(domains), MixedSource(domains, 0.5)
    sizes = {len(whole.read(name)) for name in whole.names}
    assert len(whole.names) >= 128
    assert sizes == {len(half.read(name)) for name in half.names}
    assert b"".join(whole.read(f"0-letters@{at}") for at in range(0, 65536, sizes.pop())) == domains[0].text


@pytest.mark.parametrize(
    ("size", "complaint"), [(None, "there is no file or folder"), (0, "has 0 bytes"), (5000, "has 5000 bytes")]
)
def test_texts_that_are_too_short_or_missing_are_refused_in_a_sentence(
    size: int | None,
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = two_domains(tmp_path)
    other = tmp_path / "other"
    if size is not None:
        other.write_bytes(b"x" * size)
    monkeypatch.setattr(sys, "argv", ["experts.py", "--domains", str(other), *options[1:], "--json"])
    with pytest.raises(SystemExit) as ended:
        experts.main()
    said = capsys.readouterr()
    assert ended.value.code == ConfigError.exit_code
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("error: ")
    assert complaint in line


def test_without_files_this_machine_has_some_domains() -> None:
    domains = domains_of([])
    assert "python" in [domain.name for domain in domains]
    assert all(len(domain.text) > 250_000 for domain in domains)
