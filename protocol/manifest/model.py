"""The manifest's model: its sizes, and what a microbatch of it costs by them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from protocol.manifest.section import Section

Turns = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]


class RopeScalingSection(Section):
    """The stretching of the rotary embedding, by which a model reads longer rows than it was first trained on."""

    kind: Literal["linear", "llama3"]
    """`linear` divides every frequency by `factor` (Chen et al. 2023, arXiv:2306.15595); `llama3` only the low ones,
    and those between by less (Llama 3.1, arXiv:2407.21783). The keys below are only for `llama3`."""
    factor: Annotated[float, Field(ge=1, le=1e6, allow_inf_nan=False)]
    low_frequency_factor: Turns = 1.0
    """What turns less often than this within `original_positions` is divided by the whole factor."""
    high_frequency_factor: Turns = 4.0
    """What turns more often than this within `original_positions` stays as it is."""
    original_positions: Annotated[int, Field(ge=8, le=2**31)] = 8192
    """The longest row that the model was first trained on."""

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if self.low_frequency_factor >= self.high_frequency_factor:
            raise ValueError("low_frequency_factor must be less than high_frequency_factor")
        return self


class ModelSection(Section):
    """A decoder of the Llama family: RMSNorm, rotary embedding, SwiGLU, grouped-query attention."""

    family: Literal["llama", "mistral", "qwen2", "qwen3"] = "llama"
    """`mistral` computes as `llama` does; `qwen2` adds a bias to queries, keys and values; `qwen3` takes the RMSNorm of
    each head's queries and keys."""
    vocabulary: Annotated[int, Field(ge=2, le=1_000_000)]
    """Rows of the embedding; at least the tokenizer's size."""
    hidden: Annotated[int, Field(ge=8, le=65_536)]
    heads: Annotated[int, Field(ge=1, le=1024)]
    kv_heads: Annotated[int, Field(ge=1, le=1024)]
    head_dim: Annotated[int, Field(ge=2, le=4096)] | None = None
    """Width of one head; hidden / heads when absent."""
    feed_forward: Annotated[int, Field(ge=8, le=262_144)]
    sequence: Annotated[int, Field(ge=8, le=1_048_576)]
    """Tokens in one row of a microbatch."""
    rope_theta: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] = 10_000.0
    rope_scaling: RopeScalingSection | None = None
    norm_epsilon: Annotated[float, Field(gt=0, le=0.1, allow_inf_nan=False)] = 1e-5
    tied_embeddings: bool = False
    """The head's matrix is the embedding's."""
    attention_bias: bool = False
    """All four projections of attention have biases, as some models of the families `llama` and `qwen3` do."""
    positions: Annotated[int, Field(ge=8, le=2**31)] | None = None
    """The most positions that the model was made for, which an export repeats; `sequence` when absent."""
    sliding_window: Annotated[int, Field(ge=8, le=2**31)] | None = None
    """Only of `mistral`: a token sees so many before it. No row may be longer, so that here it makes no difference."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type of hidden states on the wire and of the matrix products; parameters are kept in float32."""
    attention: Literal["causal", "documents"] = "causal"
    """`documents`: a token sees the earlier ones of its own document, and microbatches are whole documents, of equal
    cost. `causal`: the text is one stream cut into rows, and a token sees all that is before it in its row."""
    added_later: ClassVar[frozenset[str]] = frozenset(
        {
            "attention",
            "head_dim",
            "rope_scaling",
            "tied_embeddings",
            "attention_bias",
            "positions",
            "sliding_window",
        }
    )

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def query_size(self) -> int:
        return self.heads * self.head_size

    @property
    def has_head_norms(self) -> bool:
        return self.family == "qwen3"

    @property
    def biased(self) -> frozenset[str]:
        if self.attention_bias:
            return frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
        return frozenset({"q_proj", "k_proj", "v_proj"}) if self.family == "qwen2" else frozenset()

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(f"hidden ({self.hidden}) must be a multiple of heads ({self.heads})")
        if self.head_size % 2:
            what = "hidden / heads" if self.head_dim is None else "head_dim"
            raise ValueError(f"{what} ({self.head_size}) must be even: rotary embedding turns pairs")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        return self

    @model_validator(mode="after")
    def _is_of_its_family(self) -> Self:
        if self.attention_bias and self.family not in ("llama", "qwen3"):
            raise ValueError(f"attention_bias must not be set in a model of family {self.family}")
        if self.sliding_window is not None and self.family != "mistral":
            raise ValueError(f"sliding_window must not be given in a model of family {self.family}")
        for name, most in (("sliding_window", self.sliding_window), ("positions", self.positions)):
            if most is not None and self.sequence > most:
                raise ValueError(f"sequence ({self.sequence}) must not be more than {name} ({most})")
        return self


def block_parameters(model: ModelSection) -> int:
    """The number of weights in the matrices of one transformer block; its two norms are left out."""
    kv_size = model.kv_heads * model.head_size
    return model.hidden * (2 * model.query_size + 2 * kv_size + 3 * model.feed_forward)


def quadratic_share(model: ModelSection) -> float:
    """The cost of a document's attention in tokens per squared token, by operations of a block (arXiv:2001.08361,
    2.1)."""
    return model.query_size / block_parameters(model)


def document_cost(model: ModelSection, tokens: int) -> float:
    return tokens + quadratic_share(model) * tokens**2
