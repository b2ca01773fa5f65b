"""What is verified: a model on a layout, the shape of its batches, how often and in what precision."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fourfold.errors import UserError
from fourfold.layer.schedules import schedule_of
from fourfold.outline import Step, outline
from fourfold.specs import Layout, ModelSpec, ShardingSection
from fourfold.specs.layouts import every_layout
from fourfold.specs.recompute_name import NO_RECOMPUTATION, RecomputeName
from fourfold.specs.run_file import literal

DTYPES = ("float64", "float32", "bfloat16")
"""Precisions in which a layout may be verified."""

BASE = "tiny"
"""The preset that `Trial.command` starts from."""

SEQUENCE_LENGTH = 64
"""Of a trial that is not told another one."""


@dataclass(frozen=True)
class Trial:
    """See the module.

    Attributes:
        model: the model.
        layout: the layout on trial.
        batch: sequences of a step, over all ranks.
        microbatches: pieces of a rank's share of a batch.
        sequence_length: tokens of a sequence.
        steps: SGD steps to compare.
        dtype: of computation: float64, float32 or bfloat16.
        seed: of weights and data.
        sharding: how weights are cut over the fsdp axis.
        recompute: which forwards run again.
    """

    model: ModelSpec
    layout: Layout
    batch: int
    microbatches: int
    sequence_length: int = SEQUENCE_LENGTH
    steps: int = 3
    dtype: str = "float64"
    seed: int = 0
    sharding: ShardingSection = ShardingSection()  # noqa: RUF009 - frozen
    recompute: RecomputeName = NO_RECOMPUTATION

    @classmethod
    def of(
        cls, model: ModelSpec, layout: Layout, *, batch: int | None = None, microbatches: int | None = None
    ) -> "Trial":
        """A trial with batches that fit the layout.

        Microbatches: 2 a pipeline rank, without pipeline one. Of the rows of a synthetic batch every third
        has no label: one a rank and microbatch, 3 at least, leaves some microbatches, and without
        accumulation whole ranks, with nothing that counts. A loss averaged anywhere would show.
        """
        pieces = microbatches or (1 if layout.pp == 1 else 2 * layout.pp)
        share = layout.size("dp", "fsdp") * pieces
        return cls(model, layout, batch=batch or share * math.ceil(3 / share), microbatches=pieces)

    @property
    def step(self) -> Step:
        """One of its steps."""
        return Step(
            self.model,
            self.layout,
            batch=self.batch,
            sequence_length=self.sequence_length,
            microbatches=self.microbatches,
            dtype=self.dtype,
            sharding=self.sharding,
            recompute=self.recompute,
        )

    def problems(self, world_size: int | None = None) -> list[str]:
        """Every rule that the trial breaks; ``world_size`` is the number of ranks where it is known."""
        problems = self.layout.problems(
            self.model,
            batch=self.batch,
            microbatches=self.microbatches,
            sequence_length=self.sequence_length,
            world_size=world_size,
        )
        if problems:
            return problems
        try:
            schedule_of(self.layout, microbatches=self.microbatches, layers=self.model.num_hidden_layers)
            if self.recompute.name == "budget":  # it alone may be too little, which the whole program shows
                outline(self.step)
        except UserError as error:
            return list(error.messages)
        return []

    def on_every_layout(self, world_size: int) -> Iterator["Trial"]:
        """The same trial on every layout of so many ranks that fits, with batches that all of them divide."""
        trial = replace(self, batch=world_size * self.microbatches)
        layouts = every_layout(
            world_size,
            self.model,
            batch=trial.batch,
            microbatches=trial.microbatches,
            sequence_length=trial.sequence_length,
        )
        return (
            found for found in (replace(trial, layout=layout) for layout in layouts) if not found.problems()
        )

    def shrunk(self) -> "Trial":
        """The same layout on a model that is quick, and stands to the layout as this one does.

        Heads, which tp and Ulysses divide, keep their numbers; there is a layer for every stage of the
        pipeline and one more; everything else gets small. The batch is that of `of`.
        """
        layout, model = self.layout, self.model
        stages = layout.pp * (layout.schedule.stages_per_rank or 2)
        small = model.replace(
            {
                "num_hidden_layers": min(model.num_hidden_layers, max(2, stages + 1)),
                "num_attention_heads": model.num_attention_heads,
                "num_key_value_heads": model.num_key_value_heads,
                "head_dim": 4,
                "hidden_size": 32,
                "intermediate_size": 12 * layout.tp,
                "vocab_size": min(model.vocab_size, 251),
                "rope_scaling": None,
                **({} if model.sliding_window is None else {"sliding_window": SEQUENCE_LENGTH // 3}),
            }
        )
        fitting = Trial.of(small, layout, microbatches=self.microbatches)
        return replace(self, model=small, batch=fitting.batch, sequence_length=SEQUENCE_LENGTH)

    def command(self) -> str:
        """The command that repeats this trial."""
        base = ModelSpec.preset(BASE)
        sizes = [
            f"--set model.{name}={literal(value)}"
            for name, value in self.model.model_dump().items()
            if value != getattr(base, name)
        ]
        sharding = [
            f"--{name} {value}" for name, value in self.sharding if value != getattr(ShardingSection(), name)
        ]
        recompute = [] if self.recompute.is_none else [f"--recompute {self.recompute}"]
        words = [
            f"fourfold verify --model {BASE}",
            *sizes,
            f"--layout {self.layout} --batch {self.batch} --microbatches {self.microbatches}",
            f"--sequence {self.sequence_length} --steps {self.steps} --dtype {self.dtype}",
            *([f"--seed {self.seed}"] if self.seed else []),
            *sharding,
            *recompute,
        ]
        return " ".join(words)
