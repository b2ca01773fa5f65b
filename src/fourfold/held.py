"""What a rank holds in a training step, counted tensor by tensor while the step runs."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fourfold.collectives.recorder import watching
from fourfold.ledger import Ledger
from fourfold.memory import Category
from fourfold.mesh import Axis
from fourfold.models import Decoder, Microbatch
from fourfold.models.rope import Rotary
from fourfold.optimizer import Update
from fourfold.parallel_model import ParallelModel
from fourfold.specs import ModelSpec
from fourfold.traffic import Event


@contextmanager
def counting_memory(
    parallel: ParallelModel, update: Update, batches: Sequence[Microbatch], events: Sequence[Event]
) -> Iterator[Ledger]:
    """Yield what counts the bytes that this rank holds in the step that runs inside, by category.

    It watches every operation, which makes that step slower. The optimizer's moments are made here where
    there are none yet, as its first update would make them, so a first step holds what any other does.

    Args:
        parallel: the model in training.
        update: its optimizers.
        batches: of the step.
        events: a list that notes the collectives of the step as they start.
    """
    ledger = Ledger(parallel.mesh.device)
    ledger.events = events
    for unit in parallel.units:
        ledger.add_unit(unit)
    ledger.add(update.state(), Category.OPTIMIZER)
    for batch in batches:
        ledger.add(_tensors(batch), Category.BATCH)

    def given(axis: Axis, tensors: Sequence[Tensor]) -> None:
        # What goes over tp and pp are activations; what the collectives themselves make on the way is not.
        ledger.mark(tensors, Category.COMMUNICATION, only_new=axis.name in ("tp", "pp"))

    with watching(given), _model_parts(ledger, parallel.model), _updates(ledger), ledger:
        yield ledger


@contextmanager
def _model_parts(ledger: Ledger, model: Decoder) -> Iterator[None]:
    """Tell the ledger which tensors are logits, and which are the batch's."""
    rotary, loss = model.rotary, model.cross_entropy

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        with ledger.born_as(Category.LOGITS):
            ledger.mark([logits], Category.LOGITS)
            return loss(logits, labels)

    model.rotary, model.cross_entropy = _Angles(ledger, rotary.spec), loss_of
    try:
        yield
    finally:
        model.rotary, model.cross_entropy = rotary, loss


@contextmanager
def _updates(ledger: Ledger) -> Iterator[None]:
    """Tell the ledger what an optimizer makes."""
    open_steps: list[ExitStack] = []

    def before_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # The fused kernel makes nothing on the way; AdamW in operations, on the meta device, does.
        is_fused = isinstance(optimizer, torch.optim.AdamW)
        open_steps.append(ExitStack())
        open_steps[-1].enter_context(ledger.born_as(Category.OPTIMIZER, only_what_stays=is_fused))

    def after_update(*_: Any) -> None:
        open_steps.pop().close()

    hooks = [
        register_optimizer_step_pre_hook(before_update),
        register_optimizer_step_post_hook(after_update),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Angles(Rotary):
    """Rotary angles that count with the batch, as do a rank's own tokens of it."""

    def __init__(self, ledger: Ledger, spec: ModelSpec):
        super().__init__(spec)
        self._ledger = ledger

    def __call__(self, batch: Microbatch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """As `Rotary`."""
        self._ledger.mark(_tensors(batch), Category.BATCH)
        with self._ledger.born_as(Category.BATCH):
            return super().__call__(batch, dtype)


def _tensors(batch: Microbatch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.input_ids_BS, batch.labels_BS, batch.position_ids_BS
