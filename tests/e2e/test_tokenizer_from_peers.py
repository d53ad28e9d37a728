"""A data node that has the text alone gets the run's tokenizer from peers."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path

import pytest

from protocol.identity.keys import Identity
from protocol.manifest.manifest import manifest_from_table
from protocol.manifest.signing import sign_manifest
from tests.e2e.small_run import PATIENCE_S, small_run, write_text
from tests.node.data.test_tokenizers import word_tokenizer
from tests.security.test_manifests import HERE, NODE, Victim, running, written

pytestmark = pytest.mark.e2e


async def test_a_data_node_joins_without_the_tokenizer_s_file(tmp_path: Path) -> None:
    """The author serves stage 1, and has the file where the manifest says; the newcomer has no path of it, and
    trains."""
    words = [f"word{number}" for number in range(23)]
    content = word_tokenizer("<unk>", "</s>", "and", *words) + b" " * 2**17  # of several pieces
    (tmp_path / "author").mkdir()
    (tmp_path / "author" / "words.json").write_bytes(content)
    text, key, newcomer = write_text(tmp_path / "text"), tmp_path / "author.key", Victim(tmp_path)
    table = small_run(text, blocks=(0, 1)).model_dump()
    table["data"] |= {
        "tokenizer": f"file:{tmp_path / 'author' / 'words.json'}",
        "tokenizer_sha256": hashlib.sha256(content).hexdigest(),
    }
    (tmp_path / "run.toml").write_bytes(sign_manifest(manifest_from_table(table), Identity.create(key)).text)
    author = ("--stage", "1", "--identity", str(key), "--link-file", str(tmp_path / "link"))
    joining = ("--text", str(text), "--stage", "0", "--steps", "3")
    command = (*NODE, str(tmp_path / "run.toml"), *author, *HERE)
    async with asyncio.timeout(PATIENCE_S), running(*command, env=newcomer.environment):
        link = await written(tmp_path / "link")
        async with running(*NODE, link, *joining, *HERE, env=newcomer.environment) as node:
            assert node.stdout is not None
            events = [json.loads(line) async for line in node.stdout]
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3]
    [kept] = (newcomer.home / "skipstone" / "tokenizers").iterdir()
    assert kept.read_bytes() == content
