"""Peers of tensor parallelism."""

from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.contestants import SPEC, decoder, torch_cross_entropy_sum, with_torch_layers_
from benchmarks.workloads import Workload


class TorchTensorParallel:
    """PyTorch's ``parallelize_module``: the plan that its own tutorial and torchtitan use for Llama.

    With loss parallelism, or with the logits gathered to every rank.
    """

    def __init__(
        self,
        workload: Workload,
        rank: int,
        ranks: int,
        *,
        sequence_parallel: bool,
        whole_logits: bool = False,
    ):
        self.workload, self.ranks, self.whole_logits = workload, ranks, whole_logits
        model = with_torch_layers_(decoder())
        mesh = init_device_mesh("cpu", (ranks,))
        parallelize_module(model, mesh, ends(sequence_parallel, whole_logits))
        for layer in model.model.layers:
            parallelize_module(layer, mesh, of_layer(sequence_parallel))
        self.model = model
        self.optimizer = adamw(model)

    def step(self, k: int) -> float:
        batch = self.workload.rows(k, self.workload.batch, range(self.workload.batch))
        with nullcontext() if self.whole_logits else loss_parallel():
            logits_BSV = self.model(batch)
            loss = torch_cross_entropy_sum(logits_BSV, batch.labels_BS) / self.workload.tokens
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        whole = loss.full_tensor() if isinstance(loss, DTensor) else loss
        return float(whole.detach()) * self.workload.tokens / self.ranks


def ends(cut: bool, whole_logits: bool) -> dict[str, ParallelStyle]:
    """The plan of embedding, last norm and head; ``cut`` says whether the stream is cut by tokens."""
    stream = Shard(1) if cut else Replicate()
    logits = Replicate() if whole_logits else Shard(-1)
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "lm_head": ColwiseParallel(
            input_layouts=stream, output_layouts=logits, use_local_output=whole_logits
        ),
    }
    return plan | ({"model.norm": SequenceParallel(use_local_output=True)} if cut else {})


def of_layer(cut: bool) -> dict[str, ParallelStyle]:
    """The plan of a layer."""
    leave = RowwiseParallel(output_layouts=Shard(1) if cut else Replicate())
    plan: dict[str, ParallelStyle] = {
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
        "self_attn.o_proj": leave,
        "mlp.down_proj": leave,
    }
    if cut:
        plan |= {
            "input_layernorm": SequenceParallel(use_local_output=True),
            "post_attention_layernorm": SequenceParallel(use_local_output=True),
            "self_attn": PrepareModuleInput(
                input_layouts=(Shard(1), None, None, None),
                desired_input_layouts=(Replicate(), None, None, None),
                use_local_output=False,
            ),
            "mlp": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=False
            ),
        }
    return plan


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """As `contestants.adamw`, but a group has only DTensors or none: the fused step takes no mixture."""
    groups = []
    for is_matrix in (True, False):
        for kind in (True, False):
            found = [
                p for p in model.parameters() if (p.ndim >= 2) == is_matrix and isinstance(p, DTensor) == kind
            ]
            if found:
                groups.append({"params": found, "weight_decay": SPEC.weight_decay if is_matrix else 0.0})
    return torch.optim.AdamW(groups, lr=SPEC.learning_rate, betas=SPEC.betas, eps=SPEC.eps, fused=True)
