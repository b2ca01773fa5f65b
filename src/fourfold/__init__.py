"""fourfold: train one transformer on many GPUs, split along its four axes.

Public names are loaded when they are first used, so that what plans and draws needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fourfold.assembly import parallelize
    from fourfold.data import PackedDataset, SyntheticDataset, prepare
    from fourfold.errors import RunStopped, UserError
    from fourfold.mesh import Mesh
    from fourfold.models import Decoder, Microbatch
    from fourfold.parallel_model import ParallelModel
    from fourfold.sampling import generate
    from fourfold.sharded_module import ShardedModule, shard
    from fourfold.specs import Layout, ModelSpec, RunSpec
    from fourfold.training import initialized, rank_batches, train

__version__ = "0.1.0"

_HOME = {
    "Decoder": "models",
    "Layout": "specs",
    "Mesh": "mesh",
    "Microbatch": "models",
    "ModelSpec": "specs",
    "PackedDataset": "data",
    "ParallelModel": "parallel_model",
    "RunSpec": "specs",
    "RunStopped": "errors",
    "ShardedModule": "sharded_module",
    "SyntheticDataset": "data",
    "UserError": "errors",
    "generate": "sampling",
    "initialized": "training",
    "parallelize": "assembly",
    "prepare": "data",
    "rank_batches": "training",
    "shard": "sharded_module",
    "train": "training",
}

__all__ = [
    "Decoder",
    "Layout",
    "Mesh",
    "Microbatch",
    "ModelSpec",
    "PackedDataset",
    "ParallelModel",
    "RunSpec",
    "RunStopped",
    "ShardedModule",
    "SyntheticDataset",
    "UserError",
    "generate",
    "initialized",
    "parallelize",
    "prepare",
    "rank_batches",
    "shard",
    "train",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'fourfold' has no attribute '{name}'")
    return getattr(import_module(f"fourfold.{_HOME[name]}"), name)
