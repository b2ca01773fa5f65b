"""A rank's part of a tensor that is cut on the tp axis, and the whole from all parts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.channel.cuts import Cut
from fourfold.collectives import all_gather
from fourfold.mesh import Axis


def part(whole: Tensor, cut: Cut, rank: int) -> Tensor:
    """Return what a rank holds of a whole parameter: a view where that is one run."""
    runs = [whole.narrow(cut.dim, start, stop - start) for start, stop in cut.runs[rank]]
    return runs[0] if len(runs) == 1 else torch.cat(runs, cut.dim)


def assembled(parts: Sequence[Tensor], cut: Cut) -> Tensor:
    """Return the whole parameter, given every rank's part, in rank order."""
    whole = parts[0].new_empty(cut.shape)
    for runs, held in zip(cut.runs, parts, strict=True):
        first = 0
        for start, stop in runs:
            whole.narrow(cut.dim, start, stop - start).copy_(held.narrow(cut.dim, first, stop - start))
            first += stop - start
    return whole


@dataclass(frozen=True)
class Parts:
    """What this rank of tp holds of a model's parameters.

    Attributes:
        axis: the ranks.
        cuts: of the parameters, by name; none where nothing is cut.
    """

    axis: Axis
    cuts: Mapping[str, Cut]

    def of(self, name: str, whole: Tensor) -> Tensor:
        """What the rank holds of a whole parameter."""
        cut = self.cuts.get(name)
        return whole if cut is None else part(whole, cut, self.axis.rank)

    def whole(self, name: str, held: Tensor) -> Tensor:
        """The whole parameter, of which this rank has ``held``. All ranks of the axis call it together."""
        cut, axis = self.cuts.get(name), self.axis
        if cut is None or cut.is_whole:
            return held
        shapes = [torch.Size(cut.local_shape(rank)) for rank in range(axis.size)]
        counts = [shape.numel() for shape in shapes]
        parts = all_gather(held.flatten(), axis, counts=counts).split(counts)
        return assembled([flat.view(shape) for flat, shape in zip(parts, shapes, strict=True)], cut)

    def shape(self, name: str, held: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole parameter, given that of what the rank holds."""
        cut = self.cuts.get(name)
        return tuple(held) if cut is None else cut.shape

    def copies(self, name: str) -> int:
        """How many neighbouring ranks hold the same of a parameter."""
        cut = self.cuts.get(name)
        return 1 if cut is None else cut.copies

    def runs(self, name: str, first: int, held: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield a run of the rank's flattened part in pieces that are runs of the whole, each with its first.

        Args:
            name: of the parameter.
            first: the index of the run's first element in the flattened part.
            held: the run.
        """
        cut = self.cuts.get(name)
        if cut is None:
            yield first, held
            return
        written = 0
        for start, stop in cut.global_runs(self.axis.rank, first, len(held)):
            yield start, held[written : written + stop - start]
            written += stop - start
