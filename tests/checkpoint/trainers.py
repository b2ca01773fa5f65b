"""Small trainings to save and to load, and what they hold, found another way than checkpoints do."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from fourfold.data import SyntheticDataset
from fourfold.initialize import normal
from fourfold.mesh import Mesh
from fourfold.specs import ModelSpec, RunSpec
from fourfold.training import Trainer

# A vocabulary that no number of ranks divides, key and value heads of which ranks of tp4 hold copies, and
# layers for the four stages of pp2:zbv.
SPEC = ModelSpec.preset("tiny-qwen3").replace({"vocab_size": 61, "num_hidden_layers": 4})
LENGTH = 16

Place = tuple[str, str, int, Tensor]
SIZES = {name: math.prod(shape) for name, shape in SPEC.parameter_shapes().items()}


def run_spec(
    layout: str, *, pieces: str = "auto", optimizer: str = "adamw", dtype: str = "float32", steps: int = 6
) -> RunSpec:
    return RunSpec.model_validate(
        {
            "layout": layout,
            "model": {"preset": "tiny"},
            "data": {"sequence_length": LENGTH},
            "training": {"steps": steps, "batch": 8, "microbatches": 2, "dtype": dtype},
            "sharding": {"pieces": pieces},
            "optimizer": {"name": optimizer, "learning_rate": 0.01, "warmup_steps": 2},
        }
    )


def trainer_of(run: RunSpec, spec: ModelSpec = SPEC) -> Trainer:
    data = SyntheticDataset(spec.vocab_size, sequence_length=LENGTH, seed=run.seed)
    return Trainer(run, spec, Mesh(run.layout), data=data)


def trained(run: RunSpec, *, steps: int, spec: ModelSpec = SPEC) -> Trainer:
    trainer = trainer_of(run, spec)
    for step in range(steps):
        trainer.step(step)
    return trainer


def places(trainer: Trainer) -> Iterator[Place]:
    """Yield (name, state, index of its first element, the memory of it) of every run that this rank holds.

    Where runs lie in the whole is asked of what places the initial weights.
    """
    weights = trainer.parallel.weights
    for number, unit in trainer.parallel.units_by_number.items():
        states = [("weight", slice(0, len(unit.master)), unit.master)]
        for part, moments in trainer.update.moments(unit):
            states += [(state, part, values) for state, values in moments.items()]
        for run in replace(weights, units={number: unit}).masters():
            start = run.target.storage_offset() - unit.master.storage_offset()
            for state, part, values in states:
                if part.start <= start < part.stop:
                    first = start - part.start
                    yield run.name, state, run.first, values[first : first + run.target.numel()]


@cache
def numbers(seed: int, name: str, state: str, count: int) -> Tensor:
    """A tensor, flat, that no other seed, name or state has."""
    return normal(seed, f"{name} {state}", 0, count).float()


def fill_(trainer: Trainer, seed: int) -> None:
    """Set every weight and every moment to numbers of its own, on whatever layout the same."""
    for name, state, first, memory in places(trainer):
        memory.copy_(numbers(seed, name, state, SIZES[name])[first : first + len(memory)])
    trainer.update.continue_(seed)
    trainer.parallel.publish_()


def differing(trainer: Trainer, seed: int, held: Sequence[Place] | None = None) -> set[str]:
    """Return what a rank holds with any other bits than `fill_` gave it; and itself for a lack of updates.

    ``held`` are the places, where they are known.
    """
    wrong = {
        f"{name} {state}"
        for name, state, first, memory in held or places(trainer)
        if not torch.equal(memory, numbers(seed, name, state, SIZES[name])[first : first + len(memory)])
    }
    steps = {int(s["step"]) for o in trainer.update._optimizers for s in o.state.values() if "step" in s}
    return wrong | (set() if trainer.update.updates == seed and steps <= {seed} else {f"updates {steps}"})
