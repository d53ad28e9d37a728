"""`skipstone generate`: text that goes on where a prompt ends."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node.cli.options import StagesPerPath
from node.cli.views.downloads import download_bar
from node.cli.views.output import print_json, run_loop, tell
from node.cli.views.text import count, harmless_lines, path_text
from node.context.options import TokenizerPlace

if TYPE_CHECKING:
    from node.data.tokenizers import Tokenizer
    from node.model.decoder import Decoder
    from node.model.generation import Sampling


def generate(
    source: Annotated[
        str, typer.Argument(metavar="LINK|SOURCE", help="A swarm's join link, or a checkpoint's or an exported folder.")
    ],
    prompt: Annotated[str, typer.Argument(help="What the text begins with; empty for the beginning of a document.")],
    tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="Most tokens to generate.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Choose among so many of the likeliest [default: all]")] = None,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest that have this probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed, the same text [default: a new one]")] = None,
    stages_per_path: Annotated[int | None, StagesPerPath] = None,
    tokenizer: Annotated[Path | None, TokenizerPlace] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N, mps or auto.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="One JSON object, at the end.")] = False,
) -> None:
    """Continue a prompt. Standard output has the text alone, as it comes; it ends with its document or after --tokens.

    The model sees the last `model.sequence` tokens; when they are full, the older half is forgotten.
    """
    tell("skipstone generate: reading the model")
    from node.model.generation import Sampling

    sampling = Sampling(temperature, top_k, top_p, secrets.randbits(32) if seed is None else seed)
    decoder, cutter = run_loop(_read(source, tokenizer, device, stages_per_path, as_json=json))
    if stages_per_path is not None:
        tell(path_text(decoder.stages))
    text = os.fsencode(prompt)  # the bytes that were typed, whatever the locale makes of them
    begin = cutter.encode(text).tolist()
    if len(begin) > decoder.sequence:
        tell(f"the prompt has {count(len(begin))} tokens; the model sees the last {count(decoder.sequence)}")
    _write(decoder, cutter, begin, tokens, sampling, as_json=json)


async def _read(
    source: str, tokenizer_file: Path | None, device: str, stages_per_path: int | None, *, as_json: bool
) -> tuple[Decoder, Tokenizer]:
    from node.data.places import ToldPlaces
    from node.export.open_model import open_model
    from node.export.source import read_decoder
    from node.model.device import choose_device
    from node.network.loss_report import AskedPaths

    where = choose_device(device).value
    with download_bar(silent=as_json) as on_progress:
        async with open_model(source, on_progress, ToldPlaces(tokenizer=tokenizer_file)) as opened:
            (stages,) = AskedPaths(stages_per_path).of(opened.source.signed.manifest)
            tokenizer = opened.tokenizer()  # a small file that may not be there, before the large ones
            return (await read_decoder(opened.source, where)).through(stages), tokenizer


def _write(
    decoder: Decoder, tokenizer: Tokenizer, prompt: list[int], limit: int, sampling: Sampling, *, as_json: bool
) -> None:
    from node.model.generation import generate as continuation

    stream, chosen, pieces = tokenizer.text_stream(), list[int](), list[str]()
    for token in continuation(decoder, tokenizer, prompt, limit, sampling):
        chosen.append(token)
        piece = stream.push(token) if token != tokenizer.end_of_document else ""
        pieces.append(piece)
        if piece and not as_json:
            typer.echo(harmless_lines(piece), nl=False)
    pieces.append(stream.finish())
    ended = chosen[-1] == tokenizer.end_of_document
    if not as_json:
        typer.echo(harmless_lines(pieces[-1]))
        tell(
            f"{count(len(chosen))} tokens, "
            f"{'to the end of the document' if ended else 'as many as asked for'}; seed {sampling.seed}"
        )
        return
    print_json(
        {
            "text": "".join(pieces),
            "tokens": chosen,
            "prompt_tokens": len(prompt),
            "ended": "end_of_document" if ended else "tokens",
            "seed": sampling.seed,
            "stages": list(decoder.stages),
        }
    )
