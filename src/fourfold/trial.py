"""What is verified: a model on a layout, the shape of its batches, how often and in what precision."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fourfold.errors import UserError
from fourfold.layer.schedules import microbatches_of
from fourfold.outline import Step, outline
from fourfold.specs import Layout, ModelSpec, ShardingSection
from fourfold.specs.layouts import every_layout
from fourfold.specs.run_file import literal

DTYPES = ("float64", "float32", "bfloat16")
"""Precisions in which a layout may be verified."""

BASE = "tiny"
"""The preset that `Trial.command` starts from."""

SEQUENCE_LENGTH = 64
"""Of a trial that is not told another one."""


@dataclass(frozen=True)
class Trial(Step):
    """A step, how often it is taken, and from which start.

    Attributes:
        steps: SGD steps to compare; the optimizer of the step is not used.
        seed: of weights and data.
        trained: the step that is to be trained, where it is another one: what the layout leaves open follows
            from that one.
    """

    dtype: str = "float64"
    steps: int = 3
    seed: int = 0
    trained: Step | None = None

    @classmethod
    def of(
        cls, spec: ModelSpec, layout: Layout, *, batch: int | None = None, microbatches: int | None = None
    ) -> "Trial":
        """A trial with batches that fit the layout.

        Microbatches: as many as a schedule's file is for, else 2 a pipeline rank, without pipeline one. Of
        the rows of a synthetic batch every third has no label: one a rank and microbatch, 3 at least, leaves
        some microbatches, and without accumulation whole ranks, with nothing that counts. A loss averaged
        anywhere would show.
        """
        pieces = microbatches or microbatches_of(layout, otherwise=1 if layout.pp == 1 else 2 * layout.pp)
        share = layout.size("dp", "fsdp") * pieces
        rows = batch or share * math.ceil(3 / share)
        return cls(spec, layout, batch=rows, sequence_length=SEQUENCE_LENGTH, microbatches=pieces)

    def problems(self, world_size: int | None = None) -> list[str]:
        """Every rule that the trial breaks; a memory budget may be too little as well."""
        problems = super().problems(world_size)
        if not problems and self.recompute.name == "budget":  # the whole program shows it
            try:
                outline(self)
            except UserError as error:
                problems += error.messages
        return problems

    def on_every_layout(self, world_size: int) -> Iterator["Trial"]:
        """The same trial on every layout of so many ranks that fits, with batches that all of them divide."""
        trial = replace(self, batch=world_size * self.microbatches)
        layouts = every_layout(
            world_size,
            self.spec,
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
        layout, model = self.layout, self.spec
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
        return replace(self, spec=small, batch=fitting.batch, sequence_length=SEQUENCE_LENGTH)

    def command(self) -> str:
        """The command that repeats this trial."""
        base = ModelSpec.preset(BASE)
        sizes = [
            f"--set model.{name}={literal(value)}"
            for name, value in self.spec.model_dump().items()
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
