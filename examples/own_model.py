"""One's own model, data and loop, with weights, gradients and optimizer state in pieces on the ranks.

    torchrun --nproc-per-node 2 examples/own_model.py fsdp2

Any module can be cut over dp and fsdp, given the list of its blocks. On every layout the losses are the same.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fourfold
from fourfold import Layout, Mesh
from fourfold.collectives import all_reduce_

TEXT = torch.tensor(list(Path(__file__).read_bytes()))
CONTEXT, CHANNELS, BATCH = 8, 32, 64


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(CHANNELS)
        self.up, self.down = nn.Linear(CHANNELS, 4 * CHANNELS), nn.Linear(4 * CHANNELS, CHANNELS)

    def forward(self, x_BC: Tensor) -> Tensor:
        """Add what the block computes to its input."""
        return x_BC + self.down(F.gelu(self.up(self.norm(x_BC))))


class NextByte(nn.Module):
    """Guesses a byte from those before it (Bengio et al. 2003)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, CHANNELS // CONTEXT)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(CHANNELS, 256)

    def forward(self, bytes_BS: Tensor) -> Tensor:
        """Return the logits of the next byte."""
        x_BC = self.embedding(bytes_BS).flatten(1)
        for block in self.blocks:
            x_BC = block(x_BC)
        return self.head(x_BC)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The whole batch of a step, the same on every rank: bytes, and the ones that follow them."""
    starts = torch.randint(len(TEXT) - CONTEXT, (BATCH,), generator=torch.Generator().manual_seed(step))
    return TEXT[starts[:, None] + torch.arange(CONTEXT)], TEXT[starts + CONTEXT]


def main(layout: str, steps: int = 40) -> list[float]:
    """Train, and return the mean loss of every step. All ranks call it."""
    mesh = Mesh(Layout.parse(layout))
    torch.manual_seed(0)
    model = NextByte()
    sharded = fourfold.shard(model, blocks=list(model.blocks), mesh=mesh)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        bytes_BS, next_B = (whole.chunk(mesh.data.size)[mesh.data.rank] for whole in batch(step))
        # A sum over this rank's rows, divided by the rows of all ranks: gradients are summed, never averaged.
        loss = F.cross_entropy(model(bytes_BS), next_B, reduction="sum") / BATCH
        loss.backward()
        sharded.reduce_gradients()
        sharded.clip_(1.0)
        optimizer.step()
        losses.append(float(all_reduce_(loss.detach().clone(), mesh.data)))
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    found = main(sys.argv[1])
    if dist.get_rank() == 0:
        print(f"loss {found[0]:.3f} in the first step, {found[-1]:.3f} in the last")
