"""What the person at a machine is told of a run before the node joins it, and when somebody is asked."""

from __future__ import annotations

import asyncio
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from node.cli.join import Consent, description
from node.context.options import NodeOptions
from node.data.places import ToldPlaces, places
from node.model.shapes import BYTES_PER_PARAMETER, parameter_bytes, parameter_shapes
from protocol.identity.keys import Identity
from protocol.manifest.manifest import FilesSection
from protocol.manifest.signing import SignedManifest, sign_manifest
from swarm.vocabulary.types import Reasoned
from tests.node.small_manifest import small_manifest

pty = pytest.importorskip("pty")

AUTHOR = Identity.generate()
FITS = Reasoned((1, 2), "there is room for stages 1, 2")


def options(**changes: object) -> NodeOptions:
    return NodeOptions(link=None, manifest_path=Path("run.toml"), identity_path=Path("key"), **changes)  # type: ignore[arg-type]


def signed(**changes: object) -> SignedManifest:
    return sign_manifest(small_manifest(**changes), AUTHOR)


def told(run: SignedManifest, asked: NodeOptions, *, own: bool = False) -> str:
    return "\n".join(description(run, asked, places(run.manifest.data, asked.told, own=own), FITS, own=own))


def test_it_says_what_the_run_is_and_what_is_read_sent_and_used() -> None:
    run = signed(data__source="path:~/.ssh", stages__experts=2, model__attention="documents")
    said = told(run, options(text=Path("/text"), port=4002, threads=2))
    manifest = run.manifest
    parameters = sum(parameter_bytes(parameter_shapes(manifest, m)) for m in manifest.modules()) // BYTES_PER_PARAMETER
    for words in ("small", run.run, AUTHOR.peer, f"{parameters:,} parameters in 3 stages of 2 experts", "/text"):
        assert words in said
    for words in ("hidden states back into text", "gradients", "2 CPU threads", "ports 4002 and any", "ask the router"):
        assert words in said
    assert "fits      there is room for stages 1, 2" in said
    assert "(this machine)" not in said
    assert "(this machine)" in told(run, options(), own=True)


def test_it_says_why_no_text_is_read() -> None:
    run = signed(data__source="path:~/.ssh")
    assert "reads     no text: the manifest is not signed by this machine's key" in told(run, options())
    for asked in (options(reads_text=False), options(stage="1")):
        assert "reads     no text\n" in told(run, asked)
    assert "this machine's Python" in told(signed(), options())


def test_it_names_the_files_that_must_be_there() -> None:
    files = FilesSection(count=3, bytes=12_345, sha256="0" * 64).model_dump()
    run = signed(data__source="path:text", data__files=files)
    assert "3 files, 12,345 bytes" in told(run, options(), own=True)


def test_a_manifest_cannot_write_to_the_terminal() -> None:
    run = signed(data__source="path:\x1b[2J\nauthor: me")
    lines = description(run, options(), places(run.manifest.data, ToldPlaces(), own=False), FITS, own=False)
    assert all(line.isprintable() for line in lines)


@contextmanager
def terminal() -> Iterator[int]:
    """Standard input and output are a terminal; its other end."""
    ours, theirs = pty.openpty()
    with (
        os.fdopen(ours, "rb"),
        os.fdopen(os.dup(theirs), "r") as typed,
        os.fdopen(theirs, "w") as shown,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys, "stdin", typed)
        patch.setattr(sys, "stdout", shown)
        yield ours


def shown_on(screen: int) -> str:
    """All that has been written to it so far."""
    said = b""
    while select.select([screen], [], [], 0)[0]:
        said += os.read(screen, 10_000)
    return said.decode()


async def answer(*, yes: bool = False, as_json: bool = False, own: bool = False) -> bool:
    run, asked = signed(), options(yes=yes, as_json=as_json)
    asking = Consent(asked)(run, places(run.manifest.data, asked.told, own=own), FITS, own)
    return await asyncio.wait_for(asking, 20)


@pytest.mark.parametrize(
    ("typed", "joins"),
    [(b"y\n", True), (b"Yes\n", True), (b"n\n", False), (b"\n", False), (b"\x04", False), (b"yellow\n", False)],
)
async def test_on_a_terminal_it_asks_and_silence_is_no(typed: bytes, joins: bool) -> None:
    with terminal() as keyboard:
        os.write(keyboard, typed)
        assert await answer() is joins
        assert "Join this run? [y/N]" in shown_on(keyboard)


@pytest.mark.parametrize("how", [{"yes": True}, {"own": True}])
async def test_nobody_is_asked_who_has_said_it_or_made_the_run(how: dict[str, bool]) -> None:
    with terminal() as keyboard:
        assert await answer(**how)
        said = shown_on(keyboard)
    assert "author" in said
    assert "[y/N]" not in said


async def test_without_a_terminal_it_says_it_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert await answer()
    assert "author" in capsys.readouterr().out


async def test_standard_output_stays_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert await answer(as_json=True)
    said = capsys.readouterr()
    assert said.out == ""
    assert "author" in said.err
