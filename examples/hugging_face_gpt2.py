"""A GPT-2 of Hugging Face, the module itself, cut over the ranks of dp, fsdp, cp and tp.

    torchrun --nproc-per-node 4 examples/hugging_face_gpt2.py fsdp2,tp2

With a pretrained one, ``GPT2LMHeadModel.from_pretrained(FOLDER)``, the rest is the same.
"""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import fourfold
from fourfold import Layout, Mesh, Microbatch
from fourfold.channel.plans import gpt2_plan
from fourfold.channel.tensor_parallel import tensor_parallel_
from fourfold.channel.vocabulary import vocabulary_parallel_cross_entropy_sum
from fourfold.collectives import all_reduce_
from fourfold.models.loss import cross_entropy_sum
from fourfold.sequence.hugging_face import context_parallel_

TEXT = torch.tensor(list(Path(__file__).read_bytes()))
LENGTH, BATCH = 32, 8


def batch(step: int, rows: slice) -> Microbatch:
    """Some whole rows of the batch of a step."""
    starts = torch.randint(len(TEXT) - LENGTH, (BATCH,), generator=torch.Generator().manual_seed(step))[rows]
    tokens_BS = TEXT[starts[:, None] + torch.arange(LENGTH + 1)]
    positions_BS = torch.arange(LENGTH).expand(len(starts), -1)
    return Microbatch(tokens_BS[:, :-1], tokens_BS[:, 1:], positions_BS, ((LENGTH,),) * len(starts))


def main(layout: str, steps: int = 10) -> list[float]:
    """Train, and return the mean loss of every step. All ranks call it."""
    mesh = Mesh(Layout.parse(layout))
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    context = context_parallel_(model, mesh)
    parallel, loss_sum = None, cross_entropy_sum
    if mesh.tp.size > 1:  # each rank of tp has its own heads, channels, and part of the vocabulary
        parallel = tensor_parallel_(model, gpt2_plan(heads=4), mesh.tp, sequence_parallel=False)
        first = parallel.cuts["transformer.wte.weight"].runs[mesh.tp.rank][0][0]
        loss_sum = partial(
            vocabulary_parallel_cross_entropy_sum, axis=mesh.tp, first=first, vocab_size=config.vocab_size
        )
    blocks = list(model.transformer.h)
    sharded = fourfold.shard(model, blocks=blocks, mesh=mesh, tensor_parallel=parallel)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=3e-3)
    rows = BATCH // mesh.data.size
    mine = slice(mesh.data.rank * rows, (mesh.data.rank + 1) * rows)
    losses = []
    for step in range(steps):
        whole_rows = batch(step, mine)
        logits_BSV = model(**context.inputs(whole_rows)).logits
        loss = loss_sum(logits_BSV, context.own(whole_rows).labels_BS) / (BATCH * LENGTH)
        loss.backward()
        sharded.reduce_gradients()
        sharded.clip_(1.0)
        optimizer.step()
        losses.append(float(all_reduce_(loss.detach().clone(), mesh.batch)))
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    found = main(sys.argv[1])
    if dist.get_rank() == 0:
        print(f"loss {found[0]:.3f} in the first step, {found[-1]:.3f} in the last")
