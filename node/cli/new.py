"""`skipstone new` and `invite`: a run's signed manifest, and links with which others may host its stage 0."""

from __future__ import annotations

import dataclasses
import re
import shlex
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from node.cli.manifests import ManifestChanges, changed_manifest, chosen_manifest, router_of, starting_from
from node.cli.options import with_options
from node.cli.views.text import count, counted, harmless
from node.context.options import MOST_HOSTED, default_identity_path, parse_size
from node.context.whole_file import write_whole
from swarm.vocabulary.errors import ConfigError, ManifestError
from swarm.vocabulary.types import Reasoned

if TYPE_CHECKING:
    from node.data.feed import Sample
    from node.dial.dial import DialedRun, Peers
    from protocol.manifest.manifest import Manifest, TrainingSection


_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
_NAME_WIDTH: Final = len("feed-forward")
_LINE_WIDTH: Final = 80  # Columns of a plain terminal
_MOST_HOURS: Final = 48  # Above this many hours a duration is shown in days
_MOST_EPOCHS: Final = 100  # Above this many epochs a text is called too small


@dataclass(frozen=True, slots=True, kw_only=True)
class DialOptions:
    """Options of `skipstone new` that choose a run by its size."""

    size: Annotated[str | None, typer.Option(help="Parameters, as 160m or 7b: choose the whole run for it.")] = None
    card: Annotated[str | None, typer.Option(help="With --size: memory of each peer's GPU [default: 12GB]")] = None
    peers: Annotated[int | None, typer.Option(help="With --size: number of peers [default: as few as fit]")] = None
    mbit: Annotated[int | None, typer.Option(min=1, max=10**6, help="With --size: Mbit/s a peer [default: 20]")] = None
    tokenizer: Annotated[Path | None, typer.Option(help="With --size: a tokenizer.json [default: bytes]")] = None

    def __post_init__(self) -> None:
        if self.size is None:
            for option in ("card", "peers", "mbit", "tokenizer"):
                if getattr(self, option) is not None:
                    raise ConfigError(f"--{option} goes with --size", hint="Add the model's size: --size 160m.")


def dialed_run(dial: DialOptions, changes: ManifestChanges, name: str) -> DialedRun:
    """Chooses all settings of a run by the model's size. Raises ConfigError, ManifestError."""
    from node.dial.dial import BYTES, DialedRun, Wish, turn

    if changes.total_tokens is not None and changes.total_tokens < 1:
        raise ConfigError(f"--total-tokens must be at least 1, not {changes.total_tokens}")
    tokens, data = BYTES, None
    if dial.tokenizer is not None:
        from node.data.tokenizers import chosen_tokenizer

        tokenizer, data = chosen_tokenizer(dial.tokenizer)
        tokens = Reasoned(tokenizer.size, f"the {tokenizer.size:,} tokens of {dial.tokenizer.name}")
    wish = Wish(
        parameters=parse_parameters(dial.size or ""),
        peers=_peers(dial),
        tokens=tokens,
        total_tokens=changes.total_tokens,
        inner=changes.inner,
        blocks=changes.keys().get("stages.blocks"),
        residual=changes.residual,
        may_be_whole=changes.stages_per_path is None and changes.experts is None and changes.workers is None,
        workers=changes.workers or "modules",
    )
    dialed = turn(wish, name)
    if data is None:
        return dialed  # the dial knows only the size of the vocabulary; name the file itself now
    from protocol.manifest.manifest import manifest_from_table

    table = dialed.manifest.model_dump()
    return DialedRun(manifest_from_table(table | {"data": table["data"] | data}), dialed.choices)


def choice_lines(dial: DialOptions, dialed: DialedRun, manifest: Manifest) -> Iterator[str]:
    """Yields lines for the terminal: each choice with its reason, and the forecast for the manifest."""
    from node.dial.dial import LARGE_CARD, LINKS_MBIT_S, forecast
    from node.model.memory_need import need_of
    from node.model.moments import DEFAULT_SLOTS
    from swarm.membership.memory_fit import size_text

    for name, choice in dialed.choices:
        value = count(choice.value) if isinstance(choice.value, int) else str(choice.value)
        line = f"  {name:<{_NAME_WIDTH}}  {value} ({choice.reason})"
        yield textwrap.fill(line, _LINE_WIDTH, subsequent_indent=" " * (_NAME_WIDTH + 4), break_on_hyphens=False)
    peers, stages = _peers(dial), manifest.stages.count
    seen = forecast(manifest, peers.card_bytes)
    kind = "an RTX 3090" if peers.card_bytes >= LARGE_CARD else "an RTX 3060"
    yield f"Expected with one peer{'' if seen.is_whole else ' per stage'} (estimated, not measured):"
    for who, need in (("data node", seen.data_node), ("stage peer", seen.stage))[: 2 - seen.is_whole]:
        card_and_machine = f"{size_text(need.device)} of GPU memory, {size_text(need.memory)} of main memory"
        yield f"  {who:<{_NAME_WIDTH}}  {card_and_machine}"
    if seen.stage_8bit.device < seen.stage.device:
        yield f"  {'':<{_NAME_WIDTH}}  {size_text(seen.stage_8bit.device)} of GPU memory with `join --moments 8bit`"
    yield f"  {'a token':<{_NAME_WIDTH}}  each peer sends {count(seen.token_bytes)} bytes and receives as many"
    yield f"  {'a round':<{_NAME_WIDTH}}  a replica sends at most {size_text(seen.round_bytes)} and receives as much"
    yield f"  {'computing':<{_NAME_WIDTH}}  {count(seen.computed_per_s)} tokens/s at the slowest stage on {kind}"
    for mbit in sorted({*LINKS_MBIT_S, peers.mbit_s}):
        pace = seen.tokens_per_s(mbit)
        lasts = _time(seen.total_tokens / pace)
        yield f"  {f'{mbit} Mbit/s':<{_NAME_WIDTH}}  {count(pace)} tokens/s: {lasts} for the whole run"
    yield f"  Another peer{'' if seen.is_whole else ' for every stage'} adds the same throughput."
    if stages <= MOST_HOSTED and not seen.is_whole and not manifest.stages.has_experts:
        room = f"{size_text(need_of(manifest, manifest.modules(), DEFAULT_SLOTS).device)} of GPU memory"
        yield f"  A data node with {room} may host all (`join --stages 0-{stages - 1}`): only rounds cross links."


def _time(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:.1f} hours" if hours < _MOST_HOURS else f"{count(hours / 24)} days"


def parse_parameters(text: str) -> int:
    """Parses a number of parameters such as `10m`, `160m`, `1.5b` or `7B`. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb]?)", text.strip().lower())
    if match is None:
        raise ConfigError(f"--size {text!r} is not a number of parameters", hint="Write it as 10m, 160m, 1.5b or 7b.")
    return round(float(match[1]) * _UNITS[match[2]])


def _peers(dial: DialOptions) -> Peers:
    from node.dial.dial import SLOW_LINK_MBIT_S, Peers

    return Peers(None if dial.card is None else parse_size(dial.card), dial.peers, dial.mbit or SLOW_LINK_MBIT_S)


@with_options(DialOptions, ManifestChanges)
def new(
    file: Annotated[Path, typer.Argument(help="Manifest file to write.")],
    base: Annotated[Path | None, typer.Option("--from", help="TOML file to start from [default: the demo]")] = None,
    model: Annotated[Path | None, typer.Option("--from-model", help="Folder of a Llama, Mistral, Qwen model.")] = None,
    route_from: Annotated[str | None, typer.Option(help="Text to fit the router to [default: random routes]")] = None,
    identity: Annotated[Path | None, typer.Option(help="Key file that signs [default: this machine's key]")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    **settings: Any,
) -> None:
    """Write and sign a manifest, the file that defines a run.

    An option that is not given keeps the value of --from, of --size, or of the small demo.
    """
    if file.exists() and not force:
        raise ConfigError(f"{file} exists already", hint="Choose another name, or replace it with --force.")
    dial = DialOptions(**{name: settings.pop(name) for name in DialOptions.__slots__})
    changes = ManifestChanges(**settings)
    if changes.name is None and base is None:  # a run is named after its file unless something says otherwise
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).lstrip("._-")[:64] or None
        changes = dataclasses.replace(changes, name=name)
    dialed = None
    if dial.size is None:
        manifest = chosen_manifest(base, changes)
    else:
        for option, value in {"--from": base, "--from-model": model}.items():
            if value is not None:
                raise ConfigError(f"--size and {option} both set the size of the model", hint="Give one of them.")
        dialed = dialed_run(dial, changes, changes.name or "run")
        # The dial has already placed `total_tokens` in the schedule.
        manifest = changed_manifest(dialed.manifest, dataclasses.replace(changes, total_tokens=None))
    if model is not None:
        keeps_blocks = changes.blocks is not None
        manifest = starting_from(model, manifest, changes.inner, is_default=base is None, keeps_blocks=keeps_blocks)
    elif manifest.start is not None and changes.blocks is not None:
        raise ConfigError("--stages cuts the model again: that needs its weights", hint="Add its folder: --from-model.")
    router = None if base is None or manifest.routing is None else router_of(base, manifest)
    if route_from is not None:
        from node.data.feed import with_router

        manifest, router = with_router(manifest, route_from)

    from node.context.options import default_identity_path
    from node.data.feed import sample_text
    from node.experts.router import router_file
    from protocol.identity.keys import Identity
    from protocol.manifest.signing import sign_manifest

    sample = sample_text(manifest)
    signed = sign_manifest(manifest, Identity.load_or_create(identity or default_identity_path()))
    try:
        write_whole(file, signed.text)
        if router is not None:
            write_whole(router_file(file), router.to_bytes())
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}") from error
    files = manifest.data.files
    text = "" if files is None else f", {counted(files.count, 'file')}, {counted(files.bytes, 'byte')}"
    typer.echo(f"{file}: run {signed.run}")
    typer.echo(f"  {manifest.name}, {counted(manifest.stages.count, 'stage')}, signed by {signed.author}")
    typer.echo(f"  text: {manifest.data.source}{text}")
    for line in sample_lines(sample, manifest.training):
        typer.echo(f"  {line}")
    if manifest.model.residual:
        typer.echo("  residual: hops carry the text's token numbers, so every peer with a stage can read the text")
    if manifest.data.open:
        typer.echo("  open: anybody with the link can hand out work, and so decide what the model learns")
    if manifest.stages.has_experts:
        by = "at random" if router is None else f"by {router_file(file)}; keep it next to the manifest"
        typer.echo(f"  {len(manifest.modules())} modules; documents are routed to experts {by}")
    are_paths = manifest.stages.workers == "paths"
    needs = [f"  memory: {_path_need(manifest) if are_paths else _largest_need(manifest)}"]
    for line in needs if dialed is None else choice_lines(dial, dialed, manifest):
        typer.echo(line)
    modules = len(manifest.modules())
    each = "module" if manifest.stages.has_experts else "stage"
    served = f"once its {modules} {each}s are served, by as many nodes or fewer"
    typer.echo(f"It trains {'as soon as a node has joined' if modules == 1 or are_paths else served}.")
    if modules == 1:
        typer.echo("Each node trains the whole model on text of its own and averages it with the others in rounds.")
        if not manifest.data.open:
            typer.echo("Other people's nodes need an invitation (`skipstone invite`), or a run made with --open-data.")
    command = ["skipstone", "join", str(file), *(() if model is None else ("--model", str(model)))]
    typer.echo(f"Start the first node with: {shlex.join(command)}")


def sample_lines(sample: Sample, training: TrainingSection) -> Iterator[str]:
    """Yields lines for the terminal about the text that a new run has, and whether it is enough."""
    if not sample.tokens:
        return
    epochs = training.schedule_tokens[1] / sample.all_tokens
    sampled = f"{count(sample.documents)} documents with {count(sample.tokens)} tokens read"
    yield f"{sampled}; in all about {count(sample.all_tokens)} tokens: {epochs:,.1f} epochs"
    yield f"begins: {harmless(sample.text, _LINE_WIDTH)}"
    if epochs > _MOST_EPOCHS:
        yield f"The run repeats this small text {count(epochs)} times. Name more text with --data"
    if rows := sample.left_out.total():
        why = ", ".join(f"{number} because {reason}" for reason, number in sample.left_out.most_common(3))
        yield f"left out: {rows / (rows + sample.documents):.1%} of the documents read ({harmless(why)})"
    if files := sample.files_left_out:
        some = ", ".join(f"{name} ({why})" for name, why in islice(files.items(), 3))
        yield f"left out: {count(len(files))} files that are not such text: {harmless(some)}"


def _path_need(manifest: Manifest) -> str:
    from node.dial.dial import COMMON_CARD, forecast
    from swarm.membership.memory_fit import size_text

    seen = forecast(manifest, COMMON_CARD)
    sent = f"{size_text(seen.round_bytes)} a round at most, {count(seen.token_bytes)} bytes a token"
    return f"a node with a whole path needs {size_text(seen.data_node.all)}, and sends only rounds: {sent}"


def _largest_need(manifest: Manifest) -> str:
    from node.model.memory_need import needs_of
    from node.model.moments import DEFAULT_SLOTS
    from swarm.membership.memory_fit import size_text
    from swarm.vocabulary.types import ModuleId

    needs = needs_of(manifest, DEFAULT_SLOTS)
    first = needs[ModuleId(0)]
    said = f"{size_text(first.device)} on the compute device and {size_text(first.memory)} of main memory"
    others = [need for module, need in needs.items() if module.stage]
    if not others:
        return said
    most = max(others, key=lambda need: need.all)
    return f"stage 0 needs {said}; other stages at most {size_text(most.device)} and {size_text(most.memory)}"


def invite(
    manifest: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Manifest of the run.")],
    link: Annotated[str | None, typer.Option(help="Link or its file [default: print the invitation alone]")] = None,
    data: Annotated[bool, typer.Option("--data", help="Invite a data node: the only kind.", show_default=False)] = True,
    uses: Annotated[int, typer.Option(min=0, max=65_535, help="Peers that may use it (0: any number).")] = 1,
    expires: Annotated[str, typer.Option(help="Time until its data nodes must stop: 30m, 12h or 7d.")] = "7d",
    identity: Annotated[Path | None, typer.Option(help="Key of an inviter [default: this machine's]")] = None,
) -> None:
    """Print a link that lets others host stage 0, read the run's text and hand out work. Treat it as a secret."""
    from protocol.identity.invitations import Grant
    from protocol.identity.keys import Identity
    from protocol.manifest.join_link import read_link
    from protocol.manifest.signing import read_signed_manifest

    duration = re.fullmatch(r"([1-9][0-9]{0,5})([mhd])", expires)
    if duration is None:
        raise ConfigError(f"--expires {expires!r} is not a duration", hint="Write it as 30m, 12h or 7d.")
    until = int(time.time()) + int(duration[1]) * {"m": 60, "h": 3600, "d": 86_400}[duration[2]]
    where = None if link is None else read_link(link)
    signed = read_signed_manifest(manifest.read_bytes(), None)
    if where is not None and not signed.run.endswith(where.second_half):
        raise ManifestError(
            f"the manifest defines run {signed.run}, not the link's", hint="Name the manifest file of the link's run."
        )
    issuer = Identity.load(identity or default_identity_path())
    if issuer.peer not in signed.guests().hosts:
        raise ConfigError(
            f"{issuer.peer} is neither the author of this run nor one of its inviters (data.inviters)",
            hint="Name the author's key file with --identity, or ask the author for an invitation.",
        )
    grant = Grant.issue(issuer, signed.run, uses, until)
    typer.echo(grant if where is None else dataclasses.replace(where, invitation=grant))
