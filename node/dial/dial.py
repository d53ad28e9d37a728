"""Chooses a run's model, training and stages from the number of parameters, each with a reason; forecasts the run.

The single dial follows karpathy/nanochat. Step size and learning rate are the fits of DeepSeek LLM (arXiv:2401.02954,
section 3.1) to the compute C = 6 x parameters x tokens: 0.2920 x C^0.3271 and 0.3118 x C^-0.1250. The default is 20
tokens per parameter (Hoffmann et al., arXiv:2203.15556). The forecast is estimated from the manifest and assumed cards.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

from node.model.memory_need import blocks_that_fit, need_of
from node.model.moments import DEFAULT_SLOTS, MomentType
from node.model.shapes import BYTES_PER_PARAMETER, parameter_bytes, parameter_shapes
from node.pipeline.admission import hidden_tensor
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.manifest.manifest import Manifest, manifest_from_table
from swarm.compression.round_codecs import result_codec
from swarm.membership.memory_fit import FreeMemory, Need, size_text
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import MAX_STAGES, Codec, ModuleId, Reasoned

FILLED: Final = 0.75  # Share of a card that a stage may fill; kept graphs and the driver need the rest
COMMON_CARD: Final = 12 * 10**9  # Bytes; an RTX 3060
SLOW_LINK_MBIT_S: Final = 20
MBIT: Final = 1e6 / 8  # Bytes


@dataclass(frozen=True, slots=True)
class Peers:
    """Assumed peers of a run: memory of each GPU in bytes, number of peers, and Mbit/s that each sends."""

    card: int | None = None
    number: int | None = None
    mbit_s: int = SLOW_LINK_MBIT_S

    @property
    def card_bytes(self) -> int:
        return COMMON_CARD if self.card is None else self.card


def spread(blocks: int, stages: int) -> tuple[int, ...]:
    """Returns the number of blocks of each stage: equal shares for at most `stages` stages, and 0 for stage 0."""
    others = max(1, min(stages - 1, blocks))
    return (0, *(blocks * (number + 1) // others - blocks * number // others for number in range(others)))


def choose_blocks(uncut: Manifest, peers: Peers) -> Reasoned[tuple[int, ...]]:
    """Chooses the blocks of several stages. Raises ConfigError if peers are too few or their memory is too small."""
    blocks = sum(uncut.stages.blocks)
    if peers.number is not None and peers.number < 2:
        raise ConfigError("a run needs at least two peers", hint="Set --peers to 2 or more, or use `skipstone solo`.")
    if peers.number is not None and peers.card is None:
        cut = spread(blocks, min(peers.number, MAX_STAGES))
        if len(cut) < peers.number:
            return Reasoned(cut, f"each stage needs a block, so {peers.number - len(cut)} of the peers are replicas")
        return Reasoned(cut, f"one for each of {peers.number} peers; the first has embedding and head")
    # Each further stage costs two more hidden states per token on a link, so take the fewest.
    card = peers.card_bytes
    most = _most_blocks(uncut, card)
    stages = 1 + -(-blocks // most)
    if stages > MAX_STAGES:
        raise ConfigError(f"this model needs {stages} stages; the most is {MAX_STAGES}", hint="Set a larger --card.")
    if peers.number is not None and peers.number < stages:
        raise ConfigError(
            f"a card of {_card(card)} holds {most} of {blocks} blocks, so this model needs {stages} peers, "
            f"not {peers.number}",
            hint="Set a larger --card, more --peers or a smaller --size.",
        )
    said = "of " if peers.card is not None else "of the default "
    reason = f"the fewest for cards {said}{_card(card)}: {FILLED:.0%} of one holds {_number(most, 'block')}"
    if peers.number is not None and peers.number > stages:
        reason += f"; {_number(peers.number - stages, 'peer')} more are replicas"
    return Reasoned(spread(blocks, stages), reason)


def _most_blocks(uncut: Manifest, card: int) -> int:
    free = _free(card)
    ends = need_of(uncut, (ModuleId(0),), DEFAULT_SLOTS)
    if free.lacks(ends) is not None:
        raise ConfigError(
            f"stage 0, with a vocabulary of {uncut.model.vocabulary:,}, needs {size_text(ends.device)}, more than "
            f"{FILLED:.0%} of a card of {_card(card)}",
            hint="Set a larger --card or a smaller --size, or choose a tokenizer with fewer tokens.",
        )
    most = blocks_that_fit(uncut, free, DEFAULT_SLOTS)
    if most == 0:
        raise ConfigError(
            f"one block of this model needs more than {FILLED:.0%} of a card of {_card(card)}",
            hint="Set a larger --card or a smaller --size.",
        )
    return most


def _free(card: int) -> FreeMemory:
    return FreeMemory(Reasoned(None, ""), Reasoned(int(FILLED * card), f"of a card of {_card(card)}"))


def _card(size_bytes: int) -> str:
    return f"{size_bytes / 10**9:g} GB"


def _number(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


# Parameters that `--size` accepts.
SMALLEST: Final = 10**6
LARGEST: Final = 20 * 10**9
ASPECT: Final = 64  # Width per block that nanochat uses
NEAR: Final = 0.04  # Shapes this close to the wanted size compete by their aspect
WIDE: Final = 2048  # From this width on, widths are multiples of 256 and heads have 128 elements
WIDEST: Final = 16_384
TIED_BELOW: Final = 4 * 10**9
GRID: Final = 64
TOKEN_RANK: Final = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model, in elements except for `blocks` and the heads."""

    vocabulary: int
    hidden: int
    blocks: int
    heads: int
    kv_heads: int
    feed_forward: int
    tied: bool
    residual: int = 0  # Numbers per token that blocks write; 0: all of `hidden`

    @property
    def rows(self) -> int:
        return TOKEN_RANK * (self.vocabulary + self.hidden) if self.residual else 0

    @property
    def ends(self) -> int:
        """Number of parameters of stage 0: embedding, head and last norm."""
        embedding = 0 if self.tied else self.vocabulary * (self.residual or self.hidden)
        return embedding + self.vocabulary * self.hidden + self.hidden + self.rows

    @property
    def block(self) -> int:
        kv_size = self.hidden // self.heads * self.kv_heads
        written = (self.residual or self.hidden) * (self.hidden + self.feed_forward)
        return self.hidden * (self.hidden + 2 * kv_size + 2 * self.feed_forward) + written + 2 * self.hidden + self.rows

    @property
    def parameters(self) -> int:
        return self.ends + self.blocks * self.block


Choices = dict[str, Reasoned[Any]]  # Chosen values by the names under which they are printed, in that order


def choose_shape(parameters: int, vocabulary: int, residual: int = 0) -> Shape:
    """Chooses width, depth and heads for a number of parameters and a vocabulary. Raises ConfigError."""
    if not SMALLEST <= parameters <= LARGEST:
        raise ConfigError(
            f"--size of {parameters:,} parameters is outside {SMALLEST:,} to {LARGEST:,}",
            hint="Write it as 10m, 160m, 1.5b or 7b.",
        )
    shapes = list(_shapes(parameters, vocabulary, residual))
    if not shapes:
        raise ConfigError(
            f"a model of {parameters:,} parameters cannot hold a vocabulary of {vocabulary:,} and two blocks",
            hint="Set a larger --size, or choose a tokenizer with fewer tokens.",
        )
    near = [shape for shape in shapes if abs(shape.parameters - parameters) <= NEAR * parameters]
    if near:
        return min(near, key=lambda each: abs(math.log(each.hidden / each.blocks / ASPECT)))
    return min(shapes, key=lambda each: abs(each.parameters - parameters))


def _shapes(parameters: int, vocabulary: int, residual: int) -> Iterator[Shape]:
    """Yields one shape per width, with the depth that comes closest to the wanted number of parameters."""
    tied = parameters < TIED_BELOW and not residual
    for hidden in (*range(128, WIDE, 128), *range(WIDE, WIDEST + 1, 256)):
        if hidden <= residual:  # blocks write fewer numbers than they read
            continue
        heads = hidden // (64 if hidden < WIDE else 128)
        kv_heads = heads // 4 if heads % 4 == 0 else heads // 2
        wide = round(8 / 3 * hidden / GRID) * GRID
        one = Shape(vocabulary, hidden, 1, heads, kv_heads, wide, tied, residual)
        blocks = round((parameters - one.ends) / one.block)
        if blocks < 2:  # wider models would be even shallower
            return
        yield replace(one, blocks=blocks)


def _shape_choices(shape: Shape, wish: "Wish") -> Choices:
    head = shape.hidden // shape.heads
    missed = 100 * (shape.parameters / wish.parameters - 1)
    tied = f"one matrix for both, usual below {TIED_BELOW // 10**9}b: stage 0 needs half the memory"
    apart = f"one matrix each, usual for {TIED_BELOW // 10**9}b and above"
    if shape.residual:
        apart = "the embedding is narrower than the LM head"
    return {
        "parameters": Reasoned(shape.parameters, f"{missed:+.1f} % of the {wish.parameters:,} of --size"),
        "vocabulary": Reasoned(shape.vocabulary, f"{wish.tokens.reason}; a multiple of {GRID}"),
        "width": Reasoned(
            shape.hidden,
            f"{shape.hidden / shape.blocks:.0f} per block, close to nanochat's {ASPECT}; "
            "a narrow, deep model sends smaller hidden states",
        ),
        "depth": Reasoned(shape.blocks, "the number of blocks of this width that --size allows"),
        "heads": Reasoned(
            f"{shape.heads} of {head}, {shape.kv_heads} for keys and values",
            f"{head} elements is usual for this width; {shape.heads // shape.kv_heads} heads share keys and values, "
            "as in Llama 3",
        ),
        "feed-forward": Reasoned(
            shape.feed_forward, "8/3 of the width, because SwiGLU has three matrices instead of two (Llama)"
        ),
        "embeddings": Reasoned("tied", tied) if shape.tied else Reasoned("apart", apart),
    }


TOKENS_A_PARAMETER: Final = 20
MICROBATCH_TOKENS: Final = 4096
SEQUENCES: Final = ((50 * 10**6, 512), (500 * 10**6, 1024))  # Below each number of parameters, the tokens of a row
LONGEST: Final = 2048
WARM_UP: Final = 0.02
LONGEST_WARM_UP_STEPS: Final = 2000
INNER_STEPS: Final = (10, 20, 50, 100, 200, 500)
LEAST_ROUNDS: Final = 10  # In a run
ROUND_SHARE: Final = 0.05  # Most traffic that rounds may add to a replica's own, or most of a link
SHORTEST_ROUND_S: Final = 900
FRAGMENTS: Final = 8
LARGE_STAGE: Final = 100 * 10**6  # Parameters from which a stage is averaged in fragments
ACTIVATIONS: Final = "int8"
PSEUDO_GRADIENTS: Final = "int2"
OUTER_MOMENTUM: Final = 0.5
OUTER: Final = Reasoned(0.8, "with momentum 0.5: ahead of 0.7 with 0.9, and of the mean, over 44 and 220 rounds")
INNER: Final = Reasoned("muon", "AdamW's loss in about half of its steps, with fewer bytes of state")


def choose_rows(parameters: int) -> Choices:
    """Chooses the tokens per row and the rows per microbatch for a model with this many parameters."""
    sequence = next((tokens for below, tokens in SEQUENCES if parameters < below), LONGEST)
    rows = MICROBATCH_TOKENS // sequence
    full = f"{rows * sequence:,} tokens per microbatch keep a GPU busy and still fit many at a time"
    return {
        "sequence": Reasoned(sequence, "longer rows for larger models, which use them better"),
        "rows": Reasoned(rows, full),
        "type": Reasoned("bfloat16", "half the bytes and twice the speed of float32 on a GPU; parameters stay float32"),
    }


def choose_recipe(parameters: int, cut: Manifest, wish: "Wish") -> Choices:
    """Chooses the training settings of a model with this many parameters and the stages of `cut`."""
    peers, chosen = wish.peers, choose_rows(parameters)
    microbatch = cut.microbatch_tokens
    wanted = f"{TOKENS_A_PARAMETER} per parameter; more compute is better spent on a larger model (Chinchilla)"
    total = TOKENS_A_PARAMETER * parameters if wish.total_tokens is None else wish.total_tokens
    compute = 6.0 * parameters * total
    best = 0.2920 * compute**0.3271
    stages = 1 if cut.stages.workers == "paths" else cut.stages.count  # Of a pipeline
    replicas = max(1, (peers.number or max(2, stages)) // stages)
    least = 4 * stages  # so that a pipeline is full for most of a step
    step = max(least, round(best / replicas / microbatch)) * microbatch
    shared = f", shared by {replicas} replicas" if replicas > 1 else ""
    said = f"{best:,.0f} are best for this compute (DeepSeek LLM){shared}; at least {least} whole microbatches"
    steps = max(1, total // (step * replicas))
    warm_steps = max(1, min(LONGEST_WARM_UP_STEPS, round(WARM_UP * steps)))
    warm = min(warm_steps * step * replicas, total // 2)
    warming = f"{WARM_UP:.0%} of the tokens, at most {LONGEST_WARM_UP_STEPS:,} steps; then a cosine down to a tenth"
    rate = float(f"{min(1e-2, 0.3118 * compute**-0.1250):.2g}")
    seen = forecast(cut, peers.card_bytes)
    beside = Reasoned(seen.token_bytes, "a replica's other traffic")
    if stages == 1:  # no other traffic
        carried = peers.mbit_s * MBIT / seen.computed_per_s
        beside = Reasoned(carried, f"what a {peers.mbit_s} Mbit/s link carries meanwhile")
    return chosen | {
        "tokens": Reasoned(total, wanted if wish.total_tokens is None else "set by --total-tokens"),
        "optimizer": INNER if wish.inner is None else Reasoned(wish.inner, "set by --inner"),
        "step": Reasoned(step, said),
        "rate": Reasoned(rate, "best for this compute (DeepSeek LLM)"),
        "warm-up": Reasoned(warm, warming),
        "inner steps": _inner_steps(seen.round_bytes, step, beside, steps),
        "outer rate": OUTER,
        "round after": _round_seconds(seen.round_bytes, peers.mbit_s),
        "fragments": Reasoned(1, "stages are small enough to average at once")
        if seen.parameters < LARGE_STAGE
        else Reasoned(FRAGMENTS, "a large stage is averaged in parts, so that rounds never fill the links"),
        "staleness": _staleness(stages, step // microbatch),
        "codecs": Reasoned(
            f"{ACTIVATIONS}, {PSEUDO_GRADIENTS} in rounds",
            "the strongest compression allowed; fast links send hidden states uncompressed",
        ),
    }


def _staleness(stages: int, microbatches: int) -> Reasoned[int]:
    if stages == 1:
        return Reasoned(0, "no pipeline")
    idle = 1 - pipeline_share(stages, microbatches)
    return Reasoned(0, f"each step fills the pipeline anew, for {idle:.0%}; 1 saves that, for 4 bytes a parameter")


def pipeline_share(stages: int, microbatches: int) -> float:
    """Returns a stage's busy share of a step in which a pipeline fills and empties."""
    return microbatches / (microbatches + stages - 1)


def _inner_steps(round_bytes: int, step: int, beside: Reasoned[float], run_steps: int) -> Reasoned[int]:
    """Chooses the fewest inner steps so that rounds send at most `ROUND_SHARE` of `beside` per token, if it can be."""
    shares = {steps: round_bytes / (steps * step * beside.value) for steps in INNER_STEPS}
    allowed = [steps for steps in INNER_STEPS if steps * LEAST_ROUNDS <= run_steps] or INNER_STEPS[:1]
    chosen = next((steps for steps in allowed if shares[steps] <= ROUND_SHARE), allowed[-1])
    reason = f"rounds send {shares[chosen]:.1%} of {beside.reason}; more frequent rounds learn better"
    return Reasoned(chosen, reason)


def _round_seconds(round_bytes: int, mbit_s: int) -> Reasoned[int]:
    """Chooses the longest time between averaging rounds, in seconds, even if fewer inner steps were taken."""
    seconds = max(SHORTEST_ROUND_S, -(-round(round_bytes / (mbit_s * MBIT * ROUND_SHARE)) // 100) * 100)
    said = f"at the latest; on a {mbit_s} Mbit/s link a round takes at most {ROUND_SHARE:.0%} of that time"
    return Reasoned(seconds, said)


BYTES: Reasoned[int] = Reasoned(257, "all bytes and an end mark, without --tokenizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Options from which a run is chosen."""

    parameters: int
    peers: Peers = field(default_factory=Peers)
    tokens: Reasoned[int] = BYTES
    total_tokens: int | None = None
    inner: str | None = None  # None lets the dial choose
    blocks: tuple[int, ...] | None = None  # Of each stage; None lets the dial choose
    residual: int | None = None  # Numbers per token that blocks write, 0 for all; None lets the dial choose
    may_be_whole: bool = True  # Whether one stage is a choice. Paths that skip stages or have experts need several
    workers: str = "modules"  # Or paths: a peer hosts a whole one


@dataclass(frozen=True, slots=True)
class DialedRun:
    """A chosen run: its manifest, and each choice with name, value and reason."""

    manifest: Manifest
    choices: tuple[tuple[str, Reasoned[Any]], ...]


RESIDUAL: Final = 64


def turn(wish: Wish, name: str) -> DialedRun:
    """Chooses all settings of a run. Raises ConfigError if no run is possible."""
    run, peers = _turned(wish, name), wish.peers
    if wish.residual is not None or wish.blocks is not None or run.manifest.stages.count == 1:
        return run
    seen = forecast(run.manifest, peers.card_bytes)
    if seen.tokens_per_s(peers.mbit_s) >= seen.computed_per_s:
        return run
    narrow = _turned(replace(wish, residual=RESIDUAL), name)
    paces = [_pace(each.manifest, peers) for each in (run, narrow)]
    if narrow.manifest.stages.count == 1 or paces[1] <= paces[0]:
        return run
    why = f"{peers.mbit_s} Mbit/s links decide: {paces[1]:,.0f} tokens/s, {paces[0]:,.0f} with all of the width"
    cost = "peers see the text, and transformers loads an export only with trust_remote_code"
    told = Reasoned(RESIDUAL, f"numbers that a hop carries per token, besides the token: {cost}. {why}")
    return replace(narrow, choices=(*narrow.choices, ("residual", told)))


def _pace(manifest: Manifest, peers: Peers) -> float:
    """Returns the expected tokens per second of all peers together."""
    stages, seen = manifest.stages.count, forecast(manifest, peers.card_bytes)
    replicas = (peers.number or max(2, stages)) // (1 if seen.is_whole else stages)
    return seen.tokens_per_s(peers.mbit_s) * replicas


def _turned(wish: Wish, name: str) -> DialedRun:
    sizes = choose_shape(wish.parameters, -(-wish.tokens.value // GRID) * GRID, wish.residual or 0)
    uncut = _manifest(name, sizes, wish)
    if wish.blocks is not None and sum(wish.blocks) != sizes.blocks:
        raise ConfigError(
            f"--size and --stages both set the size of the model: {sizes.blocks} blocks, and {sum(wish.blocks)}",
            hint=f"Leave one of them out, or cut {sizes.blocks} blocks (--stages {sizes.blocks}: one stage).",
        )
    # The blocks per stage depend on the memory of a block, so the first manifest is uncut.
    blocks, compared = choose_cut(uncut, sizes.parameters, wish)
    manifest, recipe = _trained(uncut, blocks.value, sizes.parameters, wish)
    least, most = min(blocks.value[1:] or blocks.value), max(blocks.value)
    told = Reasoned(f"{len(blocks.value)}, of {least if least == most else f'{least} to {most}'} blocks", blocks.reason)
    recipe["round after"] = replace(recipe["round after"], value=f"{recipe['round after'].value:,} s")
    return DialedRun(manifest, tuple((_shape_choices(sizes, wish) | compared | {"stages": told} | recipe).items()))


def choose_cut(uncut: Manifest, parameters: int, wish: Wish) -> tuple[Reasoned[tuple[int, ...]], Choices]:
    """Chooses between one stage and several, by speed; also returns the forecast of each."""
    need, peers = need_of(uncut, uncut.modules(), DEFAULT_SLOTS), wish.peers
    too_large = f"one needs {size_text(need.device)}, more than {FILLED:.0%} of a card of {_card(peers.card_bytes)}"
    fits = _free(peers.card_bytes).lacks(need) is None
    if wish.workers == "paths" and not fits:
        raise ConfigError(f"whole paths: {too_large}", hint="Set a larger --card, or leave --workers out.")
    if wish.blocks is not None:
        return Reasoned(wish.blocks, "set by --stages"), {}
    cut = choose_blocks(uncut, peers)
    if not wish.may_be_whole:
        return cut, {}
    if not fits:
        return cut, {"whole models": Reasoned("too large", too_large)}
    whole, stages = (sum(cut.value),), len(cut.value)
    runs = (_trained(uncut, blocks, parameters, wish)[0] for blocks in (whole, cut.value))
    number = peers.number or max(2, stages)
    alone, piped = (_pace(run, replace(peers, number=number)) for run in runs)
    where = f"{number} peers at {peers.mbit_s} Mbit/s"
    compared: Choices = {
        "whole models": Reasoned(f"{alone:,.0f} tokens/s", f"{where}: each trains the whole model, averaged in rounds"),
        "pipeline": Reasoned(f"{piped:,.0f} tokens/s", f"{where}: {stages} stages, {cut.reason}"),
    }
    ratio = alone / piped
    why, is_whole = f"whole models are {ratio:,.1f} times as fast as a pipeline", ratio > 1
    if 1 / NEAR_PACE <= ratio <= NEAR_PACE:
        is_whole = peers.mbit_s < FAST_LINK_MBIT_S
        favour = "slow links favour whole models" if is_whole else "on fast links all peers share each step"
        why = f"both are about as fast; {favour}"
    return Reasoned(whole if is_whole else cut.value, why), compared


def _manifest(name: str, sizes: Shape, wish: Wish) -> Manifest:
    """Builds a manifest with all blocks in stage 1, from which `choose_blocks` cuts the stages."""
    chosen = choose_rows(sizes.parameters)
    sequence, rows = chosen["sequence"].value, chosen["rows"].value
    return manifest_from_table(
        {
            "protocol": 2,
            "name": name,
            "model": {
                **{key: getattr(sizes, key) for key in ("vocabulary", "hidden", "heads", "kv_heads", "feed_forward")},
                "sequence": sequence,
                "tied_embeddings": sizes.tied,
                "residual": sizes.residual,
                "token_rank": TOKEN_RANK if sizes.residual else 0,
                "dtype": "bfloat16",
                "attention": "documents",
            },
            "stages": {"blocks": (0, sizes.blocks), "workers": wish.workers},
            "training": {"rows": rows, "inner_tokens": rows * sequence, "inner": {"name": wish.inner or INNER.value}},
            "codecs": {"activations": ACTIVATIONS, "gradients": ACTIVATIONS, "pseudo_gradients": PSEUDO_GRADIENTS},
        }
    )


def _trained(uncut: Manifest, blocks: tuple[int, ...], parameters: int, wish: Wish) -> tuple[Manifest, Choices]:
    """Cuts the model into stages of these blocks and chooses their training."""
    table = uncut.model_dump()
    table["stages"]["blocks"] = blocks
    recipe = choose_recipe(parameters, manifest_from_table(table), wish)
    chosen, training = {name: choice.value for name, choice in recipe.items()}, table["training"]
    training["schedule"] |= {"warmup_tokens": chosen["warm-up"], "total_tokens": chosen["tokens"]}
    training["inner"]["learning_rate"] = chosen["rate"]
    training |= {
        "inner_tokens": chosen["step"],
        "inner_steps": chosen["inner steps"],
        "outer": {"learning_rate": chosen["outer rate"], "momentum": OUTER_MOMENTUM},
        "round_seconds": float(chosen["round after"]),
        "fragments": chosen["fragments"],
        "staleness": chosen["staleness"],
    }
    return manifest_from_table(table), recipe


LINKS_MBIT_S: Final = (SLOW_LINK_MBIT_S, 100, 1000)
FAST_LINK_MBIT_S: Final = 100
NEAR_PACE: Final = 1.3  # Ratio up to which speeds count as equal: steps that peers share learn more per token
LARGE_CARD: Final = 24 * 10**9
ASSUMED_FLOPS: Final = (20e12, 55e12)  # bfloat16, below and from LARGE_CARD: 4/5 of the peak of an RTX 3060 and 3090
OPERATIONS: Final = 8  # Per parameter and token: two forward, four backward, two to recompute forward


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expected memory, traffic and speed of a run with one peer per stage."""

    data_node: Need
    stage: Need
    stage_8bit: Need
    parameters: int  # Of the largest stage
    token_bytes: float  # Sent by each peer, in hops or, if the run has one stage, in rounds
    round_bytes: int  # Most that a replica sends in a round: its pseudo-gradient, and the means that it computed
    computed_per_s: float  # Tokens, at the slowest stage
    total_tokens: int
    is_whole: bool  # Each peer hosts a whole path

    def tokens_per_s(self, mbit_s: int) -> float:
        """Returns the tokens per second if each peer can send `mbit_s` Mbit/s."""
        return min(self.computed_per_s, mbit_s * MBIT / self.token_bytes)


def forecast(manifest: Manifest, card: int) -> Forecast:
    """Forecasts memory, traffic and speed of a run on peers with `card` bytes of GPU memory each."""
    model, training, blocks = manifest.model, manifest.training, manifest.stages.blocks
    largest = max(range(len(blocks))[1:] or (0,), key=lambda stage: blocks[stage])
    path = tuple(map(ModuleId, range(len(blocks))))
    is_whole = len(path) == 1 or manifest.stages.workers == "paths"
    of_first, of_largest = (path, path) if is_whole else (path[:1], path[largest : largest + 1])
    data_node, stage = (need_of(manifest, of_each, DEFAULT_SLOTS) for of_each in (of_first, of_largest))
    stage_8bit = need_of(manifest, of_largest, DEFAULT_SLOTS, MomentType.EIGHT_BIT)
    first, parameters = (
        sum(parameter_bytes(parameter_shapes(manifest, each)) for each in of_each) // BYTES_PER_PARAMETER
        for of_each in (of_first, of_largest)
    )
    # Matrix products take the time, so the embedding counts only if it is the head as well.
    first -= 0 if model.tied_embeddings else model.vocabulary * model.stream
    computed = ASSUMED_FLOPS[card >= LARGE_CARD] / OPERATIONS / (first if is_whole else max(first, parameters))
    if training.staleness == 0 and not is_whole:
        computed *= pipeline_share(len(blocks), training.inner_tokens // manifest.microbatch_tokens)
    sent = Codec[manifest.codecs.pseudo_gradients.upper()]
    both_ways = (TensorSpec((parameters,), DType.FLOAT32, codec) for codec in (sent, result_codec(sent)))
    round_bytes = sum(pseudo.byte_length for pseudo in both_ways)
    # A peer sends a hidden state forward and a gradient back.
    state = hidden_tensor(manifest)
    there, back = (Codec[name.upper()] for name in (manifest.codecs.activations, manifest.codecs.gradients))
    hops = replace(state, codec=there).byte_length + replace(state, codec=back, token_bytes=0).byte_length
    in_rounds = round_bytes / (training.inner_steps * training.inner_tokens)
    token_bytes = in_rounds if is_whole else hops / manifest.microbatch_tokens
    total = training.schedule_tokens[1]
    return Forecast(data_node, stage, stage_8bit, parameters, token_bytes, round_bytes, computed, total, is_whole)
