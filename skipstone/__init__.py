"""Skipstone from Python: `solo`, `LocalSwarm`, `join`, `open_model`, `generate`, as the command line uses them.

    manifest = skipstone.demo()
    async with skipstone.LocalSwarm(manifest, skipstone.LocalSwarmOptions(peers=5, steps=20)) as swarm:
        async for event in swarm.events():
            print(event)
            if swarm.progress.is_over:
                swarm.request_stop()

The wheel keeps its packages (`node`, `protocol`, `swarm`) in the folder `_packages`, so that they cannot replace others
of the same names. Importing `skipstone` puts that folder first on `sys.path`.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

_HERE = Path(__file__).parent
_PACKAGES = _HERE / "_packages" if (_HERE / "_packages").is_dir() else _HERE.parent  # a checkout
if str(_PACKAGES) not in sys.path:
    sys.path.insert(0, str(_PACKAGES))

if TYPE_CHECKING:
    from node.export.open_model import open_model
    from node.local_swarm.local_swarm import LocalSwarm
    from node.local_swarm.setup import LocalSwarmOptions
    from node.observability.events import Event, Summary
    from protocol.manifest.manifest import Manifest

__all__ = ["LocalSwarm", "LocalSwarmOptions", "demo", "generate", "join", "load", "open_model", "solo"]

_PLACES = {
    "LocalSwarm": "node.local_swarm.local_swarm",
    "LocalSwarmOptions": "node.local_swarm.setup",
    "open_model": "node.export.open_model",
}


def __getattr__(name: str) -> Any:
    """Imports a part when it is first used, because torch takes a second."""
    if name not in _PLACES:
        raise AttributeError(f"module 'skipstone' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PLACES[name]), name)


def demo(seed: int = 0) -> "Manifest":
    """Returns the manifest of `skipstone up`: a small model in five stages."""
    from node.local_swarm.default_manifest import default_manifest

    return default_manifest(seed)


def load(path: str | Path) -> "Manifest":
    """Reads a manifest file. Raises ManifestError."""
    from protocol.manifest.signing import read_signed_manifest

    return read_signed_manifest(Path(path).read_bytes(), None).manifest


def solo(
    manifest: "Manifest", steps: int, device: str = "auto", on_event: "Callable[[Event], None]" = lambda event: None
) -> "Summary":
    """Trains in this process, without a network. Raises ConfigError."""
    from node.model.device import choose_devices
    from node.solo.trainer import train_solo

    return train_solo(manifest, steps=steps, device=choose_devices(device).value[0], on_event=on_event)


async def generate(
    source: str | Path, prompt: str, tokens: int = 200, temperature: float = 0.8, seed: int = 0, device: str = "auto"
) -> str:
    """Returns the prompt as the model of a link, a checkpoint or an export continues it. Raises SkipstoneError."""
    from node.export.open_model import open_model
    from node.export.source import model_on_path
    from node.model.decoder import Continuation, Sampling, prompt_tokens
    from node.model.device import choose_device

    async with open_model(str(source)) as opened:
        words = opened.tokenizer()
        start = prompt_tokens(words, prompt.encode())
        model, route = await model_on_path(opened.source, choose_device(device).value, None, start)
        decoder = await model.decoder(route)
    text = Continuation(decoder, words, start, tokens, Sampling(temperature, seed=seed))
    chosen, stream = await asyncio.to_thread(list, text.take(tokens)), words.text_stream()
    return prompt + "".join(stream.push(each) for each in chosen if each not in words.ends) + stream.finish()


@asynccontextmanager
async def join(target: str | Path, **options: Any) -> "AsyncIterator[AsyncIterator[Event]]":
    """Runs a node within the block, and yields its events. `options`: those of `skipstone join`, with underscores.

    `target` is a join link, or the path of a manifest that starts a run. Leaves cleanly at the end of the block.
    """
    from node.context.options import NodeOptions
    from node.observability.events import Event
    from node.runtime.node import run_node
    from protocol.manifest.join_link import link_in

    link = link_in(str(target))
    stop, waiting = asyncio.Event(), asyncio.Queue[Event | None](maxsize=4096)

    class Sink:
        def emit(self, event: Event) -> None:
            if waiting.full():  # a reader that is too slow misses the oldest
                waiting.get_nowait()
            waiting.put_nowait(event)

    async def events() -> AsyncIterator[Event]:
        while (event := await waiting.get()) is not None:
            yield event

    async def run() -> None:
        try:
            await run_node(
                NodeOptions(link=link, manifest_path=None if link else Path(target), **options), Sink(), stop
            )
        finally:
            if waiting.full():
                waiting.get_nowait()
            waiting.put_nowait(None)

    node = asyncio.create_task(run())
    try:
        yield events()
    finally:
        stop.set()
        await node


def main() -> None:
    """The `skipstone` command."""
    import node.__main__  # noqa: F401 - adds `doctor` and the commands of `lab`
    from node.cli.app import main as run

    run()
