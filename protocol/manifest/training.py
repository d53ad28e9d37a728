"""The manifest's training: inner optimizer, schedule, rounds."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from protocol.manifest.section import Positive, Rate, Section, Share
from swarm.vocabulary.types import MAX_FRAGMENTS


class InnerSection(Section):
    """The inner optimizer and its hyperparameters. `soap` (Vyas et al. 2024, arXiv:2409.11321) and `muon` (Jordan et
    al. 2024; Liu et al. 2025, arXiv:2502.16982) move the matrices of the blocks; the embedding, the head and the norms
    are AdamW's in any case, with the same learning rate and decay."""

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
    """Of `soap`: so many inner steps later, at most `refresh_steps`, a refreshed basis is used; in between peers
    compute it in idle time. 1 is the published algorithm."""
    largest_side: Annotated[int, Field(ge=8, le=65_536)] = 2048
    """Of `soap`: longer sides of a matrix have no basis. A refresh takes time by the cube of a side, and its memory by
    the square."""
    added_later: ClassVar[frozenset[str]] = frozenset({"momentum", "refresh_steps", "refresh_lag", "largest_side"})

    @model_validator(mode="after")
    def _refreshes_follow_each_other(self) -> Self:
        if self.refresh_lag > self.refresh_steps:
            raise ValueError(f"refresh_lag ({self.refresh_lag}) must be at most refresh_steps ({self.refresh_steps})")
        return self


class ScheduleSection(Section):
    """Learning rate over the tokens that the run has trained on: linear warm-up, then as `kind` says, down to
    `final_ratio` of the peak."""

    kind: Literal["constant", "cosine", "linear"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    """Of `inner_tokens` tokens each; not used where tokens are given."""
    total_steps: Positive = 1000
    """As `warmup_steps`."""
    final_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.1
    warmup_tokens: Annotated[int, Field(ge=0)] | None = None
    """The peak is reached after this many tokens of the whole run."""
    total_tokens: Positive | None = None
    """The end is reached after this many tokens of the whole run, whatever the number of replicas and of stages that
    paths visit. Replaces `total_steps`."""
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
    """Parts of a module that are averaged at staggered times; each is due after `inner_steps`, so rounds come this much
    more often."""
    staleness: Annotated[int, Field(ge=0, le=64)] = 0
    """How many inner steps a data node may run ahead of its slowest microbatch. 0 waits for every microbatch of a step
    before the next one starts, which makes a swarm reproduce one process; 1 and more keep the pipeline full across
    steps."""
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
