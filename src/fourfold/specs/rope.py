"""How rotary position embeddings are stretched to longer contexts."""

from typing import Annotated, Any, Literal

from pydantic import Field

from fourfold.specs.spec import Spec

RopeType = Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

# Rope type -> (fields it needs, fields it may have), besides rope_type and factor.
FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": ((), ()),
    "dynamic": ((), ()),
    "llama3": (("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("original_max_position_embeddings",),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (
        ("original_max_position_embeddings", "short_factor", "long_factor"),
        ("attention_factor",),
    ),
}


class RopeScaling(Spec):
    """A kind of rotary scaling and its numbers, under the names that Hugging Face gives them.

    A field that the kind does not use is refused. Optional fields that are None take the default of
    ``transformers.modeling_rope_utils``.
    """

    rope_type: RopeType = Field(description="the kind of scaling")
    factor: float = Field(ge=1, allow_inf_nan=False, description="longest context / original context")
    original_max_position_embeddings: int | None = Field(default=None, ge=1, description="original context")
    low_freq_factor: Positive | None = Field(
        default=None, description="llama3: wavelengths above scale fully"
    )
    high_freq_factor: Positive | None = Field(default=None, description="llama3: wavelengths below stay")
    attention_factor: Positive | None = Field(
        default=None, description="yarn, longrope: scale of cos and sin"
    )
    beta_fast: Positive | None = Field(
        default=None, description="yarn: rotations above which nothing changes"
    )
    beta_slow: Positive | None = Field(default=None, description="yarn: rotations below which all is scaled")
    mscale: float | None = Field(default=None, description="yarn: numerator of the derived attention_factor")
    mscale_all_dim: float | None = Field(default=None, description="yarn: denominator of the same")
    truncate: bool | None = Field(default=None, description="yarn: round the correction range outwards")
    short_factor: tuple[Positive, ...] | None = Field(
        default=None,
        strict=False,
        description="longrope: divisors of each frequency, within original context",
    )
    long_factor: tuple[Positive, ...] | None = Field(
        default=None, strict=False, description="longrope: divisors of each frequency, beyond it"
    )

    def inconsistencies(self) -> list[str]:
        """Return what the kind lacks and what it does not use."""
        needed, optional = FIELDS[self.rope_type]
        given = {name for name, value in self if value is not None} - {"rope_type", "factor"}
        problems = [
            f"{name} is missing: rope_type='{self.rope_type}' needs it"
            for name in needed
            if name not in given
        ]
        problems += [
            f"{name} is not used by rope_type='{self.rope_type}': leave it out"
            for name in sorted(given - {*needed, *optional})
        ]
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and high <= low:
            problems.append(
                f"high_freq_factor={high} is not above low_freq_factor={low}: use more than {low}"
            )
        return problems

    def to_config(self) -> dict[str, Any]:
        """Return the content of a config.json's ``rope_scaling``."""
        return self.model_dump(mode="json", exclude_none=True)
