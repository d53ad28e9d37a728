"""The run's tokenizer file: named by an option, kept from an earlier run, or downloaded from peers."""

import asyncio
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from node.context.options import NodeOptions
from node.context.whole_file import write_whole
from node.data.local_paths import LocalPaths, tokenizer_path
from node.data.tokenizers import tokenizer_bytes
from node.network.peer_files import fetch_tokenizer
from node.network.session import NetworkSession
from protocol.manifest.manifest import DataSection
from swarm.vocabulary.errors import ConfigError, Unreachable
from swarm.vocabulary.types import Reasoned

log = logging.getLogger(__name__)

FOLDER: Final = "tokenizers"


@dataclass(frozen=True, slots=True)
class RunTokenizer:
    text: Reasoned[LocalPaths | None]
    content: bytes | None = None


async def run_tokenizer(
    options: NodeOptions, session: NetworkSession, data: DataSection, text: Reasoned[LocalPaths | None], *, own: bool
) -> RunTokenizer:
    """Finds the tokenizer's file, or downloads it if this node may read the text."""
    sha256 = data.tokenizer_sha256
    if sha256 is None:
        return RunTokenizer(text)
    named = tokenizer_path(data, options.local_path_options.tokenizer, own=own)
    kept = kept_file(options.identity_path, sha256)
    for place in (named.value, kept):  # the named file first, then the one kept from an earlier run
        content = None if place is None else await asyncio.to_thread(_content, place, sha256)
        if content is not None:
            return RunTokenizer(_with(text, place), content)
    if named.value is not None:  # opening it later reports the error
        return RunTokenizer(_with(text, named.value))
    if text.value is None or not options.reads_text or (options.asked_stage or 0) > 0:
        return RunTokenizer(text)
    if options.link is None:
        return RunTokenizer(Reasoned(None, named.reason))
    try:
        content = await fetch_tokenizer(session, sha256, options.patience_s)
        await asyncio.to_thread(_keep, kept, content)
    except (Unreachable, OSError) as error:
        return RunTokenizer(Reasoned(None, f"{error}; set the tokenizer's file with --tokenizer"))
    return RunTokenizer(_with(text, kept), content)


def kept_file(identity: Path, sha256: str) -> Path:
    return identity.parent / FOLDER / f"{sha256}.json"


def _with(text: Reasoned[LocalPaths | None], tokenizer: Path | None) -> Reasoned[LocalPaths | None]:
    return text if text.value is None else replace(text, value=replace(text.value, tokenizer=tokenizer))


def _content(place: Path, sha256: str) -> bytes | None:
    try:
        return tokenizer_bytes(place, sha256)
    except ConfigError as error:
        log.info("%s", error)
        return None


def _keep(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, content)  # nodes that share the folder may write it at the same time
