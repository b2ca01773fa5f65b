"""Where a loss or a gradient that is not finite began: on which rank, and in which parameter."""

from collections.abc import Sequence

import torch

from fourfold.collectives import all_gather
from fourfold.models import Microbatch
from fourfold.parallel_model import ParallelModel
from fourfold.program.actions import SUMS


def first_not_finite(parallel: ParallelModel, batches: Sequence[Microbatch], *, valid_tokens: int) -> str:
    """Return, in words, where what is not finite in a step began. Called on every rank, after its update.

    The gradients are summed over ranks already, so the step is run again on every rank without sums: the
    weights are untouched and the batch is the same, so the same numbers come out, rank by rank.

    Args:
        parallel: the model; its weights are those before the step.
        batches: this rank's rows of the step.
        valid_tokens: labels that count in all rows of the step.
    """
    actions = [action for action in parallel.program.ranks[parallel.mesh.pp.rank] if action.kind not in SUMS]
    loss_sum = parallel.executor.step(
        actions, parallel.own(batches), valid_tokens=valid_tokens, update=lambda _: None
    )
    names = [name for name, parameter in parallel.model.named_parameters() if parameter.requires_grad]
    gradients = dict(pair for unit in parallel.units if unit.is_trained for pair in unit.named(unit.gradient))
    bad = [name for name in reversed(names) if name in gradients and not gradients[name].isfinite().all()]
    axis = parallel.mesh.world
    mine = [int(not torch.isfinite(loss_sum)), names.index(bad[0]) if bad else -1]
    found = all_gather(torch.tensor([mine], device=parallel.mesh.device), axis).tolist()
    of_a_stage = axis.size // parallel.mesh.pp.size
    # The backward meets the last pipeline ranks first.
    for index in sorted(range(axis.size), key=lambda index: (-(index // of_a_stage), index)):
        rank, (loss_is_bad, parameter) = axis.ranks[index], found[index]
        if loss_is_bad or parameter >= 0:
            what = "the loss" if loss_is_bad else "a gradient"
            first = f"; the backward meets it first in {names[parameter]}" if parameter >= 0 else ""
            return f"{what} is not finite on rank {rank}{first}"
    return "each rank's loss and gradients are finite, their sum over ranks is not"
