"""Files of credit: kept by a node, and checked by anybody without the network."""

import asyncio
import json
from base64 import b64encode
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from node.__main__ import app
from node.concurrency.task_groups import background
from node.runtime.credit_file import CreditFile, read_credit
from protocol.frames.frames import encode_tallies
from protocol.identity.invitations import Grant
from protocol.identity.keys import Identity
from protocol.identity.signatures import EntrySigner
from protocol.manifest.signing import sign_manifest
from swarm.averaging.proven_work import MOST_CREDITED
from swarm.vocabulary.averaging_messages import WorkRow, WorkTally
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import ModuleId, PeerId
from tests.node.small_manifest import small_manifest

AUTHOR, GUEST, STRANGER, PEER, OTHER = (Identity.generate() for _ in range(5))
SIGNED = sign_manifest(small_manifest(), AUTHOR)
INVITATION = Grant.issue(AUTHOR, SIGNED.run, 0, 2**40).invitation(SIGNED.run, GUEST.peer)


def tally(by: Identity = AUTHOR, tokens: int = 100, peer: PeerId = PEER.peer, invitation: bytes = b"") -> WorkTally:
    made = WorkTally(by.peer, ModuleId(1), 1, 5.0, 30.0, (WorkRow(peer, tokens // 10, tokens, tokens),))
    return EntrySigner(by, SIGNED.run, invitation=invitation).sign_tally(made)


def kept(folder: Path, *tallies: WorkTally, peer: PeerId = PEER.peer) -> Path:
    file = CreditFile(folder, SIGNED, peer)
    for each in tallies:
        file.add(each)
    file.save()
    [path] = folder.glob(f"*{peer}.json")
    return path


def put_in(path: Path, *tallies: WorkTally) -> None:
    table = json.loads(path.read_text())
    table["tallies"] += [b64encode(encode_tallies((each,))).decode() for each in tallies]
    path.write_text(json.dumps(table))


def test_what_is_kept_is_read_again_and_goes_on(tmp_path: Path) -> None:
    path = kept(tmp_path / "credits", tally(), tally(GUEST, 40, invitation=INVITATION))
    signed, credit, faults = read_credit(path)
    assert (signed, credit.peer, faults) == (SIGNED, PEER.peer, ())
    for tokens, credited in ((90, [100, 40]), (110, [110, 40])):
        kept(path.parent, tally(tokens=tokens))
        assert [row.tokens for row, _ in read_credit(path)[1].proofs] == credited


@pytest.mark.parametrize(
    ("false", "fault"),
    [
        (replace(tally(), rows=(WorkRow(PEER.peer, 10, 10**9, 100),)), "was changed"),
        (tally(STRANGER), "was changed, or is not signed by a data node"),
        (tally(GUEST, invitation=INVITATION[:-1] + bytes([INVITATION[-1] ^ 1])), "is not signed"),
        (replace(tally(), data_node=GUEST.peer, invitation=INVITATION), "was changed"),
        (tally(), "appears twice"),
        (tally(tokens=50, peer=OTHER.peer), "proves no work"),
    ],
)
def test_what_is_forged_changed_or_there_twice_does_not_count(tmp_path: Path, false: WorkTally, fault: str) -> None:
    path = kept(tmp_path, tally())
    put_in(path, false)
    _, credit, faults = read_credit(path)
    assert [row.tokens for row, _ in credit.proofs] == [100]
    assert len(faults) == 1
    assert fault in faults[0]
    assert CliRunner().invoke(app, ["credits", str(path)]).exit_code == 0
    checked = CliRunner().invoke(app, ["credits", "--verify", "--json", str(path)])
    assert (checked.exit_code, json.loads(checked.stdout)["tokens"]) == (74, 100)


@pytest.mark.parametrize("key", ["peer", "manifest", "tallies"])
@pytest.mark.parametrize("value", [None, 5, "", ["x"], "\ud800"])
def test_a_damaged_file_is_refused_and_replaced(tmp_path: Path, key: str, value: object) -> None:
    path = kept(tmp_path, tally())
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ConfigError):
        read_credit(path)
    assert read_credit(kept(tmp_path, tally(tokens=70)))[1].proofs[0][0].tokens == 70


def test_a_file_of_another_peer_and_too_many_tallies_count_for_nothing(tmp_path: Path) -> None:
    path = kept(tmp_path, tally())
    put_in(path, *(tally(tokens=100 + number) for number in range(1, 2 * MOST_CREDITED)))
    assert read_credit(path)[1].proofs[0][0].tokens == 99 + MOST_CREDITED
    path.rename(path.with_name(path.name.replace(PEER.peer, OTHER.peer)))
    assert read_credit(kept(tmp_path, tally(peer=OTHER.peer), peer=OTHER.peer))[1].proofs[0][0].peer == OTHER.peer


async def test_it_is_written_at_the_end_or_not_at_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "credits", tmp_path / "file"):
        async with background((file := CreditFile(folder, SIGNED, PEER.peer)).keep()):
            await asyncio.sleep(0)
            file.add(tally())
    assert len([*(tmp_path / "credits").iterdir()]) == 1
    assert "is not saved" in caplog.text


def test_the_command_sums_files_and_draws_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPSTONE_HOME", str(tmp_path))
    kept(tmp_path / "credits", tally(tokens=1500), tally(GUEST, 40, invitation=INVITATION))
    kept(tmp_path / "credits", tally(peer=OTHER.peer), peer=OTHER.peer)
    shown = CliRunner().invoke(app, ["credits", "--badge", str(tmp_path / "badge.svg")]).output
    assert all(said in shown for said in ("1,540 tokens in 154 microbatches, by 2 data nodes", "1,640 tokens, 1 run"))
    assert "1,640 tokens" in (tmp_path / "badge.svg").read_text()
