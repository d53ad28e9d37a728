"""The whole of a run from one size: a manifest's table, and the reason for each choice in it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from node.dial.cut import Peers, choose_blocks
from node.dial.recipe import ACTIVATIONS, PSEUDO_GRADIENTS, Recipe, choose_recipe, choose_rows
from node.dial.shape import GRID, Shape, ShapeChoices, choose_shape
from protocol.manifest.manifest import Manifest, manifest_from_table
from swarm.vocabulary.types import Reasoned

BYTES: Reasoned[int] = Reasoned(257, "the bytes themselves and one end: no --tokenizer was named")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a person asks for."""

    parameters: int
    peers: Peers = field(default_factory=Peers)
    tokens: Reasoned[int] = BYTES
    """Of the tokenizer."""
    total_tokens: int | None = None
    inner: str = "adamw"
    """The inner optimizer: what it keeps of each parameter decides what fits."""


@dataclass(frozen=True, slots=True)
class Turned:
    """A manifest for a wish, and its choices in the order in which they are told: name, value, reason."""

    manifest: Manifest
    choices: tuple[tuple[str, Reasoned[Any]], ...]


def turn(wish: Wish, name: str) -> Turned:
    """Makes all choices for a wish. Raises ConfigError: no run can be made of it; says what would help."""
    vocabulary = -(-wish.tokens.value // GRID) * GRID
    shape = choose_shape(wish.parameters, vocabulary)
    sizes = shape.shape
    sequence, rows = (each.value for each in choose_rows(sizes.parameters))
    uncut = _manifest(name, sizes, wish, {"sequence": sequence}, {"rows": rows, "inner_tokens": rows * sequence})
    blocks = choose_blocks(uncut, wish.peers)
    stages = len(blocks.value)
    replicas = max(1, (wish.peers.number or stages) // stages)
    largest = max(blocks.value) * sizes.block
    recipe = choose_recipe(sizes.parameters, largest, sizes.hidden, stages, replicas, wish.total_tokens)
    return Turned(_cut(uncut, blocks.value, recipe), _told(shape, wish, vocabulary, blocks, recipe))


def _manifest(name: str, sizes: Shape, wish: Wish, rows: dict[str, Any], training: dict[str, Any]) -> Manifest:
    """With all blocks in stage 1."""
    return manifest_from_table(
        {
            "protocol": 2,
            "name": name,
            "model": {
                "vocabulary": sizes.vocabulary,
                "hidden": sizes.hidden,
                "heads": sizes.heads,
                "kv_heads": sizes.kv_heads,
                "feed_forward": sizes.feed_forward,
                "tied_embeddings": sizes.tied,
                "dtype": "bfloat16",
                "attention": "documents",
                **rows,
            },
            "stages": {"blocks": (0, sizes.blocks)},
            "training": {**training, "staleness": 1, "inner": {"name": wish.inner}},
            "codecs": {
                "activations": ACTIVATIONS.name.lower(),
                "gradients": ACTIVATIONS.name.lower(),
                "pseudo_gradients": PSEUDO_GRADIENTS.name.lower(),
            },
        }
    )


def _cut(uncut: Manifest, blocks: tuple[int, ...], recipe: Recipe) -> Manifest:
    table = uncut.model_dump()
    table["stages"]["blocks"] = blocks
    table["training"] |= {
        "inner_tokens": recipe.step_tokens.value,
        "inner_steps": recipe.inner_steps.value,
        "round_seconds": float(recipe.round_seconds.value),
        "fragments": recipe.fragments.value,
        "inner": table["training"]["inner"] | {"learning_rate": recipe.learning_rate.value},
        "schedule": table["training"]["schedule"]
        | {"warmup_tokens": recipe.warmup_tokens.value, "total_tokens": recipe.total_tokens.value},
    }
    return manifest_from_table(table)


def _told(
    shape: ShapeChoices, wish: Wish, vocabulary: int, blocks: Reasoned[tuple[int, ...]], recipe: Recipe
) -> tuple[tuple[str, Reasoned[Any]], ...]:
    tokens = replace(wish.tokens, value=vocabulary, reason=f"{wish.tokens.reason}; a multiple of {GRID}")
    numbers = blocks.value[1:]
    each = f"{min(numbers)}" if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"
    stages = f"{len(blocks.value)}, of {each} blocks"
    return (
        ("parameters", shape.parameters),
        ("vocabulary", tokens),
        ("width", shape.width),
        ("depth", shape.depth),
        ("heads", shape.heads),
        ("feed-forward", shape.feed_forward),
        ("embeddings", shape.embeddings),
        ("stages", Reasoned(stages, blocks.reason)),
        ("sequence", recipe.sequence),
        ("rows", recipe.rows),
        (
            "type",
            Reasoned("bfloat16", "half the bytes and twice the speed of float32 on a GPU; parameters stay float32"),
        ),
        ("tokens", recipe.total_tokens),
        ("step", recipe.step_tokens),
        ("rate", recipe.learning_rate),
        ("warm-up", recipe.warmup_tokens),
        ("inner steps", recipe.inner_steps),
        ("round after", Reasoned(f"{recipe.round_seconds.value:,} s", recipe.round_seconds.reason)),
        ("fragments", recipe.fragments),
        ("staleness", Reasoned(1, "the pipeline stays full from one step to the next")),
        (
            "codecs",
            Reasoned(
                f"{ACTIVATIONS.name.lower()}, {PSEUDO_GRADIENTS.name.lower()} in rounds",
                "the most that a link may compress; on fast ones hidden states are sent as they are",
            ),
        ),
    )
