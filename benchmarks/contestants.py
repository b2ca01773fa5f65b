"""What is compared: each contestant trains the same model on the same tokens from the same weights.

A contestant is built on every rank of its team and has one method, ``step(k) -> loss``.
"""

import os
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workloads import MODEL, Workload
from fourfold.flops import forward_flops
from fourfold.initialize import initialize_, whole
from fourfold.layer.split import split
from fourfold.mesh import Mesh
from fourfold.models import Decoder, Microbatch
from fourfold.models.decoder import MLP, Attention, DecoderLayer
from fourfold.models.loss import cross_entropy_sum
from fourfold.models.norm import RMSNorm
from fourfold.specs import Layout, OptimizerSection, RunSpec
from fourfold.training import Trainer

RATE = 3e-4
SPEC = OptimizerSection(learning_rate=RATE, schedule="constant", clip_norm=0.0)


class Contestant(Protocol):
    """Something that trains."""

    def step(self, k: int) -> float:
        """Train on the batch of step ``k``; return the sum of the token losses of this rank's rows."""


class Ours:
    """The training loop of `fourfold train`: norm of the gradient, learning rate and reports included."""

    def __init__(self, workload: Workload, layout: str, *, microbatches: int = 1):
        mesh = Mesh(Layout.parse(layout), "cpu")
        run = RunSpec.model_validate(
            {
                "layout": layout,
                "model": MODEL.model_dump(exclude_none=True),
                "data": {"sequence_length": workload.sequence_length},
                "training": {"steps": 1000, "batch": workload.batch, "microbatches": microbatches},
                "optimizer": SPEC,
            }
        )
        self.trainer = Trainer(run, MODEL, mesh, data=workload)
        self.tokens_of_a_rank = workload.tokens / mesh.world_size

    def step(self, k: int) -> float:
        return self.trainer.step(k).loss * self.tokens_of_a_rank


class Plain:
    """A bare PyTorch loop over this rank's rows, with no communication: the limit of data parallelism."""

    def __init__(self, workload: Workload, rank: int, ranks: int):
        self.workload = workload
        rows = workload.batch // ranks
        self.rows = range(rank * rows, (rank + 1) * rows)
        self.module: nn.Module = _Loss(decoder(), 1.0 / workload.tokens)
        self.optimizer = _adamw(self.module)

    def step(self, k: int) -> float:
        loss = self.module(self.workload.rows(k, self.workload.batch, self.rows))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach()) * self.workload.tokens


class Ddp(Plain):
    """PyTorch's DistributedDataParallel, gradients as views of its buckets.

    Around our own `Decoder`, or around one with PyTorch's own norms, activation and loss in place of ours.
    """

    def __init__(self, workload: Workload, rank: int, ranks: int, *, own_decoder: bool):
        super().__init__(workload, rank, ranks)
        # DDP averages over ranks, so each rank's loss is scaled up by their number.
        scale = ranks / workload.tokens
        loss = _Loss(decoder(), scale) if own_decoder else _PyTorchLoss(decoder(), scale)
        self.module = DistributedDataParallel(loss, gradient_as_bucket_view=True)
        self.optimizer = _adamw(self.module)
        self.ranks = ranks

    def step(self, k: int) -> float:
        return super().step(k) / self.ranks


class Fsdp2(Plain):
    """PyTorch's FSDP2: ``fully_shard`` on every block, and on the rest.

    With PyTorch's own norm, activation and loss, as its users have them.
    """

    def __init__(self, workload: Workload, rank: int, ranks: int):
        super().__init__(workload, rank, ranks)
        # FSDP2 averages over ranks, so each rank's loss is scaled up by their number.
        self.module = _PyTorchLoss(decoder(), ranks / workload.tokens)
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in self.module.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.module, mesh=mesh)
        self.optimizer = _adamw(self.module)
        self.ranks = ranks

    def step(self, k: int) -> float:
        return super().step(k) / self.ranks


class DeepSpeedZero3(Plain):
    """DeepSpeed's ZeRO-3 around the same module as FSDP2's, on its CPU accelerator over gloo."""

    def __init__(self, workload: Workload, rank: int, ranks: int):
        os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank)}
        import deepspeed  # not a dependency: whoever has it sees its row

        super().__init__(workload, rank, ranks)
        module = _PyTorchLoss(decoder(), ranks / workload.tokens)  # it averages over ranks
        self.engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=_adamw(module),
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": len(self.rows),
                "zero_optimization": {"stage": 3, "overlap_comm": True},
                "zero_force_ds_cpu_optimizer": False,
                "zero_allow_untested_optimizer": True,
            },
        )
        self.ranks = ranks

    def step(self, k: int) -> float:
        loss = self.engine(self.workload.rows(k, self.workload.batch, self.rows))
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach()) * self.workload.tokens / self.ranks


class TorchPipeline:
    """PyTorch's own pipeline: ``torch.distributed.pipelining`` with one of its schedules.

    The stages are ours, cut at the same layers; norm, activation and loss are our kernels or PyTorch's own.
    """

    def __init__(
        self,
        workload: Workload,
        rank: int,
        ranks: int,
        *,
        schedule: str,
        microbatches: int,
        own_decoder: bool,
    ):
        kind = getattr(pipelining, schedule)
        is_single = issubclass(kind, pipelining.schedules.PipelineScheduleSingle)
        is_v = schedule in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
        count = ranks if is_single else 2 * ranks
        model = decoder() if own_decoder else with_torch_layers_(decoder())
        loss = cross_entropy_sum if own_decoder else torch_cross_entropy_sum
        counts = split(forward_flops(MODEL, workload.sequence_length).segments, stages=count)
        mine = [rank] if is_single else [rank, count - 1 - rank if is_v else rank + ranks]
        submods = {index: Stage(model, counts, index, workload.sequence_length) for index in mine}
        stages = [
            pipelining.PipelineStage(submod, index, count, torch.device("cpu"))
            for index, submod in submods.items()
        ]
        self.workload, self.rank = workload, rank
        self.is_first, self.is_last = 0 in mine, count - 1 in mine
        self.pipeline = kind(
            stages[0] if is_single else stages,
            n_microbatches=microbatches,
            loss_fn=lambda logits_BSV, labels_BS: loss(logits_BSV, labels_BS) / workload.tokens,
            scale_grads=False,
        )
        self.optimizer = _adamw(nn.ModuleList(stage.submod for stage in stages))

    def step(self, k: int) -> float:
        batch = self.workload.rows(k, self.workload.batch, range(self.workload.batch))
        losses: list[Tensor] = []
        inputs = (batch.input_ids_BS,) if self.is_first else ()
        target = {"target": batch.labels_BS, "losses": losses} if self.is_last else {}
        self.pipeline.step(*inputs, return_outputs=False, **target)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(sum(loss.detach() for loss in losses)) * self.workload.tokens


class Stage(nn.Module):
    """Some neighbouring segments of the decoder: tokens or activations in, activations or logits out."""

    def __init__(self, model: Decoder, counts: list[int], index: int, sequence_length: int):
        super().__init__()
        first, stop = sum(counts[:index]), sum(counts[: index + 1])
        segments = [
            model.model.embed_tokens,
            *model.model.layers,
            nn.Sequential(model.model.norm, model.lm_head),
        ]
        self.segments = nn.ModuleList(segments[first:stop])
        self.rotary, self.sequence_length = model.rotary, sequence_length
        self.batches: dict[torch.Size, Microbatch] = {}

    def forward(self, x: Tensor) -> Tensor:
        shape = torch.Size((x.shape[0], self.sequence_length))  # of x a rank of tp may have fewer
        if shape not in self.batches:
            positions = torch.arange(shape[1]).expand(shape)
            self.batches[shape] = Microbatch(positions, positions, positions, ((shape[1],),) * shape[0])
        batch = self.batches[shape]
        for segment in self.segments:
            if isinstance(segment, DecoderLayer):
                x = segment(x, *self.rotary(batch, x.dtype), batch.documents)
            else:
                x = segment(x)
        return x


class _Loss(nn.Module):
    """The model with its loss, scaled, as DDP wants it: one forward."""

    def __init__(self, model: Decoder, scale: float):
        super().__init__()
        self.model = model
        self.scale = scale

    def forward(self, batch: Microbatch) -> Tensor:
        return self.model.loss_sum(batch) * self.scale


class _PyTorchLoss(nn.Module):
    """The same mathematics in PyTorch's own norm, activation and cross entropy."""

    def __init__(self, model: Decoder, scale: float):
        super().__init__()
        self.model = with_torch_layers_(model)
        self.scale = scale

    def forward(self, batch: Microbatch) -> Tensor:
        return torch_cross_entropy_sum(self.model(batch), batch.labels_BS) * self.scale


def with_torch_layers_(model: Decoder) -> Decoder:
    """Put PyTorch's in place of our norms, feed-forward and attention, on the same weights; return it."""
    for parent in list(model.modules()):
        if isinstance(parent, Attention):
            parent.attend = torch_attention
        for name, child in list(parent.named_children()):
            if isinstance(child, RMSNorm):
                plain = nn.RMSNorm(child.weight.shape, eps=child.eps)
                plain.weight = child.weight
                setattr(parent, name, plain)
            if isinstance(child, MLP):
                setattr(parent, name, TorchMLP(child))
    return model


class TorchMLP(nn.Module):
    """The gated feed-forward block as a plain PyTorch model has it, with the projections of ours."""

    def __init__(self, mlp: MLP):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x_BSC: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BSC)) * self.up_proj(x_BSC))


def torch_attention(q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, **_: Any) -> Tensor:
    """PyTorch's own, (B, S, H, D), for rows of one document each and the usual scale."""
    q_BHSD, k_BKSD, v_BKSD = (tensor.transpose(1, 2) for tensor in (q_BSHD, k_BSKD, v_BSKD))
    out = F.scaled_dot_product_attention(q_BHSD, k_BKSD, v_BKSD, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def torch_cross_entropy_sum(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    return F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="sum")


def decoder() -> Decoder:
    model = Decoder(MODEL)
    initialize_(whole(dict(model.named_parameters())), model, seed=0, std=MODEL.initializer_range)
    return model


def _adamw(module: nn.Module) -> torch.optim.AdamW:
    """The same groups and numbers as ours, in the implementation that measured fastest here."""
    decayed = [p for p in module.parameters() if p.ndim >= 2]
    plain = [p for p in module.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": SPEC.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=SPEC.learning_rate, betas=SPEC.betas, eps=SPEC.eps, fused=True)
