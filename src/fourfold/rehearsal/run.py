"""Run a training step of one rank of a layout without the others, and without data."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fourfold.collectives import record
from fourfold.data import Dataset
from fourfold.errors import UserError
from fourfold.flop_counter import FlopCounter
from fourfold.memory import Category
from fourfold.mesh import Axis, RehearsedMesh, StandIn
from fourfold.models import Microbatch
from fourfold.models.rope import Rotary
from fourfold.outline import Step
from fourfold.parallel_model import ParallelModel
from fourfold.rehearsal.kernels import Kernels
from fourfold.rehearsal.ledger import Ledger
from fourfold.specs import ModelSection, ModelSpec, RunSpec
from fourfold.traffic import Event
from fourfold.training import Trainer


@dataclass(frozen=True)
class Recorded:
    """What one rank does in a training step.

    Attributes:
        rank: which one.
        peak_bytes: what it holds when it holds most, by category.
        rest_bytes: what it holds after the step, by category.
        flops: that it executes.
        events: what it sends and receives, in order.
    """

    rank: int
    peak_bytes: Mapping[Category, int]
    rest_bytes: Mapping[Category, int]
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
    Process groups are stand-ins. The second step counts, in which the optimizer has its state from the first.

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
    watch = Watch(torch.device("meta"))
    mesh = RehearsedMesh(run.layout, rank, StandIn(backend, watch.touch))
    data = watch.rows_of(data or WholeRows(step.spec.vocab_size, step.sequence_length))
    with Kernels(device_type):
        return watch.second_step(Trainer(run, step.spec, mesh, data=data))


def run_of(step: Step) -> RunSpec:
    """A run of two such steps."""
    return RunSpec.model_validate(
        {
            "layout": step.layout,
            "model": ModelSection(overrides=step.spec.model_dump(mode="json", exclude_none=True)),
            "data": {"sequence_length": step.sequence_length},
            "training": {
                "steps": 2,
                "batch": step.batch,
                "microbatches": step.microbatches,
                "dtype": step.dtype,
                "recompute": step.recompute,
            },
            "sharding": step.sharding,
            "optimizer": {"name": step.optimizer, "learning_rate": 1e-3},
        }
    )


class Watch:
    """Counts what the second step of a trainer holds, computes and sends; on any device."""

    def __init__(self, device: torch.device):
        self._device = device
        self.ledger = Ledger(device)
        self.counter = FlopCounter()

    def touch(self, axis: Axis, tensors: Sequence[Tensor]) -> None:
        """Be told that an operation on an axis starts with these tensors.

        What goes over tp and pp are activations; what the collectives themselves make on the way is not.
        """
        self.ledger.mark(tensors, Category.COMMUNICATION, only_new=axis.name in ("tp", "pp"))

    def rows_of(self, data: Dataset) -> Dataset:
        """The same rows, counted as the batch."""
        return _Rows(data, self._device, self.ledger)

    def second_step(self, trainer: Trainer) -> Recorded:
        """Run two steps and return what the second one does."""
        ledger, parallel = self.ledger, trainer.parallel
        for unit in parallel.units:
            ledger.add_unit(unit)
        with ExitStack() as stack:
            stack.enter_context(self._categories(parallel))
            stack.enter_context(self.counter)
            stack.enter_context(ledger)
            ledger.events = stack.enter_context(record())
            trainer.step(0)
            ledger.begin()
            self.counter.flops = 0
            events = stack.enter_context(record())
            trainer.step(1)
        return Recorded(parallel.mesh.rank, ledger.peak, ledger.live, self.counter.flops, tuple(events))

    @contextmanager
    def _categories(self, parallel: ParallelModel) -> Iterator[None]:
        """Tell the ledger what is made where."""
        ledger, model = self.ledger, parallel.model
        rotary, loss = model.rotary, model.cross_entropy

        def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
            with ledger.born_as(Category.LOGITS):
                ledger.mark([logits], Category.LOGITS)
                return loss(logits, labels)

        open_steps: list[ExitStack] = []

        def before_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            open_steps.append(ExitStack())
            flops = self.counter.flops  # those of Muon are not counted
            open_steps[-1].callback(lambda: setattr(self.counter, "flops", flops))
            # The fused kernel makes nothing on the way; AdamW in operations, on the meta device, does.
            is_fused = isinstance(optimizer, torch.optim.AdamW)
            open_steps[-1].enter_context(ledger.born_as(Category.OPTIMIZER, only_what_stays=is_fused))

        def after_update(*_: Any) -> None:
            open_steps.pop().close()

        model.rotary, model.cross_entropy = _Angles(ledger, rotary.spec), loss_of
        hooks = [
            register_optimizer_step_pre_hook(before_update),
            register_optimizer_step_post_hook(after_update),
        ]
        try:
            yield
        finally:
            model.rotary, model.cross_entropy = rotary, loss
            for hook in hooks:
                hook.remove()


class _Rows:
    """Rows on a device, which count as the batch."""

    def __init__(self, data: Dataset, device: torch.device, ledger: Ledger):
        self._data = data
        self._device = device
        self._ledger = ledger
        self.vocab_size = data.vocab_size
        self.valid_tokens = data.valid_tokens

    def rows(self, step: int, batch: int, rows: range) -> Microbatch:
        """Return rows of a step, on the device."""
        with self._ledger.born_as(Category.BATCH):
            found = self._data.rows(step, batch, rows).to(self._device)
        tensors = (found.input_ids_BS, found.labels_BS, found.position_ids_BS)
        self._ledger.add(tensors, Category.BATCH)
        return found


class _Angles(Rotary):
    """Rotary angles that count with the batch."""

    def __init__(self, ledger: Ledger, spec: ModelSpec):
        super().__init__(spec)
        self._ledger = ledger

    def __call__(self, batch: Microbatch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """As `Rotary`."""
        with self._ledger.born_as(Category.BATCH):
            return super().__call__(batch, dtype)
