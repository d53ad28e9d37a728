"""Files with the signed tallies of a peer's work, which anyone can check without the network."""

import asyncio
import json
import logging
from base64 import b64decode, b64encode
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node.context.whole_file import write_whole
from node.data.files import read_table
from node.observability.typed_json import from_json
from protocol.frames.codec import checked_peer
from protocol.frames.frames import decode_tallies, encode_tallies
from protocol.identity.signatures import is_vouched
from protocol.manifest.signing import SignedManifest, read_signed_manifest
from swarm.averaging.proven_work import MOST_CREDITED, Credit
from swarm.vocabulary.averaging_messages import WorkTally
from swarm.vocabulary.errors import ConfigError, SkipstoneError
from swarm.vocabulary.types import PeerId

SAVE_S: Final = 60.0  # Interval between writes
MOST_BYTES: Final = 8 * 2**20  # Of a file; MOST_CREDITED tallies of 256 replicas take 2 MiB

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Content:
    peer: str
    manifest: str  # With the author's signature; its hash is the RunId
    tallies: tuple[str, ...]  # Base64 of link.proto's WorkTallies, with one tally each


def credit_folder(identity_path: Path) -> Path:
    return identity_path.with_name("credits")


class CreditFile:
    """A peer's credit in one run, kept in a file."""

    def __init__(self, folder: Path, signed: SignedManifest, peer: PeerId) -> None:
        self._path, self._signed, self.credit = folder / f"{signed.run}-{peer}.json", signed, Credit(peer)
        self._is_saved = True
        with suppress(ConfigError):  # the first start; a damaged file is replaced
            found, credit, _ = read_credit(self._path)
            self.credit = credit if (found.run, credit.peer) == (signed.run, peer) else self.credit

    def add(self, tally: WorkTally) -> None:
        self._is_saved &= not self.credit.add(tally)

    async def keep(self) -> None:
        """Writes the file periodically until cancelled, and then once more."""
        try:
            while True:
                await asyncio.sleep(SAVE_S)
                await asyncio.to_thread(self.save)
        finally:
            self.save()

    def save(self) -> None:
        """Writes the file if the credit has risen."""
        if self._is_saved:
            return
        self._is_saved = True
        tallies = [b64encode(encode_tallies((tally,))).decode() for _, tally in self.credit.proofs]
        table = {"peer": self.credit.peer, "manifest": self._signed.text.decode(), "tallies": tallies}
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(self._path, json.dumps(table).encode())
        except OSError as error:
            log.warning("the credit in %s is not saved: %s", self._path, error.strerror or error)


def read_credit(path: Path) -> tuple[SignedManifest, Credit, tuple[str, ...]]:
    """Reads a file; returns its run, its credit, and why tallies in it do not count. Raises ConfigError."""
    hint = "Name a file of the folder `credits` beside a node's key."
    try:
        content = from_json(_Content, read_table(path, MOST_BYTES, hint), "credit")
        signed, credit = read_signed_manifest(content.manifest.encode(), None), Credit(checked_peer(content.peer))
        tallies = [decode_tallies(b64decode(each, validate=True)) for each in content.tallies[:MOST_CREDITED]]
    except (ValueError, SkipstoneError) as error:
        raise ConfigError(f"{path} is no file of credit: {error}", hint=hint) from None
    guests, faults = signed.guests(), list[str]()
    for number, tally in enumerate(each for several in tallies for each in several):
        if not is_vouched(tally, signed.run, guests):
            faults.append(f"tally {number} was changed, or is not signed by a data node of the run")
        elif not credit.add(tally):
            faults.append(f"tally {number} appears twice, or proves no work of {credit.peer} for others")
    return signed, credit, tuple(faults)
