"""Where a layout first differs from one process: in which block, forward or backward, and on which ranks.

The first step is run once more on both, with every block's output and the gradient that reaches it kept.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fourfold.collectives import all_gather
from fourfold.initialize import initialize_
from fourfold.models import Decoder, Microbatch
from fourfold.oracle import Oracle
from fourfold.parallel_model import ParallelModel
from fourfold.specs import AXES, BATCH_AXES, Layout
from fourfold.specs.layout import AXIS_WORDS
from fourfold.training import rank_batches

Found = dict[tuple[str, str, int], Tensor]
"""By ``forward`` or ``backward``, block and number of the microbatch: (B, S, C)."""

SUMS = "sums of the weight gradients"
"""Where every block agrees, forward and backward, and the gradients of the weights do not."""

UNKNOWN = -1
"""The number of a microbatch with other tokens than the rank's: nothing there is right."""


@dataclass(frozen=True)
class FirstDifference:
    """The first place, in the order of a step, at which some rank is off.

    Attributes:
        place: ``forward of layer.2``, ``backward of layer.2``, or `SUMS`.
        error: the worst over ranks, relative to the largest magnitude there; None for `SUMS`.
        ranks: which ranks are off.
        axes: those that communicate there, as far as the ranks do not rule them out.
    """

    place: str
    error: float | None
    ranks: tuple[int, ...]
    axes: tuple[str, ...]

    def __str__(self) -> str:
        size = "" if self.error is None else f", relative error {self.error:.1e}"
        ranks = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {_numbers(self.ranks)}"
        suspects = ", ".join(f"{axis} ({AXIS_WORDS[axis]} axis)" for axis in self.axes)
        return (
            f"first difference: {self.place} on {ranks}{size}; what communicates there: {suspects or 'none'}"
        )


def first_difference(
    parallel: ParallelModel, oracle: Oracle, *, microbatches: int, dtype: str, tolerance: float
) -> FirstDifference | None:
    """Run the first step on both and compare them block by block. Called on every rank.

    The weights of ``parallel`` are those of the start again afterwards. Returns None where every block
    agrees: then the sums of the weight gradients differ, the update, or a later step.
    """
    mesh, model = parallel.mesh, parallel.model
    spec, valid_tokens = model.spec, oracle.data.valid_tokens(0, oracle.batch)
    initialize_(parallel.weights.masters(), model, seed=oracle.seed, std=spec.initializer_range)
    parallel.publish_()
    batches = rank_batches(oracle.data, mesh, step=0, batch=oracle.batch, microbatches=microbatches)
    ours = _of_the_layout(parallel, batches, valid_tokens)
    theirs = _of_one_process(parallel, oracle, batches, valid_tokens, getattr(torch, dtype))
    places = _places(spec.num_hidden_layers)
    mine = [
        max((_error(tensor, theirs.get(key)) for key, tensor in ours.items() if key[:2] == kept), default=0.0)
        for _, kept in places
    ]
    errors = all_gather(torch.tensor([mine], dtype=torch.float64, device=mesh.device), mesh.world)
    for (place, (way, _)), error in zip(places, errors.unbind(1), strict=True):
        wrong = [mesh.world.ranks[rank] for rank in (~(error <= tolerance)).nonzero()[:, 0].tolist()]
        if wrong:
            axes = suspects(mesh.layout, wrong, way)
            return FirstDifference(place, float(error.max()), tuple(wrong), axes)
    return None


def suspects(layout: Layout, ranks: Sequence[int], way: str) -> tuple[str, ...]:
    """The axes that communicate in a block's ``forward`` or ``backward``, or in `SUMS`.

    Where all ranks that are off stand alike on an axis and others do not, that axis alone is left: its ranks
    hold the same numbers, so one that differs was given something else.
    """
    inside = ("pp", "cp", "tp", *(("fsdp",) if layout.placement.optimizer else ()))
    there = [axis for axis in AXES if axis in (BATCH_AXES if way == SUMS else inside)]
    there = [axis for axis in there if layout.size(axis) > 1]
    apart = [
        axis for axis in AXES if len({layout.coordinates(rank)[axis] for rank in ranks}) < layout.size(axis)
    ]
    return tuple(axis for axis in there if axis in apart) or tuple(there) or tuple(apart)


def _places(layers: int) -> list[tuple[str, tuple[str, str]]]:
    """In the order of a step: each place, and which kept tensors show it.

    What the head's backward gives is the gradient of the last layer's output.
    """
    blocks = ["embed", *(f"layer.{index}" for index in range(layers))]
    forward = [(f"forward of {block}", ("forward", block)) for block in blocks]
    after = [*blocks[1:], "head"]
    backward = [
        (f"backward of {then}", ("backward", block)) for block, then in zip(blocks, after, strict=True)
    ]
    return forward + backward[::-1]


class _Watch:
    """Keeps what the blocks of a model give, by way, block and microbatch."""

    def __init__(self, model: Decoder):
        self.found: Found = {}
        self.microbatch = 0
        blocks: dict[str, nn.Module] = {"embed": model.model.embed_tokens}
        blocks |= {f"layer.{index}": layer for index, layer in enumerate(model.model.layers)}
        self._handles = [
            module.register_forward_hook(partial(self._after, block)) for block, module in blocks.items()
        ]

    def close(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()

    def _after(self, block: str, _module: nn.Module, _args: object, out: Tensor) -> None:
        microbatch = self.microbatch
        self.found["forward", block, microbatch] = out.detach().clone()
        if out.requires_grad:
            out.register_hook(partial(self._keep, block, microbatch))

    def _keep(self, block: str, microbatch: int, gradient: Tensor) -> None:
        self.found["backward", block, microbatch] = gradient.detach().clone()


def _of_the_layout(parallel: ParallelModel, batches: Sequence[Microbatch], valid_tokens: int) -> Found:
    """What the blocks of this rank give, on its tokens."""
    watch = _Watch(parallel.model)
    own = parallel.own(batches)
    pieces = parallel.stages.segments
    unwatched = [piece.forward for piece in pieces]

    def forward(
        run: Callable[[Tensor | None, Microbatch], Tensor], x: Tensor | None, batch: Microbatch
    ) -> Tensor:
        ids = batch.input_ids_BS
        same = (number for number, mine in enumerate(own) if torch.equal(mine.input_ids_BS, ids))
        watch.microbatch = next(same, UNKNOWN)
        return run(x, batch)

    for piece, run in zip(pieces, unwatched, strict=True):
        piece.forward = partial(forward, run)
    try:
        parallel.step(batches, valid_tokens=valid_tokens, update=lambda _: None)
    finally:
        for piece, run in zip(pieces, unwatched, strict=True):
            piece.forward = run
        watch.close()
    return watch.found


def _of_one_process(
    parallel: ParallelModel,
    oracle: Oracle,
    batches: Sequence[Microbatch],
    valid_tokens: int,
    dtype: torch.dtype,
) -> Found:
    """The same of the whole model on whole rows, cut to the tokens of this rank."""
    model, _ = oracle.model(dtype, parallel.mesh.device)
    watch = _Watch(model)
    for number, batch in enumerate(batches):
        watch.microbatch = number
        (model.loss_sum(batch) / max(valid_tokens, 1)).backward()
    return {key: _own_tokens(parallel, tensor, batches[key[2]]) for key, tensor in watch.found.items()}


def _own_tokens(parallel: ParallelModel, whole_BSC: Tensor, batch: Microbatch) -> Tensor:
    """Of a block's output the tokens that this rank holds of it."""
    if parallel.context is not None:
        columns = parallel.context.columns(batch.documents)
        rows = [
            torch.cat([row_SC[run.start : run.stop] for run in runs] or [row_SC[:0]])
            for row_SC, runs in zip(whole_BSC, columns, strict=True)
        ]
        whole_BSC = torch.stack(rows)
    tp = parallel.tensor_parallel
    if tp is not None and tp.sequence_parallel:
        return whole_BSC.chunk(tp.axis.size, dim=1)[tp.axis.rank]
    return whole_BSC


def _error(ours: Tensor, theirs: Tensor | None) -> float:
    """Relative to the largest magnitude; 0 where the rank has no token."""
    if theirs is None:
        return math.inf
    if not ours.numel():
        return 0.0
    return float((ours.double() - theirs.double()).abs().max()) / (float(theirs.double().abs().max()) or 1.0)


def _numbers(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
