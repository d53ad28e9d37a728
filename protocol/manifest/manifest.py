"""The manifest: one TOML file with everything that must be equal on all peers, checked key by key."""

from __future__ import annotations

import re
import tomllib
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
    PROTOCOL_VERSIONS,
    ModuleId,
)

Positive = Annotated[int, Field(gt=0)]
Rate = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class Section(BaseModel):
    """A table: unknown keys are refused, values not coerced. A key's docstring is its comment in the manifest file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)
    added_later: ClassVar[frozenset[str]] = frozenset()
    """Keys that came later. At their default canonical form and file omit them, so older runs keep their RunId."""

    def leaves_out(self, key: str) -> bool:
        return key in self.added_later and bool(getattr(self, key) == type(self).model_fields[key].default)


Turns = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]


class RopeScalingSection(Section):
    """The stretching of the rotary embedding, by which a model reads longer rows than it was first trained on."""

    kind: Literal["linear", "llama3"]
    """`linear` divides every frequency by `factor` (arXiv:2306.15595); `llama3` mainly the low ones
    (arXiv:2407.21783)."""
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
    """`mistral` is `llama`; `qwen2` adds biases to queries, keys and values; `qwen3` an RMSNorm of each query and key
    head."""
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
    """`documents`: microbatches are whole documents, masked from each other. `causal`: rows of one stream of text."""
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
    """The cost of a document's attention in tokens per squared token, by operations (arXiv:2001.08361, 2.1)."""
    return model.query_size / block_parameters(model)


def document_cost(model: ModelSection, tokens: int) -> float:
    return tokens + quadratic_share(model) * tokens**2


class InnerSection(Section):
    """The inner optimizer. `soap` (arXiv:2409.11321) and `muon` (arXiv:2502.16982) move block matrices; the rest is
    AdamW's."""

    name: Literal["adamw", "soap", "muon"] = "adamw"
    learning_rate: Rate = 1e-3
    beta1: Share = 0.9
    beta2: Share = 0.95
    """Also of what SOAP's bases follow from."""
    epsilon: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.1
    clip_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Largest norm of one module's mean gradient; a value that is never reached, such as 1e9, means no clipping."""
    momentum: Share = 0.95
    """Of `muon`."""
    refresh_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 10
    """Of `soap`: a matrix's basis is refreshed every so many inner steps."""
    refresh_lag: Annotated[int, Field(ge=1, le=1_000_000)] = 2
    """Of `soap`: inner steps until a refreshed basis is used, at most `refresh_steps`. 1 is the published algorithm."""
    largest_side: Annotated[int, Field(ge=8, le=65_536)] = 2048
    """Of `soap`: longer sides of a matrix have no basis. A refresh takes time by the cube of a side."""
    added_later: ClassVar[frozenset[str]] = frozenset({"momentum", "refresh_steps", "refresh_lag", "largest_side"})

    @model_validator(mode="after")
    def _refreshes_follow_each_other(self) -> Self:
        if self.refresh_lag > self.refresh_steps:
            raise ValueError(f"refresh_lag ({self.refresh_lag}) must be at most refresh_steps ({self.refresh_steps})")
        return self


class ScheduleSection(Section):
    """Learning rate over the tokens of the run: linear warm-up, then as `kind` says, down to `final_ratio` of the
    peak."""

    kind: Literal["constant", "cosine", "linear"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    """Of `inner_tokens` tokens each; not used where tokens are given."""
    total_steps: Positive = 1000
    """As `warmup_steps`."""
    final_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.1
    warmup_tokens: Annotated[int, Field(ge=0)] | None = None
    """The peak is reached after this many tokens of the whole run."""
    total_tokens: Positive | None = None
    """The end is reached after this many tokens of the whole run. Replaces `total_steps`."""
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
    """The outer optimizer: what a round does with the averaged pseudo-gradient."""

    name: Literal["nesterov"] = "nesterov"
    learning_rate: Rate = 0.7
    momentum: Share = 0.9


class TrainingSection(Section):
    """How the run trains: size of microbatches, inner steps, rounds, optimizers."""

    rows: Annotated[int, Field(ge=1, le=65_536)] = 4
    """Rows (sequences) of one microbatch."""
    inner_tokens: Positive
    """A replica takes an inner step after this many tokens; a multiple of rows x sequence."""
    inner_steps: Positive = 50
    """A round is due after this many inner steps."""
    round_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 900.0
    """A round is due after so long at the latest, however few inner steps were taken, provided that there were any."""
    fragments: Annotated[int, Field(ge=1, le=MAX_FRAGMENTS)] = 1
    """Parts of a module that are averaged at staggered times, each after `inner_steps`."""
    staleness: Annotated[int, Field(ge=0, le=64)] = 0
    """Inner steps that a data node may run ahead of its slowest microbatch. 0 reproduces one process; 1 fills the
    pipeline."""
    inner: InnerSection = InnerSection()
    schedule: ScheduleSection = ScheduleSection()
    outer: OuterSection = OuterSection()

    @property
    def schedule_tokens(self) -> tuple[int, int]:
        """The tokens of the whole run after which the warm-up and the schedule end."""
        schedule = self.schedule
        if schedule.total_tokens is not None and schedule.warmup_tokens is not None:
            return schedule.warmup_tokens, schedule.total_tokens
        return schedule.warmup_steps * self.inner_tokens, schedule.total_steps * self.inner_tokens

    @property
    def scheduled_steps(self) -> int:
        """The inner steps of `inner_tokens` tokens after which the schedule ends, where nothing is skipped."""
        return -(-self.schedule_tokens[1] // self.inner_tokens)


MAX_MANIFEST_BYTES = 64 * 1024
MAX_DOTS_PER_LINE = 64
"""tomllib takes quadratic time over deeply dotted keys."""
MAX_DEPTH = 8
DEFAULT_PREFIX: Final = 256
"""Tokens of a document that choose its route: a few lines tell code from prose."""
SOURCES: Final = (
    "`python-stdlib`, `path:FILE-OR-FOLDER`, `tokens:FOLDER` and `huggingface:OWNER/NAME[:CONFIG[:SPLIT[:COLUMN]]]`"
)


FILE_KINDS: Final = ("path", "tokens")

HexDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Experts = Annotated[int, Field(ge=1, le=MAX_EXPERTS)]
HUB_PLACE: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(:[\w.-]{0,96}){0,3}", re.ASCII)
"""OWNER/NAME, and nothing that could be a place on this machine."""


class StagesSection(Section):
    """The cut of the model into stages, and the paths that are allowed."""

    blocks: Annotated[tuple[Annotated[int, Field(ge=0, le=1024)], ...], Field(min_length=1, max_length=MAX_STAGES)]
    """Transformer blocks of each stage. Stage 0 also has the embedding, the head and the loss; it may have 0."""
    experts: Experts | Annotated[tuple[Experts, ...], Field(min_length=1, max_length=MAX_STAGES)] = 1
    """Modules at each stage but stage 0: one number, or one for each stage, the first of which is 1."""
    per_path: Annotated[int, Field(ge=0, le=MAX_STAGES)] | None = None
    """Stages besides stage 0 that one path visits; all of them when absent."""
    reordering: Literal["none"] = "none"
    """Stages are visited in ascending order. The key stays, because the ids of runs follow from it."""
    visit_ratio: Annotated[float, Field(ge=1, le=MAX_VISIT_RATIO, allow_inf_nan=False)] = 1.0
    """Largest ratio of visits between two stages after stage 0. Above 1, weak stages are visited less."""
    added_later: ClassVar[frozenset[str]] = frozenset({"visit_ratio"})

    @property
    def count(self) -> int:
        return len(self.blocks)

    @property
    def visited_per_path(self) -> int:
        return self.count - 1 if self.per_path is None else self.per_path

    @property
    def has_experts(self) -> bool:
        """Whether some stage has several modules, so that documents are routed."""
        return any(experts > 1 for experts in self.experts_of_each)

    def experts_at(self, stage: int) -> int:
        if isinstance(self.experts, tuple):
            return self.experts[stage]
        return self.experts if stage else 1

    @property
    def experts_of_each(self) -> tuple[int, ...]:
        return tuple(self.experts_at(stage) for stage in range(self.count))

    @field_validator("reordering", mode="before")
    @classmethod
    def _in_order(cls, value: object) -> object:
        if value == "adjacent":
            raise ValueError('paths with steps back ("adjacent") exist no more; this run needs an older Skipstone')
        return value

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


class FilesSection(Section):
    """The text's list of files. A data node whose files are others refuses to read them."""

    count: Annotated[int, Field(ge=1, le=1_000_000)]
    bytes: Annotated[int, Field(ge=1, lt=2**63)]
    """Of all files together."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Of every file's name and size, in the order of names."""


class DataSection(Section):
    """The source of text. Every data node reads the same source and takes its share of the documents."""

    source: Annotated[str, Field(min_length=1, max_length=512)] = "python-stdlib"
    """`python-stdlib`, `path:...` or `tokens:FOLDER` (others give their copy by --text), or
    `huggingface:OWNER/NAME[:CONFIG[:SPLIT[:COLUMN]]]`."""
    files: FilesSection | None = None
    """Only of `path:` and `tokens:`; `skipstone new` writes it."""
    tokenizer: Annotated[str, Field(pattern=r"^(bytes|file:.+)$", max_length=512)] = "bytes"
    """`bytes`, or `file:TOKENIZER.json` in the format of the `tokenizers` library."""
    tokenizer_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """Of the tokenizer file, so that all data nodes use the same one; required with `file:`."""
    held_out: Share = 0.02
    """Share of the documents that is never trained on."""
    labels: Literal["all", "assistant"] = "all"
    """The tokens that the model learns to predict. `assistant`: what the assistant says in conversations (ChatML)."""
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None = None
    """Only of `huggingface:`: the commit of the data set; `skipstone new` writes it."""
    dealt_by: Literal["documents", "files"] = "documents"
    """`files` for `huggingface:`: data nodes walk the data set file by file. `documents` for all others: shuffled."""
    added_later: ClassVar[frozenset[str]] = frozenset({"labels", "revision", "dealt_by"})

    @property
    def kind(self) -> str:
        return self.source.partition(":")[0]

    @property
    def is_of_files(self) -> bool:
        """Whether the text is files that somebody has to have."""
        return self.kind in FILE_KINDS

    @field_validator("source")
    @classmethod
    def _source_is_known(cls, source: str) -> str:
        kind, _, rest = source.partition(":")
        known = (
            source == "python-stdlib"
            or (kind in FILE_KINDS and rest)
            or (kind == "huggingface" and HUB_PLACE.fullmatch(rest))
        )
        if not known:
            raise ValueError(f"is none of {SOURCES}")
        return _local_name(source, rest)

    @field_validator("tokenizer")
    @classmethod
    def _tokenizer_is_local(cls, tokenizer: str) -> str:
        return _local_name(tokenizer, tokenizer.removeprefix("file:"))

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if self.files is not None and not self.is_of_files:
            raise ValueError("files must not be given when source is neither `path:...` nor `tokens:...`")
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
        return self


class CodecSection(Section):
    """The strongest compression of each kind of traffic. Microbatches use it only as far as a link needs it."""

    activations: Literal["none", "bf16", "int8", "int4"] = "none"
    """Hidden states between stages."""
    gradients: Literal["none", "bf16", "int8", "int4"] = "none"
    """Their gradients."""
    pseudo_gradients: Literal["none", "bf16", "int8", "int4", "top_k_4", "top_k_2"] = "none"
    """Between replicas in a round. `int4` and the sparse ones keep what is left out in the replica."""
    state: Literal["none", "planes"] = "planes"
    """What newcomers download. `planes` shortens it without loss by a sixth where the link is slow."""

    @field_validator("activations", "gradients", mode="before")
    @classmethod
    def _codec_still_exists(cls, name: object) -> object:
        if name == "fp8":
            raise ValueError("this Skipstone has no codec fp8; int8 is as small and has a quarter of its error")
        return name


class RoutingSection(Section):
    """The router of a run with experts: to which of them each document goes."""

    router: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """BLAKE3 of the router's bytes, which peers give each other."""
    prefix: Annotated[int, Field(ge=8, le=4096)] = DEFAULT_PREFIX
    """The first tokens of a document, by which its route is chosen."""

    @model_validator(mode="before")
    @classmethod
    def _router_is_fixed(cls, table: Any) -> Any:
        if isinstance(table, dict) and "reshard" in table:
            raise ValueError("reshard is gone: the router of a run does not learn any more; make a new run without it")
        return table


class StartSection(Section):
    """The existing model from which the run starts, as `skipstone new --from-model` has cut it."""

    modules: Annotated[tuple[HexDigest, ...], Field(min_length=1, max_length=MAX_STAGES)]
    """BLAKE3 of each stage's first anchor, in order of stage. All experts of a stage start alike."""


class Manifest(Section):
    """The definition of a run. Read one with `protocol.manifest.signing`; compare two by their RunId."""

    protocol: Annotated[int, Field(ge=PROTOCOL_VERSIONS.lowest, le=PROTOCOL_VERSIONS.highest)]
    """Lowest protocol version that can carry this run."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Initial weights, document order and held-out choice all follow from it."""
    model: ModelSection
    stages: StagesSection
    data: DataSection = DataSection()
    training: TrainingSection
    codecs: CodecSection = CodecSection()
    routing: RoutingSection | None = None
    """Only of a run with experts. Without it documents are dealt to them by chance, of their names and the seed."""
    start: StartSection | None = None
    """Only of a run that starts from an existing model. Without it the initial weights follow from the seed."""
    added_later: ClassVar[frozenset[str]] = frozenset({"routing", "start"})

    @property
    def route_prefix(self) -> int:
        """Tokens of a document that choose its route, left out of held-out losses; 0 without experts."""
        if not self.stages.has_experts:
            return 0
        return DEFAULT_PREFIX if self.routing is None else self.routing.prefix

    @property
    def microbatch_tokens(self) -> int:
        """The tokens of a microbatch; at most, where it is whole documents."""
        return self.training.rows * self.model.sequence

    @property
    def tells_labels(self) -> bool:
        """Whether only some tokens are labels, so that hops are told of each microbatch how many."""
        return self.data.labels != "all"

    @property
    def packs_documents(self) -> bool:
        """Whether microbatches are whole documents, each with positions and attention of its own."""
        return self.model.attention == "documents"

    @property
    def microbatches_per_step(self) -> int:
        return self.training.inner_tokens // self.microbatch_tokens

    @property
    def hidden_shape(self) -> tuple[int, int, int]:
        """The largest shape of hidden states between stages: rows, tokens, hidden."""
        if self.packs_documents:
            return (1, self.microbatch_tokens, self.model.hidden)
        return (self.training.rows, self.model.sequence, self.model.hidden)

    def step_tokens(self, module: ModuleId) -> int:
        """Tokens of a replica's inner step at a stage: experts share the step, a microbatch is the least."""
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
            raise ValueError(
                'stages.experts above 1 needs model.attention = "documents": whole documents are routed to experts'
            )
        if self.routing is not None and not self.stages.has_experts:
            raise ValueError("routing must not be given when no stage has several experts (stages.experts)")
        if self.start is not None and len(self.start.modules) != self.stages.count:
            raise ValueError(f"start.modules must have one digest for each of the {self.stages.count} stages")
        if self.training.inner_tokens % self.microbatch_tokens:
            raise ValueError(
                f"training.inner_tokens ({self.training.inner_tokens}) must be a multiple of"
                f" training.rows x model.sequence ({self.microbatch_tokens})"
            )
        if self.data.tokenizer == "bytes" and self.model.vocabulary < 257:
            raise ValueError(
                "model.vocabulary must be at least 257 for the byte tokenizer (256 bytes and end of document)"
            )
        return self


def _local_name(value: str, path: str) -> str:
    """Raises ValueError for no path, or one on another machine: Windows would send our credentials there."""
    if "\0" in value:
        raise ValueError("has a zero byte")
    if len(path) > 1 and path[0] in "/\\" and path[1] in "/\\":
        raise ValueError("is a path on another machine (it begins with two slashes)")
    return value


def manifest_from_table(table: dict[str, Any]) -> Manifest:
    """Checks a parsed TOML table (without its signature). Raises ManifestError."""
    _check_protocol(table.get("protocol"))
    try:
        return Manifest.model_validate(_tuples(table))
    except ValidationError as error:
        raise ManifestError("manifest: " + "; ".join(_explain(dict(item)) for item in error.errors()[:5])) from None


def data_section(table: dict[str, Any]) -> DataSection:
    """Checks a table of `[data]` alone. Raises as `manifest_from_table`."""
    try:
        return DataSection.model_validate(table)
    except ValidationError as error:
        raise ManifestError("data: " + "; ".join(_explain(dict(item)) for item in error.errors()[:5])) from None


def _check_protocol(version: object) -> None:
    """Before the rest: of a run of another protocol nothing else need be right."""
    lowest, highest = PROTOCOL_VERSIONS.lowest, PROTOCOL_VERSIONS.highest
    if type(version) is int and not lowest <= version <= highest:
        spoken = f"{lowest}" if lowest == highest else f"{lowest} to {highest}"
        advice = (
            "its author has to make a new run with 'skipstone new'" if version < lowest else "a newer Skipstone may"
        )
        raise ManifestError(
            f"manifest: this run needs protocol version {version}; this Skipstone speaks version {spoken}; {advice}"
        )


def parse_toml(text: bytes) -> dict[str, Any]:
    """Parses TOML bytes from a peer. Raises ManifestError if too long, not UTF-8, not TOML, or nested too deeply."""
    if len(text) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"manifest: {len(text)} bytes are more than the {MAX_MANIFEST_BYTES} allowed")
    if any(line.count(b".") > MAX_DOTS_PER_LINE for line in text.split(b"\n")):
        raise ManifestError(
            f"manifest: a line with more than {MAX_DOTS_PER_LINE} dots; keys are not nested that deeply"
        )
    try:
        return tomllib.loads(text.decode())
    except ValueError as error:  # also what int() says of thousands of digits
        raise ManifestError(f"manifest: not a TOML file: {error}") from None
    except RecursionError:
        raise ManifestError("manifest: values are nested too deeply") from None


def _tuples(value: Any, depth: int = 0) -> Any:
    """TOML arrays as tuples, since the strict schema is immutable; refuses what TOML does not promise to carry."""
    if depth > MAX_DEPTH:
        raise ManifestError(f"manifest: values are nested more than {MAX_DEPTH} deep")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ManifestError("manifest: a whole number does not fit in 64 bits")
    if isinstance(value, dict):
        return {key: _tuples(item, depth + 1) for key, item in value.items()}
    return tuple(_tuples(item, depth + 1) for item in value) if isinstance(value, list) else value


def _explain(error: dict[str, Any]) -> str:
    path = ".".join(str(part) for part in error["loc"])[:80]
    key = "".join(c if c.isprintable() else "?" for c in path) or "manifest"
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return f"{key}: unknown key"
    if error["type"] == "missing":
        return f"{key}: missing"
    got = "" if isinstance(error["input"], dict | Manifest | Section) else f" (got {str(error['input'])[:80]!r})"
    return f"{key}: {message}{got}"
