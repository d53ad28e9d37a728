"""`skipstone generate` and `export`: text that continues a prompt, and the model as a Hugging Face folder."""

import asyncio
import os
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node.cli.options import PathChoice, Source, StagesPerPath
from node.cli.views.output import announce, download_bar, print_json, run_loop, tell
from node.cli.views.text import count, counted, harmless_lines, path_text
from node.context.options import TokenizerPath
from swarm.experts.routes import name_of_route

if TYPE_CHECKING:
    from node.data.tokenizers import Tokenizer


def generate(
    source: Annotated[str, Source],
    prompt: Annotated[str, typer.Argument(help="Text to continue; empty for a new document.")],
    tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="Most tokens to generate.")] = 200,
    temperature: Annotated[float, typer.Option(help="Randomness; 0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Choose among this many likeliest tokens [default: all]")] = None,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest tokens with this total probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed; the same seed gives the same text [default: random]")] = None,
    stages_per_path: Annotated[int | None, StagesPerPath] = None,
    path: Annotated[str | None, PathChoice] = None,
    again_every: Annotated[int | None, typer.Option(min=1, help="Choose experts again every N tokens")] = None,
    tokenizer: Annotated[Path | None, TokenizerPath] = None,
    device: Annotated[str, typer.Option(help="Compute device: cpu, cuda, cuda:N, mps or auto.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Continue a prompt. Standard output holds only the text, as it is generated.

    Generation ends with the document or after --tokens. The model sees the last `model.sequence` tokens; when they are
    full, it drops the older half. From a run with experts, only the modules of the text's path are fetched.
    """
    tell("skipstone generate: reading the model")
    from node.data.local_paths import LocalPathOptions
    from node.data.tokenizers import END_OF_TURN
    from node.export.open_model import open_model
    from node.export.source import model_on_path
    from node.model.decoder import Continuation, Sampling, prompt_tokens
    from node.model.device import choose_device
    from node.network.loss_report import AskedPaths

    sampling = Sampling(temperature, top_k, top_p, secrets.randbits(32) if seed is None else seed)
    where, local_paths = choose_device(device).value, LocalPathOptions(tokenizer=tokenizer)

    async def run() -> None:
        async with AsyncExitStack() as stack:
            on_progress = stack.enter_context(download_bar(silent=json))
            opened = await stack.enter_async_context(open_model(source, on_progress, local_paths, stages_per_path))
            (stages,) = opened.narrow(AskedPaths(stages_per_path))
            words = opened.tokenizer()  # may be missing, so look before the large downloads
            start = prompt_tokens(words, os.fsencode(prompt))
            model, route = await model_on_path(opened.source, where, path, start)
            decoder = (await model.decoder(route)).through(stages)
            window = again_every if model.router is not None else None
            if window is None:
                await stack.aclose()  # nothing more to fetch: leave the swarm
            if stages_per_path is not None:
                tell(path_text(decoder.stages))
            if route is not None:
                tell(f"path: {name_of_route(route)}")
            if len(start) > decoder.sequence:
                tell(f"the prompt has {count(len(start))} tokens; the model sees the last {count(decoder.sequence)}")
            text, routes = Continuation(decoder, words, start, tokens, sampling), [route]
            mark = END_OF_TURN if opened.source.signed.manifest.data.labels == "assistant" else ""
            output = _Output(words, mark, silent=json)
            while not text.has_ended:
                taken = text.take(window or tokens)
                while (token := await asyncio.to_thread(next, taken, None)) is not None:
                    if output.push(token):
                        text.stop()
                if window is not None and not text.has_ended:
                    again = model.route_of(text.tokens[-window:])
                    if again != routes[-1]:
                        text.go_on_with((await model.decoder(again)).through(stages))
                        routes.append(again)
        named = [name_of_route(each) for each in routes if each is not None]
        output.finish(len(start), sampling.seed, decoder.stages, named)

    run_loop(run())


class _Output:
    """Printer of the generated text: on standard output while it is generated, or as one JSON object at the end."""

    def __init__(self, tokenizer: "Tokenizer", mark: str, *, silent: bool) -> None:
        """`mark`: text that ends the generation, if it is not a token."""
        self._stream, self._ends, self._silent = tokenizer.text_stream(), tokenizer.ends, silent
        self._mark, self._held, self._has_ended = mark, "", False
        self._chosen: list[int] = []
        self._pieces: list[str] = []

    def push(self, token: int) -> bool:
        """Prints the token's text. Returns whether the text has ended."""
        self._chosen.append(token)
        text = self._held + (self._stream.push(token) if token not in self._ends else "")
        piece, mark, _ = text.partition(self._mark) if self._mark else (text, "", "")
        self._has_ended = bool(mark) or token in self._ends
        # Hold back text that may be the start of the mark.
        starts = (self._mark[:size] for size in range(len(self._mark) - 1, 0, -1))
        self._held = "" if self._has_ended else next(filter(piece.endswith, starts), "")
        piece = piece.removesuffix(self._held)
        self._pieces.append(piece)
        if piece and not self._silent:
            typer.echo(harmless_lines(piece), nl=False)
        return self._has_ended

    def finish(self, prompt_tokens: int, seed: int, stages: Sequence[int], routes: Sequence[str]) -> None:
        self._pieces.append(self._held + self._stream.finish())
        if not self._silent:
            typer.echo(harmless_lines(self._pieces[-1]))
            why = "end of the document" if self._has_ended else "the limit of --tokens"
            tell(f"{count(len(self._chosen))} tokens, {why}; seed {seed}")
            if len(routes) > 1:
                tell(f"paths: {', then '.join(routes)}")
            return
        print_json(
            {
                "text": "".join(self._pieces),
                "tokens": self._chosen,
                "prompt_tokens": prompt_tokens,
                "ended": "end_of_document" if self._has_ended else "tokens",
                "seed": seed,
                "stages": list(stages),
                **({"routes": list(routes)} if routes else {}),
            }
        )


def export(
    source: Annotated[str, Source],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; must be new or empty.")],
    tokenizer: Annotated[Path | None, TokenizerPath] = None,
    stages_per_path: Annotated[int | None, StagesPerPath] = None,
    path: Annotated[str | None, PathChoice] = None,
    every: Annotated[bool, typer.Option("--all", help="All experts, in Skipstone's own format.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an older export.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write the model as a Hugging Face folder.

    A running swarm gives each module as of its last round. A run with experts holds one model per path; --path chooses
    one.
    """
    if every and (path, stages_per_path) != (None, None):
        raise typer.BadParameter("cannot be combined with --path or --stages-per-path", param_hint="--all")
    announce("skipstone export: gathering the modules", as_json=json)
    from node.data.local_paths import LocalPathOptions
    from node.export.hugging_face import MODELING
    from node.export.open_model import open_model
    from node.export.source import parse_path
    from node.export.writer import Export, require_free
    from node.export.writer import export as write
    from node.network.loss_report import AskedPaths

    require_free(folder, replace=force)  # fail before a long download

    async def run() -> Export:
        with download_bar(silent=json) as on_progress:
            local_paths = LocalPathOptions(tokenizer=tokenizer)
            async with open_model(source, on_progress, local_paths, stages_per_path) as opened:
                opened.narrow(AskedPaths(stages_per_path))
                file, stages = opened.tokenizer_file(), opened.source.signed.manifest.stages.count
                route = None if path is None else parse_path(path, stages)
                return await write(opened.source, folder, tokenizer_file=file, route=route, every=every, replace=force)

    done = run_loop(run())
    if json:
        print_json({"path": str(done.path), "run": done.run, "files": done.files, "bytes": done.size_bytes})
    else:
        files = counted(done.files, "file")
        typer.echo(f"{done.path}: run {done.run[:12]}, {count(done.size_bytes)} bytes of parameters in {files}")
        if (done.path / f"{MODELING}.py").exists():
            typer.echo("  transformers loads it with trust_remote_code=True, since its blocks have rows of tokens")
