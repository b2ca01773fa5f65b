"""The sections of a run file: every setting with its meaning, its limits and its default."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer

from fourfold.errors import UserError
from fourfold.specs.model import ModelSpec
from fourfold.specs.recompute_name import NO_RECOMPUTATION, RecomputeName, written_policies
from fourfold.specs.spec import Spec

Share = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=0)]


def _recompute(value: object) -> RecomputeName:
    """Read the policy's name. A ``ValueError`` is one problem among others to pydantic."""
    if isinstance(value, RecomputeName):
        return value
    if not isinstance(value, str):
        raise ValueError(f"recompute={value!r} must be a string in quotes, e.g. 'full'")
    try:
        return RecomputeName.parse(value)
    except UserError as error:
        raise ValueError(str(error)) from None


class ModelSection(Spec):
    """[model]: which model. A preset, a config.json, or the sizes themselves; sizes given here win.

    In the run file the sizes stand in the section itself, beside ``preset``, ``config`` or ``init``.
    """

    preset: str | None = Field(default=None, description="name of a known model")
    config: str | None = Field(default=None, description="path of a Hugging Face config.json or its folder")
    init: str | None = Field(
        default=None, description="a Hugging Face folder with config.json and the weights to begin with"
    )
    overrides: dict[str, Any] = Field(default_factory=dict, description="any fields of ModelSpec")

    @classmethod
    def prepare(cls, values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Move the fields of ModelSpec into ``overrides``."""
        sizes = {name: values.pop(name) for name in ModelSpec.model_fields if name in values}
        return ({**values, "overrides": {**values.get("overrides", {}), **sizes}} if sizes else values), []

    def inconsistencies(self) -> list[str]:
        """Return what keeps the model from being made."""
        try:
            # Which vocabulary the tokenizer has is not known here; one id fits into any.
            self._resolve(vocab_size=1)
        except UserError as error:
            return list(error.messages)
        return []

    def spec(self, vocab_size: int | None = None) -> ModelSpec:
        """Return the model, for a tokenizer of this many ids where it is known.

        The tokenizer's size takes the place of a preset's. A vocabulary given here or in a config.json
        stands, and must hold the tokenizer's. Raises ``UserError`` with every problem at once.
        """
        try:
            return self._resolve(vocab_size)
        except UserError as error:
            raise UserError(*(f"model.{message}" for message in error.messages)) from None

    def _resolve(self, vocab_size: int | None) -> ModelSpec:
        """Make the model; messages start with the key that is wrong."""
        given = [name for name in ("preset", "config", "init") if getattr(self, name)]
        if len(given) > 1:
            raise UserError(f"{' and model.'.join(given)} are given together: leave only one")
        config = self.config or self.init
        if not (given or self.overrides):
            raise UserError("preset is missing: give e.g. preset = 'small-2m', or config, or the sizes")
        overrides = dict(self.overrides)
        if vocab_size is not None and not config:
            overrides.setdefault("vocab_size", vocab_size)
        if self.preset:
            spec = ModelSpec.preset(self.preset).replace(overrides)
        elif config:
            try:
                base = ModelSpec.from_config(config)
            except UserError as error:
                raise UserError(*(f"{given[0]}: {message}" for message in error.messages)) from None
            spec = base.replace(overrides)
        else:
            spec = ModelSpec.model_validate(overrides)
        if vocab_size is not None and spec.vocab_size < vocab_size:
            raise UserError(
                f"vocab_size={spec.vocab_size} is less than the tokenizer's: use {vocab_size} or more"
            )
        return spec


class DataSection(Spec):
    """[data]: the text, and how it becomes sequences."""

    source: Annotated[tuple[str, ...], BeforeValidator(lambda v: (v,) if isinstance(v, str) else v)] = Field(
        default=("python-stdlib",),
        strict=False,
        min_length=1,
        description="'python-stdlib', or a path or list of paths of text, JSONL or Parquet files or folders",
    )
    field: str = Field(default="text", min_length=1, description="of JSONL and Parquet records: the text")
    tokenizer: str = Field(default="bytes", description="'bytes', or the path of a tokenizer.json")
    sequence_length: int = Field(default=256, ge=1, description="tokens in a sequence")
    held_out: float = Field(default=0.02, gt=0, le=0.5, description="share of documents kept for evaluation")


class TrainingSection(Spec):
    """[training]: how long, on how much at a time, in which precision."""

    steps: int = Field(ge=1, description="optimizer steps")
    batch: int = Field(ge=1, description="sequences a step, over all ranks")
    microbatches: int = Field(default=1, ge=1, description="pieces in which a rank runs its share of a batch")
    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        default="float32", description="of compute; weights are kept in float32, or float64 for float64"
    )
    recompute: Annotated[
        RecomputeName, BeforeValidator(_recompute), PlainSerializer(RecomputeName.__str__)
    ] = Field(
        default=NO_RECOMPUTATION,
        description=f"forwards that run again instead of being kept: {', '.join(written_policies())}",
    )
    skip_bad_steps: Count = Field(
        default=0,
        description="so many steps in a row whose loss or gradient is not finite are passed over; the run "
        "stops at one more",
    )


class ShardingSection(Spec):
    """[sharding]: how weights and their companions are cut over the fsdp axis."""

    pieces: Literal["auto", "blocks", "matrices", "rows", "flat"] = Field(
        default="auto",
        description="what a rank owns: whole matrices, whole rows, or equal runs of elements; blocks: "
        "matrices whole, embedding and head by rows; auto: blocks where that balances or for muon, else rows",
    )
    prefetch: Count = Field(default=1, description="segments that are gathered ahead of their use")
    accumulate: Literal["auto", "pieces", "whole"] = Field(
        default="auto",
        description="over microbatches, pieces: sum gradients to their owners each time (small); "
        "whole: keep weights and gradients whole until the last one (fast); auto: whole in a pipeline",
    )


class OptimizerSection(Spec):
    """[optimizer]: AdamW or Muon, and the learning rate."""

    name: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="adamw (arXiv:1711.05101), or muon (arXiv:2502.16982) for the matrices of the blocks",
    )

    learning_rate: float = Field(gt=0, allow_inf_nan=False, description="the highest rate of the schedule")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), strict=False, description="decay of both moments")
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False, description="added to the root of the second")
    weight_decay: float = Field(default=0.1, ge=0, allow_inf_nan=False, description="of matrices")
    clip_norm: float = Field(
        default=1.0, ge=0, allow_inf_nan=False, description="largest gradient norm, 0: off"
    )
    schedule: Literal["cosine", "wsd", "constant"] = Field(
        default="cosine", description="of the rate after warm-up; wsd: stable, then a linear decay"
    )
    warmup_steps: Count = Field(default=0, description="steps of linear rise at the start")
    decay_fraction: Share = Field(default=0.2, description="wsd: share of all steps that decay")
    final_fraction: Share = Field(default=0.1, description="cosine, wsd: last rate / highest rate")


class EvaluationSection(Spec):
    """[evaluation]: the loss on held-out documents."""

    every: Count = Field(default=0, description="steps between evaluations, 0: only at the end")
    batches: int = Field(default=8, ge=1, description="batches in one evaluation")


class CheckpointSection(Spec):
    """[checkpoint]: when weights and moments are saved, besides at the end, and what stays."""

    every: Count = Field(default=1000, description="steps between checkpoints, 0: only at the end")
    keep: int = Field(default=2, ge=1, description="how many of the newest stay")
    keep_every: Count = Field(
        default=0, description="those of every so many steps stay as well, 0: none of them"
    )


class SampleSection(Spec):
    """[sample]: the text generated at the end of a run."""

    prompt: str = Field(default="", description="how the text starts, empty: as a document starts")
    tokens: Count = Field(default=200, description="tokens to generate, 0: no sample")
    temperature: float = Field(default=0.8, ge=0, allow_inf_nan=False, description="0: the likeliest token")
    top_k: Count = Field(default=50, description="draw from the k likeliest tokens, 0: from all")


class LoggingSection(Spec):
    """[logging]: where metrics go besides the run folder, and what MFU and HFU are fractions of."""

    tensorboard: bool = Field(default=False, description="write TensorBoard files into the run folder")
    wandb: str = Field(default="", description="Weights & Biases project, empty: off")
    peak_tflops: float = Field(
        default=0,
        ge=0,
        allow_inf_nan=False,
        description="dense peak of one device in TFLOP/s, 0: from the table of devices, or measured",
    )
