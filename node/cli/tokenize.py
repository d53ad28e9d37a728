"""`skipstone tokenize`: writes a text as token shards, once for all data nodes and epochs."""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from node.cli.views.text import count
from swarm.vocabulary.errors import ConfigError

if TYPE_CHECKING:
    from node.data.documents import RowStream
    from node.data.sources import Source
    from node.data.tokenizers import Tokenizer, Tokens

log = logging.getLogger(__name__)

SHARD_TOKENS: Final = 2**27  # Half a gigabyte at 4 bytes per token


def tokenize(
    folder: Annotated[Path, typer.Argument(help="Folder to write; must be new or empty.")],
    data: Annotated[str, typer.Option(help="Text: path:FILE-OR-FOLDER or huggingface:NAME[:...], as in `new`.")],
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json [default: raw bytes are the tokens]")] = None,
    revision: Annotated[
        str | None, typer.Option(help="Commit of a Hugging Face data set [default: the newest]")
    ] = None,
    shard_tokens: Annotated[int, typer.Option(min=1, help="Approximate tokens per shard.")] = SHARD_TOKENS,
) -> None:
    """Write a text as Megatron-LM token shards for --data tokens:DIR."""
    from node.data.hub import source_keys
    from node.data.local_paths import as_written
    from node.data.sources import ShardWriter, open_source
    from node.data.tokenizers import ByteTokenizer, chosen_tokenizer
    from protocol.manifest.manifest import data_section

    cutter: Tokenizer
    cutter, keys = (ByteTokenizer(), dict[str, Any]()) if tokenizer is None else chosen_tokenizer(tokenizer)
    section = data_section(source_keys(data, revision) | keys)
    source = open_source(section, as_written(section).text, is_new=True)
    writer = ShardWriter(folder, cutter.size, shard_tokens)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty", hint="Choose another folder.")
        writer.write(_documents(source, cutter))
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror or error}") from error
    made = f"{count(writer.documents)} documents, {count(writer.tokens)} tokens, {count(writer.shards)} shards"
    typer.echo(f"{folder}: {made}")
    typer.echo(f"Train on them with --data tokens:{folder} and the same tokenizer in the manifest")


def _documents(source: "Source | RowStream", tokenizer: "Tokenizer") -> "Iterator[Tokens]":
    """Yields the tokens of each document with its end mark, as Megatron-LM's `--append-eod`."""
    from node.data.documents import whole_text
    from node.data.sources import Source

    reads: Iterator[tuple[str, Callable[[], bytes]]]
    if isinstance(source, Source):
        reads = ((name, partial(source.read, name)) for name in source.names)
    else:
        reads = ((f"{file}@{row}", read) for file in source.files for row, read in enumerate(source.rows(file, 0)))
    for name, read in reads:
        try:
            tokens = whole_text(read(), tokenizer).tokens
        except OSError as error:
            log.warning("document %s is skipped: %s", name, error.strerror)
            continue
        if tokens.size:  # an empty document would become a lone end mark
            yield tokens
