"""What ranks tell each other around a checkpoint: texts, failures, digests."""

from collections.abc import Sequence

import torch

from fourfold.checkpoint.digest import MODULUS
from fourfold.collectives import all_gather, all_reduce_
from fourfold.mesh import Mesh

HALF = 2**32


def texts_of_all(text: str, mesh: Mesh) -> list[str]:
    """Return the texts of all ranks, in rank order, on all ranks."""
    content = text.encode()
    sizes = all_gather(torch.tensor([len(content)], device=mesh.device), mesh.world).tolist()
    mine = torch.tensor(list(content), dtype=torch.uint8, device=mesh.device)
    if not sum(sizes):
        return [""] * len(sizes)
    every = bytes(all_gather(mine, mesh.world, counts=sizes).tolist())
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [every[end - size : end].decode() for end, size in zip(ends, sizes, strict=True)]


def messages_of_all(messages: Sequence[str], mesh: Mesh) -> list[str]:
    """Return the messages of all ranks, each once, on all ranks: none where no rank has any."""
    lines = "\n".join(text for text in texts_of_all("\n".join(messages), mesh) if text)
    return list(dict.fromkeys(lines.split("\n"))) if lines else []


def added_up(digests: Sequence[int], mesh: Mesh) -> list[int]:
    """Return the sums over all ranks modulo 2^64, one for each digest."""
    halves = torch.tensor([divmod(number, HALF) for number in digests], dtype=torch.int64, device=mesh.device)
    halves = all_reduce_(halves.view(-1, 2), mesh.world)
    return [(high * HALF + low) % MODULUS for high, low in halves.tolist()]
