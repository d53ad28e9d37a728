"""The manifest: a TOML file with everything that must be equal on all peers."""

import re
import tomllib
from difflib import get_close_matches
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from swarm.vocabulary.errors import ManifestError
from swarm.vocabulary.types import (
    MAX_EXPERTS,
    MAX_FRAGMENTS,
    MAX_MODULES,
    MAX_STAGES,
    MAX_VISIT_RATIO,
    OLDEST_RUN,
    PROTOCOL_VERSIONS,
    ModuleId,
    PeerId,
)

Positive = Annotated[int, Field(gt=0)]
Rate = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Peer = Annotated[PeerId, Field(pattern=r"^12D3KooW[1-9A-HJ-NP-Za-km-z]{44}$")]
Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class Section(BaseModel):
    """A table of the manifest. Rejects unknown keys and wrong types. A key's docstring is its comment in the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)
    added_later: ClassVar[frozenset[str]] = frozenset()
    """Keys added later. At their default, canonical form and file omit them, so that older runs keep their RunId."""

    def leaves_out(self, key: str) -> bool:
        return key in self.added_later and bool(getattr(self, key) == type(self).model_fields[key].default)


Turns = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]


class RopeScalingSection(Section):
    """Scaling of the rotary embedding, for longer sequences than in the model's first training."""

    kind: Literal["linear", "llama3"]
    """`linear` divides all frequencies by `factor` (arXiv:2306.15595), `llama3` mainly low ones (arXiv:2407.21783)."""
    factor: Annotated[float, Field(ge=1, le=1e6, allow_inf_nan=False)]
    low_frequency_factor: Turns = 1.0
    """Frequencies with fewer turns than this within `original_positions` are divided by the whole factor."""
    high_frequency_factor: Turns = 4.0
    """Frequencies with more turns than this within `original_positions` are unchanged."""
    original_positions: Annotated[int, Field(ge=8, le=2**31)] = 8192
    """Longest sequence of the model's first training."""

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if self.low_frequency_factor >= self.high_frequency_factor:
            raise ValueError("low_frequency_factor must be less than high_frequency_factor")
        return self


class ModelSection(Section):
    """A decoder of the Llama family: RMSNorm, rotary embedding, SwiGLU, grouped-query attention."""

    family: Literal["llama", "mistral", "qwen2", "qwen3"] = "llama"
    """`mistral` equals `llama`. `qwen2` adds biases to queries, keys, values; `qwen3` RMSNorm of queries and keys."""
    vocabulary: Annotated[int, Field(ge=2, le=1_000_000)]
    """Rows of the embedding, at least the tokenizer's size."""
    hidden: Annotated[int, Field(ge=8, le=65_536)]
    heads: Annotated[int, Field(ge=1, le=1024)]
    kv_heads: Annotated[int, Field(ge=1, le=1024)]
    head_dim: Annotated[int, Field(ge=2, le=4096)] | None = None
    """Width of one head. Default: hidden / heads."""
    feed_forward: Annotated[int, Field(ge=8, le=262_144)]
    sequence: Annotated[int, Field(ge=8, le=1_048_576)]
    """Tokens per row of a microbatch."""
    rope_theta: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] = 10_000.0
    rope_scaling: RopeScalingSection | None = None
    norm_epsilon: Annotated[float, Field(gt=0, le=0.1, allow_inf_nan=False)] = 1e-5
    tied_embeddings: bool = False
    """Use the embedding as the matrix of the LM head."""
    residual: Annotated[int, Field(ge=0, le=65_535)] = 0
    """Numbers per token that blocks write and hops carry; below `hidden`. Hops then also see the text's token numbers.
    0: off, blocks write all of `hidden`."""
    token_rank: Annotated[int, Field(ge=0, le=4096)] = 0
    """With `residual`: rank of the trained table whose row of the token each block adds to its input. 0: no table."""
    attention_bias: bool = False
    """Biases of all four attention projections, as in some models of the families `llama` and `qwen3`."""
    positions: Annotated[int, Field(ge=8, le=2**31)] | None = None
    """Longest sequence that the model supports, as an export states it. Default: `sequence`."""
    sliding_window: Annotated[int, Field(ge=8, le=2**31)] | None = None
    """For `mistral`: tokens that attention looks back. Rows may not be longer, so it has no effect in training."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type of hidden states on the wire and of matrix products. Parameters are float32."""
    attention: Literal["causal", "documents"] = "causal"
    """`documents`: microbatches of whole documents, masked from each other. `causal`: rows of one stream of text."""
    added_later: ClassVar[frozenset[str]] = frozenset(
        {"attention", "head_dim", "rope_scaling", "tied_embeddings", "attention_bias", "positions", "sliding_window"}
        | {"residual", "token_rank"}
    )

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def query_size(self) -> int:
        return self.heads * self.head_size

    @property
    def stream(self) -> int:
        """Width of the embedding and of the blocks' outputs, which are added up."""
        return self.residual or self.hidden

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's number in hidden states; 0 if hidden states have none."""
        return ((self.vocabulary - 1).bit_length() + 7) // 8 if self.residual else 0

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
        if self.residual >= self.hidden:
            raise ValueError(f"residual ({self.residual}) must be less than hidden ({self.hidden})")
        if self.residual and self.tied_embeddings:
            raise ValueError("residual needs tied_embeddings = false: the embedding is narrower than the LM head")
        if self.token_rank and not (self.residual and self.family == "llama"):
            raise ValueError("token_rank needs residual, for the tokens in hidden states, and the family llama")
        if self.attention_bias and self.family not in ("llama", "qwen3"):
            raise ValueError(f"attention_bias must not be set in a model of family {self.family}")
        if self.sliding_window is not None and self.family != "mistral":
            raise ValueError(f"sliding_window must not be given in a model of family {self.family}")
        for name, most in (("sliding_window", self.sliding_window), ("positions", self.positions)):
            if most is not None and self.sequence > most:
                raise ValueError(f"sequence ({self.sequence}) must not be more than {name} ({most})")
        return self


def block_parameters(model: ModelSection) -> int:
    """Returns the number of weights in the matrices of one transformer block, without its two norms."""
    kv_size = model.kv_heads * model.head_size
    read = model.query_size + 2 * kv_size + 2 * model.feed_forward
    return model.hidden * read + model.stream * (model.query_size + model.feed_forward)


def quadratic_share(model: ModelSection) -> float:
    """Returns f: attention over n tokens takes as long as other work on f * n^2 tokens (arXiv:2001.08361, sec. 2.1)."""
    return model.query_size / block_parameters(model)


def document_cost(model: ModelSection, tokens: int) -> float:
    return tokens + quadratic_share(model) * tokens**2


class InnerSection(Section):
    """The inner optimizer. `soap` (arXiv:2409.11321) and `muon` (arXiv:2502.16982) update the blocks' matrices, and
    AdamW everything else."""

    name: Literal["adamw", "soap", "muon"] = "adamw"
    learning_rate: Rate = 1e-3
    beta1: Share = 0.9
    beta2: Share = 0.95
    """Decay of second moments, also of the statistics for SOAP's bases."""
    epsilon: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.1
    clip_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Largest norm of one module's mean gradient. A huge value such as 1e9 disables clipping."""
    momentum: Share = 0.95
    """For `muon`."""
    refresh_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 10
    """For `soap`: inner steps between refreshes of a matrix's basis."""
    refresh_lag: Annotated[int, Field(ge=1, le=1_000_000)] = 2
    """For `soap`: inner steps until a refreshed basis is used, at most `refresh_steps`. The paper's algorithm has 1."""
    largest_side: Annotated[int, Field(ge=8, le=65_536)] = 2048
    """For `soap`: longer sides of a matrix have no basis, because a refresh takes cubic time."""
    look_ahead: Annotated[float, Field(ge=0, le=4, allow_inf_nan=False)] = 1.0
    """With late gradients: parameters are ahead by this share of their last change, times `staleness` (at most 4)."""
    added_later: ClassVar[frozenset[str]] = frozenset(
        {"momentum", "refresh_steps", "refresh_lag", "largest_side", "look_ahead"}
    )

    @model_validator(mode="after")
    def _refreshes_follow_each_other(self) -> Self:
        if self.refresh_lag > self.refresh_steps:
            raise ValueError(f"refresh_lag ({self.refresh_lag}) must be at most refresh_steps ({self.refresh_steps})")
        return self


class ScheduleSection(Section):
    """Learning rate over the tokens of the run: linear warm-up, then `kind` down to `final_ratio` of the peak."""

    kind: Literal["constant", "cosine", "linear"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    """Length of the warm-up, in steps of `inner_tokens` tokens. Ignored if tokens are given."""
    total_steps: Positive = 1000
    """Length of the schedule, in the same steps. Ignored if tokens are given."""
    final_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.1
    warmup_tokens: Annotated[int, Field(ge=0)] | None = None
    """Tokens of the whole run until the peak. Replaces `warmup_steps`."""
    total_tokens: Positive | None = None
    """Tokens of the whole run until the end. Replaces `total_steps`."""
    added_later: ClassVar[frozenset[str]] = frozenset({"warmup_tokens", "total_tokens"})

    @model_validator(mode="after")
    def _warmup_fits(self) -> Self:
        if self.warmup_steps >= self.total_steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must be less than total_steps ({self.total_steps})")
        if (self.warmup_tokens is None) != (self.total_tokens is None):
            raise ValueError("warmup_tokens and total_tokens must be given together")
        if self.total_tokens is not None and self.warmup_tokens is not None and self.warmup_tokens >= self.total_tokens:
            raise ValueError(
                f"warmup_tokens ({self.warmup_tokens}) must be less than total_tokens ({self.total_tokens})"
            )
        return self


class OuterSection(Section):
    """The outer optimizer, which applies the averaged pseudo-gradient in a round."""

    name: Literal["nesterov"] = "nesterov"
    learning_rate: Rate = 0.7
    momentum: Share = 0.9


class TrainingSection(Section):
    """Size of microbatches, inner steps, rounds, optimizers."""

    rows: Annotated[int, Field(ge=1, le=65_536)] = 4
    """Rows (sequences) per microbatch."""
    inner_tokens: Positive
    """Tokens per inner step of a replica, a multiple of rows x sequence."""
    inner_steps: Positive = 50
    """Inner steps after which a round is due."""
    round_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 900.0
    """Seconds after which a round is due even with fewer inner steps, if there was at least one."""
    fragments: Annotated[int, Field(ge=1, le=MAX_FRAGMENTS)] = 1
    """Parts of a module, averaged in turn, each every `inner_steps`."""
    staleness: Annotated[int, Field(ge=0, le=64)] = 0
    """Inner steps a data node may be ahead of its slowest microbatch. 0 equals one process, 1 fills the pipeline."""
    staleness_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 100
    """Inner steps after which the staleness grows by one, from 0. 0: it is whole from the start."""
    added_later: ClassVar[frozenset[str]] = frozenset({"staleness_steps"})
    inner: InnerSection = InnerSection()
    schedule: ScheduleSection = ScheduleSection()
    outer: OuterSection = OuterSection()

    @property
    def schedule_tokens(self) -> tuple[int, int]:
        """Numbers of tokens, over the whole run, after which the warm-up and the learning rate schedule end."""
        schedule = self.schedule
        if schedule.total_tokens is not None and schedule.warmup_tokens is not None:
            return schedule.warmup_tokens, schedule.total_tokens
        return schedule.warmup_steps * self.inner_tokens, schedule.total_steps * self.inner_tokens

    @property
    def scheduled_steps(self) -> int:
        """Inner steps after which the learning rate schedule ends, if no stage is skipped."""
        return -(-self.schedule_tokens[1] // self.inner_tokens)


MAX_MANIFEST_BYTES = 64 * 1024
MAX_DOTS_PER_LINE = 64  # tomllib takes quadratic time over deeply dotted keys.
MAX_DEPTH = 8
DEFAULT_PREFIX: Final = 256  # First tokens of a document that choose its route: a few lines distinguish code from prose
SOURCES: Final = "`python-stdlib`, `path:FILE-OR-FOLDER` and `huggingface:OWNER/NAME[:CONFIG[:SPLIT[:COLUMN]]]`"


# Largest `data.token_files`, in characters, which leaves room for all other keys of a manifest.
MAX_TOKEN_FILES_LENGTH: Final = 40_000

TokenId = Annotated[int, Field(ge=0, lt=1_000_000)]
HexDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Experts = Annotated[int, Field(ge=1, le=MAX_EXPERTS)]
# OWNER/NAME, and nothing that could be a place on this machine.
HUB_PLACE: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(:[\w.-]{0,96}){0,3}", re.ASCII)


class StagesSection(Section):
    """The split of the model into stages, and the allowed paths."""

    blocks: Annotated[tuple[Annotated[int, Field(ge=0, le=1024)], ...], Field(min_length=1, max_length=MAX_STAGES)]
    """Transformer blocks of each stage. Stage 0 also has embedding, LM head and loss, and may have 0 blocks."""
    experts: Experts | Annotated[tuple[Experts, ...], Field(min_length=1, max_length=MAX_STAGES)] = 1
    """Experts at each stage after stage 0: one number, or a list with one number per stage, starting with 1."""
    per_path: Annotated[int, Field(ge=0, le=MAX_STAGES)] | None = None
    """Stages after stage 0 that one path visits. Default: all."""
    reordering: Literal["none"] = "none"
    """Always `none`: stages are visited in ascending order. Kept, because it is part of the RunId."""
    visit_ratio: Annotated[float, Field(ge=1, le=MAX_VISIT_RATIO, allow_inf_nan=False)] = 1.0
    """Largest ratio of visits of two stages after stage 0. Above 1, slow stages get fewer visits."""
    workers: Literal["modules", "paths"] = "modules"
    """`paths`: a node with text hosts a whole path if it can (DiPaCo), so that only rounds cross links."""
    added_later: ClassVar[frozenset[str]] = frozenset({"visit_ratio", "workers"})

    @property
    def count(self) -> int:
        return len(self.blocks)

    @property
    def visited_per_path(self) -> int:
        return self.count - 1 if self.per_path is None else self.per_path

    @property
    def has_experts(self) -> bool:
        """Whether any stage has several experts, so that documents are routed."""
        return any(experts > 1 for experts in self.experts_of_each)

    def experts_at(self, stage: int) -> int:
        if isinstance(self.experts, tuple):
            return self.experts[stage]
        return self.experts if stage else 1

    @property
    def experts_of_each(self) -> tuple[int, ...]:
        return tuple(self.experts_at(stage) for stage in range(self.count))

    @model_validator(mode="after")
    def _stages_fit(self) -> Self:
        if isinstance(self.experts, tuple) and (len(self.experts) != self.count or self.experts[0] != 1):
            raise ValueError(
                f"experts must be one number, or one for each of the {self.count} stages, the first of which is 1"
            )
        if (modules := sum(self.experts_of_each)) > MAX_MODULES:
            each = "their" if isinstance(self.experts, tuple) else self.experts
            raise ValueError(
                f"{self.count} stages with {each} experts each make {modules} modules; a run has {MAX_MODULES} at most"
            )
        if any(blocks == 0 for blocks in self.blocks[1:]):
            raise ValueError("blocks: every stage but stage 0 needs at least 1 block")
        if sum(self.blocks) == 0:
            raise ValueError("blocks: the model needs at least 1 block")
        if self.per_path is not None and not min(1, self.count - 1) <= self.per_path <= self.count - 1:
            raise ValueError(f"per_path ({self.per_path}) must be from 1 to {self.count - 1}, the stages after stage 0")
        return self


class PathsSection(Section):
    """SkipPipe's rules for paths that skip stages, which keep the stages one model."""

    max_jump: Annotated[int, Field(ge=1, le=MAX_STAGES)] | None = None
    """Most stages that a path skips in a row. Default: any number; `skipstone new` sets 3."""
    full_every: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Every path of this number visits all stages. 0: none does; `skipstone new` sets 10."""


class FilesSection(Section):
    """Identifies the text files. A data node refuses to read different files."""

    count: Annotated[int, Field(ge=1, le=1_000_000)]
    bytes: Annotated[int, Field(ge=1, lt=2**63)]
    """Size of all files together."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Hash of all names and sizes, in order of names."""


class DataSection(Section):
    """The source of text. All data nodes read the same source, each one its share of the documents."""

    source: Annotated[str, Field(min_length=1, max_length=512)] = "python-stdlib"
    """`python-stdlib`, `path:...` (other machines name their copy by --text), or
    `huggingface:OWNER/NAME[:CONFIG[:SPLIT[:COLUMN]]]`."""
    files: FilesSection | None = None
    """For `path:`, written by `skipstone new`."""
    tokenizer: Annotated[str, Field(pattern=r"^(bytes|file:.+)$", max_length=512)] = "bytes"
    """`bytes`, or `file:TOKENIZER.json` in the format of the `tokenizers` library."""
    tokenizer_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """Hash of the tokenizer file, so that all data nodes use the same one. Required with `file:`."""
    ends: Annotated[tuple[TokenId, ...], Field(max_length=64)] = ()
    """Tokens that end a text, written by `skipstone new`. The first one ends each document. Default: found by name."""
    beginning: TokenId | None = None
    """Token that begins each document, because the tokenizer file adds it."""
    token_files: Annotated[str, Field(pattern=r"^[A-Za-z0-9+/=]*$", max_length=MAX_TOKEN_FILES_LENGTH)] = ""
    """The start model's settings of tokens, chat template and generation, for exports: base64 of zlib of JSON."""
    held_out: Share = 0.02
    """Share of documents reserved for evaluation."""
    labels: Literal["all", "assistant"] = "all"
    """Tokens that the model learns to predict. `assistant`: only the assistant's text in conversations (ChatML)."""
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None = None
    """For `huggingface:`: commit of the data set, written by `skipstone new`."""
    dealt_by: Literal["documents", "files"] = "documents"
    """`files` for `huggingface:`: data nodes read the data set file by file. `documents` for all others: shuffled."""
    open: bool = False
    """Let every peer act as data node, so that anybody with the link can decide what the model learns."""
    inviters: Annotated[tuple[Peer, ...], Field(max_length=16)] = ()
    """Peers that may invite data nodes, besides the author."""
    added_later: ClassVar[frozenset[str]] = frozenset(
        {"labels", "revision", "dealt_by", "open", "inviters", "ends", "beginning", "token_files"}
    )

    @property
    def kind(self) -> str:
        return self.source.partition(":")[0]

    @property
    def is_of_files(self) -> bool:
        """Whether the text is in local files."""
        return self.kind == "path"

    @field_validator("source")
    @classmethod
    def _source_is_known(cls, source: str) -> str:
        kind, _, rest = source.partition(":")
        is_of_hub = kind == "huggingface" and HUB_PLACE.fullmatch(rest)
        if source != "python-stdlib" and not (kind == "path" and rest) and not is_of_hub:
            raise ValueError(f"must be one of {SOURCES}; a file or folder is `path:{source[:80]}`")
        return _local_name(source, rest)

    @field_validator("tokenizer")
    @classmethod
    def _tokenizer_is_local(cls, tokenizer: str) -> str:
        return _local_name(tokenizer, tokenizer.removeprefix("file:"))

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if self.files is not None and not self.is_of_files:
            raise ValueError("files must not be given when source is not `path:...`")
        if self.revision is not None and self.kind != "huggingface":
            raise ValueError("revision must not be given when source is not `huggingface:...`")
        is_hub = self.kind == "huggingface"
        if is_hub and (self.revision is None or self.dealt_by != "files"):
            raise ValueError(
                'source = "huggingface:..." needs a revision and dealt_by = "files": a data set of the hub is no longer'
                " fetched whole; make a new manifest with `skipstone new`"
            )
        if self.dealt_by == "files" and not is_hub:
            raise ValueError('dealt_by = "files" needs source = "huggingface:..."')
        if self.labels == "assistant" and self.kind not in ("path", "huggingface"):
            raise ValueError(f'labels = "assistant" needs a source of conversations, which {self.kind} is not')
        if (self.tokenizer_sha256 is not None) != self.tokenizer.startswith("file:"):
            raise ValueError("tokenizer_sha256 must be given exactly when tokenizer is `file:...`")
        if self.tokenizer == "bytes" and (self.ends or self.beginning is not None or self.token_files):
            raise ValueError("ends, beginning and token_files must not be given when tokenizer is `bytes`")
        return self


class CodecSection(Section):
    """The strongest allowed compression of each kind of traffic. Links use milder codecs if they are fast enough."""

    activations: Literal["none", "bf16", "int8", "int4"] = "none"
    """Hidden states between stages."""
    gradients: Literal["none", "bf16", "int8", "int4"] = "none"
    """Gradients of hidden states."""
    pseudo_gradients: Literal["none", "bf16", "int8", "int4", "int2"] = "none"
    """Pseudo-gradients in rounds. With `int4` and `int2`, replicas send the omitted rest in later rounds."""
    state: Literal["none", "planes"] = "planes"
    """Without effect: newcomers download state as it is. Kept, because it is part of the RunId."""


class RoutingSection(Section):
    """The router of a run with experts, which chooses the experts of each document."""

    router: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """BLAKE3 of the router file, which peers pass to each other."""
    prefix: Annotated[int, Field(ge=8, le=4096)] = DEFAULT_PREFIX
    """Number of first tokens of a document that choose its route."""


class StartSection(Section):
    """The existing model from which the run starts, written by `skipstone new --from-model`."""

    modules: Annotated[tuple[HexDigest, ...], Field(min_length=1, max_length=MAX_STAGES)]
    """BLAKE3 of each stage's first anchor, by stage. All experts of a stage start with the same weights."""


class Manifest(Section):
    """The definition of a run. Read it by `protocol.manifest.signing`; compare two by their RunIds."""

    protocol: Annotated[int, Field(ge=OLDEST_RUN, le=PROTOCOL_VERSIONS.highest)]
    """Lowest protocol version that supports this run."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Determines initial weights, order of documents, and held-out documents."""
    model: ModelSection
    stages: StagesSection
    paths: PathsSection = PathsSection()
    data: DataSection = DataSection()
    training: TrainingSection
    codecs: CodecSection = CodecSection()
    routing: RoutingSection | None = None
    """For a run with experts. Without it, documents are assigned to experts by a hash of name and seed."""
    start: StartSection | None = None
    """For a run that starts from an existing model. Without it, the seed determines the initial weights."""
    added_later: ClassVar[frozenset[str]] = frozenset({"routing", "start", "paths"})

    @property
    def route_prefix(self) -> int:
        """Number of a document's first tokens that choose its route and have no held-out loss; 0 without experts."""
        if not self.stages.has_experts:
            return 0
        return DEFAULT_PREFIX if self.routing is None else self.routing.prefix

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of a microbatch; an upper bound if microbatches are whole documents."""
        return self.training.rows * self.model.sequence

    @property
    def tells_labels(self) -> bool:
        """Whether only some tokens are labels (have a loss), so that a signed route contains the number of labels."""
        return self.data.labels != "all"

    @property
    def visit_share(self) -> float:
        """Share of the microbatches that visits each stage after stage 0, in the mean over these stages."""
        every, share = self.paths.full_every, self.stages.visited_per_path / max(1, self.stages.count - 1)
        return share + (1 - share) / every if every else share

    @property
    def packs_documents(self) -> bool:
        """Whether microbatches are whole documents, with separate positions and attention."""
        return self.model.attention == "documents"

    @property
    def microbatches_per_step(self) -> int:
        return self.training.inner_tokens // self.microbatch_tokens

    @property
    def hidden_shape(self) -> tuple[int, int, int]:
        """Largest shape of hidden states between stages: (rows, tokens, channels)."""
        channels = self.model.stream + self.model.token_bytes
        if self.packs_documents:
            return (1, self.microbatch_tokens, channels)
        return (self.training.rows, self.model.sequence, channels)

    def step_tokens(self, module: ModuleId) -> int:
        """Returns a module's tokens per inner step: an equal share among the stage's experts, in whole microbatches."""
        if self.stages.workers == "paths":  # a worker's experts see all of its tokens
            return self.training.inner_tokens
        share = self.training.inner_tokens // self.stages.experts_at(module.stage)
        return max(1, share // self.microbatch_tokens) * self.microbatch_tokens

    def modules(self) -> tuple[ModuleId, ...]:
        return self._modules

    def has(self, module: ModuleId) -> bool:
        return module.stage < self.stages.count and module.expert < self.stages.experts_at(module.stage)

    @cached_property
    def _modules(self) -> tuple[ModuleId, ...]:
        stages = enumerate(self.stages.experts_of_each)
        return tuple(ModuleId(stage, expert) for stage, experts in stages for expert in range(experts))

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        if self.stages.has_experts and not self.packs_documents:
            raise ValueError('stages.experts above 1 needs model.attention = "documents": whole documents are routed')
        jump, visited, skippable = self.paths.max_jump, self.stages.visited_per_path, self.stages.count - 1
        if jump is not None and visited * (jump + 1) < skippable:
            # Each path visits at least one of any jump + 1 neighbouring stages, and visits are equal.
            skipped, least = -(-skippable // visited) - 1, -(-skippable // (jump + 1))
            raise ValueError(
                f"paths.max_jump ({jump}): a path of {visited} of {skippable} stages skips {skipped} in a row; visit at"
                f" least {least} stages, or allow longer jumps"
            )
        if self.routing is not None and not self.stages.has_experts:
            raise ValueError("routing must not be given when no stage has several experts (stages.experts)")
        if self.start is not None and self.model.residual:
            raise ValueError(
                "start must not be given with model.residual: the start model's blocks write all of hidden"
            )
        if self.start is not None and len(self.start.modules) != self.stages.count:
            raise ValueError(f"start.modules must have one digest for each of the {self.stages.count} stages")
        if self.training.inner_tokens % self.microbatch_tokens:
            raise ValueError(
                f"training.inner_tokens ({self.training.inner_tokens}) must be a multiple of"
                f" training.rows x model.sequence ({self.microbatch_tokens})"
            )
        if self.data.tokenizer == "bytes" and self.model.vocabulary < 257:
            raise ValueError("model.vocabulary must be at least 257 for the byte tokenizer (256 bytes and an end mark)")
        if max((*self.data.ends, self.data.beginning or 0)) >= self.model.vocabulary:
            raise ValueError(f"data.ends and data.beginning must be below model.vocabulary ({self.model.vocabulary})")
        return self


def _local_name(value: str, path: str) -> str:
    """Returns `value`. Raises ValueError if `path` is on another machine: Windows would send it our credentials."""
    if "\0" in value:
        raise ValueError("has a zero byte")
    if len(path) > 1 and path[0] in "/\\" and path[1] in "/\\":
        raise ValueError("is a path on another machine (it begins with two slashes)")
    return value


def manifest_from_table(table: dict[str, Any]) -> Manifest:
    """Builds a manifest from a parsed TOML table (without its signature). Raises ManifestError for invalid values."""
    _check_protocol(table.get("protocol"))
    try:
        return Manifest.model_validate(_tuples(table))
    except ValidationError as error:
        raise _explained("manifest", error) from None


def _check_protocol(version: object) -> None:
    """Raises ManifestError if we do not support the run's protocol version, on which all other keys depend."""
    lowest, highest = OLDEST_RUN, PROTOCOL_VERSIONS.highest
    if type(version) is int and not lowest <= version <= highest:
        spoken = f"{lowest}" if lowest == highest else f"{lowest} to {highest}"
        advice = "its author must make a new run" if version < lowest else "install a newer Skipstone"
        needed = f"manifest: this run needs protocol version {version}"
        raise ManifestError(f"{needed}; this Skipstone speaks version {spoken}; {advice}")


def parse_toml(text: bytes) -> dict[str, Any]:
    """Parses TOML bytes from a peer. Raises ManifestError if too long, not UTF-8, not TOML, or nested too deeply."""
    if len(text) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"manifest: {len(text)} bytes are more than the {MAX_MANIFEST_BYTES} allowed")
    if any(line.count(b".") > MAX_DOTS_PER_LINE for line in text.split(b"\n")):
        raise ManifestError(f"manifest: a line with more than {MAX_DOTS_PER_LINE} dots; keys are not nested so deeply")
    try:
        return tomllib.loads(text.decode())
    except ValueError as error:  # also from int() for thousands of digits
        raise ManifestError(f"manifest: not a TOML file: {error}") from None
    except RecursionError:
        raise ManifestError("manifest: values are nested too deeply") from None


def _tuples(value: Any, depth: int = 0) -> Any:
    """Converts TOML arrays to tuples for the strict schema. Raises ManifestError for values outside TOML's limits."""
    if depth > MAX_DEPTH:
        raise ManifestError(f"manifest: values are nested more than {MAX_DEPTH} deep")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ManifestError("manifest: a whole number does not fit in 64 bits")
    if isinstance(value, dict):
        return {key: _tuples(item, depth + 1) for key, item in value.items()}
    return tuple(_tuples(item, depth + 1) for item in value) if isinstance(value, list) else value


def _explained(what: str, error: ValidationError) -> ManifestError:
    # A misspelt key is missing too, so unknown keys come first.
    items = sorted(error.errors(), key=lambda item: item["type"] != "extra_forbidden")
    return ManifestError(f"{what}: " + "; ".join(_explain(dict(item)) for item in items[:5]))


def _explain(error: dict[str, Any]) -> str:
    path = ".".join(str(part) for part in error["loc"])[:80]
    key = "".join(c if c.isprintable() else "?" for c in path) or "manifest"
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        known = {name for kind in Section.__subclasses__() for name in kind.model_fields}
        nearest = get_close_matches(key.rpartition(".")[2], known, 1)
        return f"{key}: unknown key{f'; did you mean {nearest[0]}?' if nearest else ''}"
    if error["type"] == "missing":
        return f"{key}: missing"
    got = "" if isinstance(error["input"], dict | Manifest | Section) else f" (got {str(error['input'])[:80]!r})"
    return f"{key}: {message}{got}"
