"""The run's tokenizer comes from where the person says, from an earlier time, or from peers, who get nothing else."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from node.context.options import NodeOptions
from node.data.local_paths import LocalPaths
from node.runtime import run_tokenizer as module
from node.runtime.run_tokenizer import RunTokenizer, kept_file, run_tokenizer
from protocol.manifest.manifest import DataSection
from swarm.vocabulary.errors import Unreachable
from swarm.vocabulary.types import Reasoned

FILE = b"the tokenizer"
SHA256 = hashlib.sha256(FILE).hexdigest()
TEXT: Reasoned[LocalPaths | None] = Reasoned(LocalPaths(Path("text")), "where --text says")
NO_TEXT: Reasoned[LocalPaths | None] = Reasoned(None, "say with --text")
LINK: Any = object()


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    asked: list[str] = []

    async def fetch(session: object, sha256: str, patience_s: float) -> bytes:
        asked.append(sha256)
        return FILE

    monkeypatch.setattr(module, "fetch_tokenizer", fetch)
    return asked


def data(file: Path) -> DataSection:
    return DataSection(source="path:x", tokenizer=f"file:{file}", tokenizer_sha256=SHA256)


async def found(
    tmp_path: Path, text: Reasoned[LocalPaths | None] = TEXT, *, own: bool = False, **options: Any
) -> RunTokenizer:
    given = NodeOptions(identity_path=tmp_path / "home" / "key", **{"link": LINK, "manifest_path": None, **options})
    session: Any = None
    return await run_tokenizer(given, session, data(tmp_path / "there.json"), text, own=own)


async def test_who_has_named_none_gets_it_from_peers_once(tmp_path: Path, fetched: list[str]) -> None:
    first = await found(tmp_path)
    kept = kept_file(tmp_path / "home" / "key", SHA256)
    assert first.text.value == LocalPaths(Path("text"), kept)
    assert (first.content, kept.read_bytes()) == (FILE, FILE)
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    assert (await found(tmp_path), fetched) == (first, [SHA256])
    kept.write_bytes(b"something else")
    assert await found(tmp_path) == first, "what is kept is hashed again"
    assert kept.read_bytes() == FILE


async def test_a_file_that_is_named_is_given_away_only_if_it_is_the_runs(tmp_path: Path, fetched: list[str]) -> None:
    named = tmp_path / "named.json"
    named.write_bytes(b"a secret of this machine")
    other = await found(tmp_path, tokenizer=named)
    assert other.content is None
    assert other.text.value == LocalPaths(Path("text"), named), "what is wrong with it is said where it is opened"
    named.write_bytes(FILE)
    assert (await found(tmp_path, tokenizer=named)).content == FILE
    (tmp_path / "there.json").write_bytes(FILE)
    assert (await found(tmp_path, own=True)).text.value == LocalPaths(Path("text"), tmp_path / "there.json")
    assert fetched == []


@pytest.mark.parametrize("options", [{"reads_text": False}, {"stage": "1"}])
async def test_who_reads_no_text_asks_nobody(tmp_path: Path, fetched: list[str], options: dict[str, Any]) -> None:
    assert await found(tmp_path, **options) == RunTokenizer(TEXT)
    assert (await found(tmp_path, NO_TEXT), fetched) == (RunTokenizer(NO_TEXT), [])


async def test_where_nobody_gives_it_the_option_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch(session: object, sha256: str, patience_s: float) -> bytes:
        raise Unreachable("no peer has given it")

    monkeypatch.setattr(module, "fetch_tokenizer", fetch)
    first: dict[str, Any] = {"link": None, "manifest_path": tmp_path / "run.toml"}
    for options in ({}, first):
        refused = await found(tmp_path, **options)
        assert (refused.content, refused.text.value) == (None, None)
        assert "--tokenizer" in refused.text.reason
