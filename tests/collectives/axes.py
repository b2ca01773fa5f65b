"""What the tests of collectives share: one axis over all ranks, and values that name rank and index."""

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.mesh import Axis, Mesh
from fourfold.specs import Layout


def axis_of_all() -> Axis:
    """The axis dp over all ranks of the pool."""
    return Mesh(Layout(dp=dist.get_world_size())).dp


def numbered(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Elements that differ in rank and index, and whose sums over ranks name the ranks in it."""
    index = torch.arange(1, torch.Size(shape).numel() + 1).reshape(shape)
    return (index * 2**rank).to(dtype)


def strided(tensor: Tensor) -> Tensor:
    """The same values, every second element of a larger storage that holds 99 in between."""
    storage = torch.full((*tensor.shape, 2), 99, dtype=tensor.dtype)
    view = storage[..., 0]
    view.copy_(tensor)
    assert tensor.numel() < 2 or not view.is_contiguous()
    return view
