"""The tables of a manifest whose model was made elsewhere: its rotary embedding, the weights that it starts from."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from protocol.manifest.section import Section
from swarm.vocabulary.types import MAX_STAGES

Turns = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
HexDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


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


class StartSection(Section):
    """The existing model from which the run starts, as `skipstone new --from-model` has cut it."""

    modules: Annotated[tuple[HexDigest, ...], Field(min_length=1, max_length=MAX_STAGES)]
    """The digest of each stage's first anchor, in order of stage: BLAKE3, as of the anchor that a round leads to. All
    experts of a stage start alike. Who has the model's folder cuts a module from it; all others fetch it from peers."""
