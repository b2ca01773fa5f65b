"""A rank's part of a tensor that is cut on the tp axis, and the whole from all parts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fourfold.channel.cuts import Cut


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
