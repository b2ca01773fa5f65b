"""Peers of context parallelism: others' attention over ranks, in the same decoder on the same tokens.

Around each is PyTorch's DDP, which sums the gradients of the ranks' tokens, and PyTorch's own norm and loss.
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contestants import Plain, _adamw, _PyTorchLoss, decoder, torch_attention
from benchmarks.workloads import Workload
from fourfold.models.decoder import Attention

aten = torch.ops.aten
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention over ranks of queries (B, S, H, D), keys and values (B, S, K, D), of this rank's tokens."""


class CutTokens(Plain):
    """Every rank has some tokens of every row; ``peer`` names whose attention brings them together."""

    def __init__(self, workload: Workload, rank: int, ranks: int, *, peer: str):
        super().__init__(workload, rank, ranks)
        attend, is_zigzag = ATTENTION[peer]
        own = attend(ranks)
        # DDP averages over ranks, so each rank's loss is scaled up by their number.
        loss = _PyTorchLoss(decoder(), ranks / workload.tokens)
        for module in loss.modules():
            if isinstance(module, Attention):
                module.attend = partial(_without_documents, own)
        self.module = DistributedDataParallel(loss, gradient_as_bucket_view=True)
        self.optimizer = _adamw(self.module)
        self.ranks = ranks
        self.columns = columns(workload.sequence_length, rank, ranks, is_zigzag=is_zigzag)

    def step(self, k: int) -> float:
        whole = self.workload.rows(k, self.workload.batch, range(self.workload.batch))
        loss = self.module(whole.take((self.columns,) * self.workload.batch))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach()) * self.workload.tokens / self.ranks


def columns(length: int, rank: int, ranks: int, *, is_zigzag: bool) -> tuple[range, ...]:
    """The tokens of a rank: one run, or two such that causal work is balanced."""
    if not is_zigzag:
        return (range(length * rank // ranks, length * (rank + 1) // ranks),)
    chunk = length // (2 * ranks)
    return tuple(range(index * chunk, (index + 1) * chunk) for index in (rank, 2 * ranks - 1 - rank))


def _without_documents(attend: Attend, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    """The benchmarks' rows are one document each, without a window, and the scale is the usual one."""
    return attend(q, k, v)


def deepspeed_ulysses(ranks: int) -> Attend:
    """DeepSpeed's ``DistributedAttention`` around PyTorch's attention."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank())}
    with redirect_stdout(sys.stderr):  # it reports what it builds, in the middle of our JSON
        import deepspeed  # not a dependency: whoever has it sees its row
        from deepspeed.sequence.layer import DistributedAttention

        deepspeed.init_distributed("gloo")
    layer = DistributedAttention(torch_attention, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    return lambda q, k, v: layer(q, k, v, 0)


def yunchang_ulysses(ranks: int) -> Attend:
    """yunchang's ``UlyssesAttention`` with PyTorch's attention in place of flash-attn's, which needs CUDA."""
    from yunchang.kernels import AttnType
    from yunchang.ulysses import UlyssesAttention

    layer = UlyssesAttention(dist.group.WORLD, attn_type=AttnType.TORCH_MATH)
    layer.attn_fn = torch_attention
    return layer


def torch_ring_attention(ranks: int) -> Attend:
    """The ring behind PyTorch's ``context_parallel``, around the CPU's kernel, which that does not know."""
    mesh = init_device_mesh("cpu", (ranks,))
    group = mesh.get_group()
    return lambda q, k, v: _TorchRing.apply(*(x.transpose(1, 2) for x in (q, k, v)), group).transpose(1, 2)


class _TorchRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
        out, lse = torch_ring._templated_ring_attention(
            group, 2, aten._scaled_dot_product_flash_attention_for_cpu, q, k, v, is_causal=True
        )
        ctx.group = group
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        gradients = torch_ring._templated_ring_attention_backward(
            ctx.group,
            2,
            aten._scaled_dot_product_flash_attention_for_cpu_backward,
            grad,
            "grad_out",
            q,
            k,
            v,
            out,
            lse,
            is_causal=True,
            dropout_p=0.0,
        )
        return *gradients[:3], None


ATTENTION: dict[str, tuple[Callable[[int], Attend], bool]] = {
    "DeepSpeed Ulysses": (deepspeed_ulysses, False),
    "yunchang Ulysses": (yunchang_ulysses, False),
    "torch ring, CPU kernel put in": (torch_ring_attention, True),
}
"""By name of the peer: what makes its attention on a rank, and whether tokens are dealt zigzag."""


def left_out() -> dict[str, str]:
    """The peers that cannot run here, each with the reason."""
    found = {
        name: f"{package} is not installed"
        for name, package in (("DeepSpeed Ulysses", "deepspeed"), ("yunchang Ulysses", "yunchang"))
        if importlib.util.find_spec(package) is None
    }
    found["yunchang ring, ring-flash-attn"] = "flash-attn needs CUDA"
    if error := _error_of_torch():
        found["torch context_parallel"] = error
    return found


def _error_of_torch() -> str | None:
    """What PyTorch's ``context_parallel`` says to attention on a CPU."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        q, k, v = (torch.zeros(1, 1, 4, 8) for _ in range(3))
        mesh = init_device_mesh("cpu", (1,))
        with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3):
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
    except NotImplementedError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.destroy_process_group()
    return None
