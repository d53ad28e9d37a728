"""What a node writes."""

import ast
import base64
import json
from pathlib import Path

from protocol.frames.frames import Farewell, FarewellReason
from protocol.identity.keys import Identity
from swarm.vocabulary.pipeline_messages import Close, Direction, Receipt, ReceiptStatus, Stranded
from swarm.vocabulary.types import MicrobatchId
from tests.protocol.identity.minting import authority_key
from tests.security.siege import BESIEGED, Siege
from tests.security.watching import sitecustomize
from tests.test_project import PACKAGES, parsed, sources

pytestmark = BESIEGED

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b[1;31m"
FORGED = "2026-01-01 00:00:00,000 ERROR node: all is lost"
WORDS = f"{ESCAPES}\r\n{FORGED}\n\u202e"
BUILDS_CODE = {"eval", "exec", "compile", "__import__"}
LOADS_CODE = {("yaml", "load"), ("torch", "load"), ("jit", "load"), ("package", "PackageImporter")}


async def test_what_strangers_write_cannot_draw_on_a_terminal_or_forge_a_line(scene: Siege) -> None:
    targets = scene.targets
    microbatch = MicrobatchId(targets.data_node.peer, 1)
    for target in (targets.data_node, targets.victim):
        async with targets.attack(target) as (own, stream):
            await stream.say(Close(MicrobatchId(own, 1), WORDS))
            await stream.say(Stranded(microbatch, Direction.FORWARD, 0, WORDS))
            await stream.say(Receipt(microbatch, Direction.FORWARD, 0, ReceiptStatus.REFUSED, detail=WORDS))
            await stream.say(Farewell(FarewellReason.UNSPECIFIED, WORDS))
            while await stream.hear() is not None:
                pass
    await scene.goes_on()
    logs, events = scene.logs(), scene.events()
    assert "all is lost" in events, "the farewell was noted"
    for text in (logs, *(str(value) for value in strings_in(events))):
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert f"\n{FORGED}" not in text


def strings_in(lines: str) -> list[str]:
    """All strings of the events, as whoever reads the log gets them."""
    found: list[str] = []
    for line in lines.splitlines():
        found += [value for value in json.loads(line).values() if isinstance(value, str)]
    return found


async def test_no_secret_is_in_any_log_event_or_command_line(scene: Siege) -> None:
    written = scene.logs() + scene.events() + scene.command_lines()
    assert "DEBUG node.pipeline.runner" in written, "the log is as detailed as it gets"
    scalar = authority_key(scene.targets.link.run).private_numbers().private_value
    assert not spellings(scalar.to_bytes(32, "big")) & set(written.split())
    for peer in scene.swarm.peers:
        assert peer.peer in written, "its public name is no secret"
        for spelling in spellings(seed_of(peer.identity_path)):
            assert spelling not in written
    assert "PRIVATE KEY" not in written


def seed_of(path: Path) -> bytes:
    """The 32 bytes that are an Ed25519 key."""
    return Identity.load(path).libp2p_private_key()[4:36]


def spellings(secret: bytes) -> set[str]:
    """As somebody might have printed it; of base64 the part that does not depend on what stands around it."""
    inside = {base64.b64encode(bytes(before) + secret).decode()[4:40] for before in range(3)}
    return {secret.hex(), secret.hex(" "), repr(secret)[2:-1], str(int.from_bytes(secret, "big")), *inside}


async def test_no_process_of_a_swarm_makes_an_object_from_a_pickle(scene: Siege) -> None:
    """Nodes and their DHT processes, from their start on and whatever was sent to them."""
    await scene.goes_on()
    found = [line for line in scene.logs().splitlines() if line.startswith(sitecustomize.UNPICKLED)]
    assert found == []
    assert len(list((scene.folder / "stderr").iterdir())) >= 2 * len(scene.swarm.peers), "both kinds are watched"


async def test_nothing_that_is_read_becomes_code() -> None:
    """`tests/test_project.py` looks for pickles; here for what else runs what it reads."""
    for path in sources(*PACKAGES):
        for node in ast.walk(parsed(path)):
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in BUILDS_CODE, where
            if isinstance(node, ast.Attribute):
                owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
                assert (owner, node.attr) not in LOADS_CODE, where
            if isinstance(node, ast.keyword):
                assert node.arg not in ("trust_remote_code", "shell"), where
