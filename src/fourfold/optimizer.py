"""The optimizer on the pieces that a rank owns: AdamW, Muon, the gradient norm, clipping."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fourfold.batch.units import Unit
from fourfold.collectives import all_reduce_
from fourfold.errors import UserError
from fourfold.mesh import Axis
from fourfold.parallel_model import ParallelModel
from fourfold.specs import OptimizerSection


@dataclass(frozen=True)
class OwnedParameters:
    """What a rank's optimizer updates: parameters whose ``.grad`` are the summed gradients, all of them
    views.

    Attributes:
        matrices: matrices of blocks, each in its shape, where they are asked for by name.
        decayed: other matrices, as few flat runs.
        plain: norms and biases, as few flat runs.
    """

    matrices: list[nn.Parameter]
    decayed: list[nn.Parameter]
    plain: list[nn.Parameter]


def owned_parameters(units: Sequence[Unit], *, matrices: frozenset[str] = frozenset()) -> OwnedParameters:
    """The master pieces of this rank as parameters, views into the units' buffers.

    Weight decay follows the parameters' own shapes: matrices come first in a piece, norms and biases after
    them.

    Args:
        units: of the model.
        matrices: the names of those to return in their shapes. The rank owns each whole or not at all.

    Raises UserError where a rank owns only a part of one of ``matrices``.
    """
    found = OwnedParameters([], [], [])

    def add(target: list[nn.Parameter], unit: Unit, part: slice, shape: Sequence[int] = (-1,)) -> None:
        if unit.master[part].numel():
            parameter = nn.Parameter(unit.master[part].view(*shape))
            parameter.grad = unit.summed[part].view(*shape)
            target.append(parameter)

    for unit in units:
        if not unit.is_trained:
            continue
        start = 0
        for owned in unit.owned:
            if owned.name in matrices:
                if not owned.is_whole:
                    raise UserError(
                        f"Muon needs whole matrices, and a rank owns a part of {owned.name} (Batch axis): "
                        "use sharding.pieces = 'blocks' or 'matrices'"
                    )
                add(found.decayed, unit, slice(start, owned.part.start))
                add(found.matrices, unit, owned.part, owned.shape)
                start = owned.part.stop
        add(found.decayed, unit, slice(start, max(start, unit.num_decayed)))
        add(found.plain, unit, slice(unit.num_decayed, len(unit.summed)))
    return found


def optimizers(parallel: ParallelModel, spec: OptimizerSection) -> list[torch.optim.Optimizer]:
    """The optimizers of this rank's pieces; only matrices decay.

    ``adamw``: AdamW (Loshchilov and Hutter 2019) on everything. ``muon``: Muon (Jordan 2024), its update
    scaled to the size of AdamW's (Liu et al. 2025) so that one learning rate fits both, on the matrices of
    the blocks, AdamW on the rest. Muon's update needs a whole matrix, and its owner has it: no communication.
    """
    is_muon = spec.name == "muon"
    owned = owned_parameters(parallel.units, matrices=parallel.block_matrices if is_muon else frozenset())
    groups = [
        {"params": owned.decayed, "weight_decay": spec.weight_decay},
        {"params": owned.plain, "weight_decay": 0.0},
    ]
    made: list[torch.optim.Optimizer] = []
    if owned.decayed or owned.plain:
        # The meta device, of rehearsals, has no fused one.
        fused = parallel.mesh.device.type != "meta"
        made.append(
            torch.optim.AdamW(groups, lr=spec.learning_rate, betas=spec.betas, eps=spec.eps, fused=fused)
        )
    if owned.matrices:
        made.append(
            torch.optim.Muon(
                owned.matrices,
                lr=spec.learning_rate,
                weight_decay=spec.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return made


MOMENTS: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    torch.optim.Muon: ("momentum_buffer",),
}
"""What an optimizer keeps of each element, by torch's names."""


def moments_(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return an optimizer's state of a parameter, made as its first step makes it where there is none."""
    state = optimizer.state[parameter]
    if not state:
        if isinstance(optimizer, torch.optim.AdamW):
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for name in MOMENTS[type(optimizer)]:
            state[name] = torch.zeros_like(parameter, requires_grad=False)
    return state


NORM_ROW = 4096
"""Squares of so many elements are summed in the gradients' own dtype, sums of those in float64."""


def gradient_norm(units: Sequence[Unit], axis: Axis) -> float:
    """The 2-norm of the whole gradient, each parameter counted once: the squares of all ranks' pieces,
    summed.

    One float32 sum over 8 million squares is off by 4e-4; sums over short rows, added in float64, are off by
    1e-8 and take no longer. Where a square overflows although the gradients are finite, all is float64.
    Args:
        units: of this rank, without those that another rank of ``axis`` counts.
        axis: the ranks that hold different pieces. All of them call it and get the same.
    """
    pieces = [unit.summed for unit in units if unit.is_trained]
    zero = torch.zeros((), dtype=torch.float64, device=units[0].master.device)

    def total_of(square_sum: Callable[[Tensor], Tensor]) -> Tensor:
        return all_reduce_(sum(map(square_sum, pieces), start=zero.clone()), axis)

    total = total_of(_square_sum)
    if not torch.isfinite(total):
        total = total_of(lambda piece: piece.double().square().sum())
    return math.sqrt(float(total)) if torch.isfinite(total) else float(total)


def _square_sum(flat: Tensor) -> Tensor:
    whole = flat.numel() - flat.numel() % NORM_ROW
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, NORM_ROW), dim=1)
    return norms.double().square().sum() + flat[whole:].double().square().sum()


def clip_(units: Sequence[Unit], *, norm: float, max_norm: float) -> None:
    """Scale all gradients by ``max_norm / norm`` where ``norm`` is larger."""
    gradients = [unit.summed for unit in units if unit.is_trained]
    if norm > max_norm and gradients:  # a pipeline rank may have frozen layers only
        torch._foreach_mul_(gradients, max_norm / norm)


class Update:
    """What UPDATE does: the norm, the check that all is finite, clipping, the optimizer.

    Args:
        parallel: whose weights and gradients it works on.
        optimizers: of this rank's pieces.
        clip_norm: the largest gradient norm, 0 for none.

    Attributes:
        learning_rate: of the next update.
        norm: of the whole gradient at the last update, before clipping.
        updates: how many there were.
    """

    def __init__(
        self, parallel: ParallelModel, optimizers: Sequence[torch.optim.Optimizer], *, clip_norm: float
    ):
        self._parallel = parallel
        self._optimizers = optimizers
        self._clip_norm = clip_norm
        self.learning_rate = 0.0
        self.norm = math.nan
        self.updates = 0

    def moments(self, unit: Unit) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """Yield the runs of a unit's piece that are updated together, each with its flat moments by name.

        They are what the optimizer works on, to be read or written; where it has none yet, they are made.
        """
        for optimizer in self._optimizers:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if parameter.untyped_storage().data_ptr() == unit.master.untyped_storage().data_ptr():
                    start = parameter.storage_offset() - unit.master.storage_offset()
                    state = moments_(optimizer, parameter)
                    yield (
                        slice(start, start + parameter.numel()),
                        {name: state[name].view(-1) for name in MOMENTS[type(optimizer)]},
                    )

    def state(self) -> Iterator[Tensor]:
        """Yield every tensor that the optimizers keep; where they have none yet, they are made."""
        for optimizer in self._optimizers:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                yield from moments_(optimizer, parameter).values()

    def continue_(self, updates: int) -> None:
        """Go on after so many updates, whose moments were written to `moments`."""
        self.updates = updates
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                if "step" in state:
                    state["step"].fill_(updates)

    def __call__(self, loss_sum: Tensor) -> None:
        """Update the weights, given the loss of the global batch; not at all if it or the norm is not finite.

        Loss and norm are sums over ranks, so every rank comes to the same decision.
        """
        units = self._parallel.units
        self.norm = gradient_norm(self._parallel.counted_units, self._parallel.norm_axis)
        if not (math.isfinite(self.norm) and math.isfinite(float(loss_sum))):
            return
        if self._clip_norm:
            clip_(units, norm=self.norm, max_norm=self._clip_norm)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate
            optimizer.step()
        self.updates += 1
        self._parallel.publish_()
