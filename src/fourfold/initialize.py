"""Initial weights as a function of the seed, the parameter's name and the element's index.

Any rank can make any part of any parameter alone, and all ranks agree, whatever the layout.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fourfold.models.norm import RMSNorm

CHUNK = 2**18
"""Elements made at once, so that the intermediate arrays stay in the cache."""


def normal(seed: int, name: str, start: int, count: int) -> Tensor:
    """Return elements `start` to `start + count` of the parameter's standard normal numbers, as float64.

    Element i comes from the counter-based generator Philox-4x64 (Salmon et al. 2011): its key is a hash of
    the seed and the name, its counter says i. Elements 2j and 2j + 1 are a pair of the Box-Muller transform.
    """
    key = np.frombuffer(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), np.uint64)
    skipped = start % 4  # one count of Philox gives four numbers, two pairs
    needed = skipped + count + (skipped + count) % 2
    numbers = np.random.Philox(key=key, counter=start // 4).random_raw(needed)
    # The upper 53 bits: in (0, 1] for the logarithm, in [0, 1) for the angle.
    uniforms = torch.from_numpy((numbers >> np.uint64(11)).astype(np.float64)).view(-1, 2)
    radius = uniforms[:, 0].add(1).mul_(2.0**-53).log_().mul_(-2).sqrt_()
    angle = uniforms[:, 1].mul(2 * math.pi * 2.0**-53)
    pairs = torch.stack((radius * angle.cos(), radius * angle.sin()), 1)
    return pairs.view(-1)[skipped : skipped + count]


@dataclass(frozen=True)
class Part:
    """A run of a flattened parameter that wants its initial values.

    Attributes:
        name: of the parameter. One that has several names (a tied head) goes by its first.
        first: the index of the run's first element.
        target: the tensor to write, of any shape.
    """

    name: str
    first: int
    target: Tensor


def initialize_(parts: Iterable[Part], module: nn.Module, *, seed: int, std: float) -> None:
    """Write initial weights: matrices Normal(0, std), norm weights 1, biases 0.

    All matrices have the same spread, as in Hugging Face's models; none depends on the number of layers. The
    float64 values are rounded to the target's dtype, so models of different precision start alike.

    Args:
        parts: what this rank holds: whole parameters, their master copies, or pieces of them.
        module: says which kind of layer each parameter belongs to.
        seed: of the run.
        std: of the matrices.

    Raises TypeError for a parameter of any other kind of module, or on the meta device.
    """
    for part in parts:
        owner_name, _, short = part.name.rpartition(".")
        owner, target = module.get_submodule(owner_name), part.target.detach()
        if target.is_meta:
            raise TypeError(f"{part.name} is on the meta device: give it storage first")
        if isinstance(owner, RMSNorm) and short == "weight":
            target.fill_(1.0)
        elif isinstance(owner, nn.Linear) and short == "bias":
            target.zero_()
        elif isinstance(owner, nn.Linear | nn.Embedding) and short == "weight":
            _normal_(target, seed, part.name, part.first, std)
        else:
            kind = type(owner).__name__
            raise TypeError(f"{part.name} has no initial value: {kind} is no Linear, Embedding or RMSNorm")


def whole(tensors: Mapping[str, Tensor]) -> list[Part]:
    """The parts where each parameter is held whole."""
    return [Part(name, 0, tensor) for name, tensor in tensors.items()]


def _normal_(target: Tensor, seed: int, name: str, first: int, std: float) -> None:
    flat = target.view(-1)
    for start in range(0, len(flat), CHUNK):
        part = flat[start : start + CHUNK]
        part.copy_(normal(seed, name, first + start, len(part)).mul_(std))
