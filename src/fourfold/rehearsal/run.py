"""Run a training step of one rank of a layout without the others, and without data."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fourfold.data import Dataset
from fourfold.errors import UserError
from fourfold.flop_counter import FlopCounter
from fourfold.mesh import RehearsedMesh, StandIn
from fourfold.models import Microbatch
from fourfold.outline import Step
from fourfold.rank_memory import RankMemory
from fourfold.rehearsal.kernels import Kernels
from fourfold.specs import ModelSection, RunSpec
from fourfold.traffic import Event
from fourfold.training import Trainer


@dataclass(frozen=True)
class Recorded:
    """What one rank does in a training step.

    Attributes:
        rank: which one.
        held: what it holds, by category.
        flops: that it executes.
        events: what it sends and receives, in order.
    """

    rank: int
    held: RankMemory
    flops: int
    events: Sequence[Event]


@dataclass(frozen=True)
class WholeRows:
    """Rows of one document each, without data: what a rehearsal reads."""

    vocab_size: int
    sequence_length: int

    def valid_tokens(self, step: int, batch: int) -> int:
        """Return the number of labels: all count."""
        return batch * self.sequence_length

    def rows(self, step: int, batch: int, rows: range) -> Microbatch:
        """Return rows of any step."""
        B, S = len(rows), self.sequence_length
        ids, labels, positions = (torch.empty(B, S, dtype=torch.int64, device="meta") for _ in range(3))
        return Microbatch(ids, labels, positions, ((S,),) * B)


def rehearse(
    step: Step, *, rank: int = 0, device_type: str = "cuda", data: Dataset | None = None
) -> Recorded:
    """Return what a rank of a layout would do in a step, on its own and without data.

    The code is that of a run, on PyTorch's meta device: tensors have shapes and sizes, but no elements.
    Process groups are stand-ins. The optimizer has its state from the beginning.

    Args:
        step: the model, its layout, and what it trains on.
        rank: of the layout.
        device_type: ``cuda`` with NCCL, or ``cpu`` with gloo: whose kernels and collectives it would use.
        data: gives the rows; by default each is one document, and all labels count.

    Raises:
        UserError: with every rule that the layout breaks, or for a rank that it does not have.
    """
    run = run_of(step)
    run.check()
    if not 0 <= rank < step.layout.world_size:
        raise UserError(
            f"rank {rank} is not in {step.layout}: use 0 to {step.layout.world_size - 1}",
        )
    backend = "nccl" if device_type == "cuda" else "gloo"
    mesh = RehearsedMesh(run.layout, rank, StandIn(backend))
    data = data or WholeRows(step.spec.vocab_size, step.sequence_length)
    with Kernels(device_type):
        return recorded(Trainer(run, step.spec, mesh, data=data))


def run_of(step: Step) -> RunSpec:
    """A run of one such step."""
    return RunSpec.model_validate(
        {
            "layout": step.layout,
            "model": ModelSection(overrides=step.spec.model_dump(mode="json", exclude_none=True)),
            "data": {"sequence_length": step.sequence_length},
            "training": {
                "steps": 1,
                "batch": step.batch,
                "microbatches": step.microbatches,
                "dtype": step.dtype,
                "recompute": step.recompute,
            },
            "sharding": step.sharding,
            "optimizer": {"name": step.optimizer, "learning_rate": 1e-3},
        }
    )


@contextmanager
def counting_flops() -> Iterator[FlopCounter]:
    """Yield what counts the FLOPs of what runs inside, on any device; the optimizer's do not count."""
    before: list[int] = []
    with FlopCounter() as counter:
        hooks = [
            register_optimizer_step_pre_hook(lambda *_: before.append(counter.flops)),
            register_optimizer_step_post_hook(lambda *_: setattr(counter, "flops", before.pop())),
        ]
        try:
            yield counter
        finally:
            for hook in hooks:
                hook.remove()


def recorded(trainer: Trainer) -> Recorded:
    """Run a trainer's first step and return what it does; on any device."""
    with counting_flops() as counter:
        report = trainer.step(0, counts_memory=True)
    assert report.held is not None
    return Recorded(trainer.parallel.mesh.rank, report.held, counter.flops, report.events)
