"""Peers of two axes at once: the same combination of PyTorch's own modules."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

from benchmarks.contestants import Stage, decoder, torch_cross_entropy_sum, with_torch_layers_
from benchmarks.tensor_contestants import adamw, ends, of_layer
from benchmarks.workloads import MODEL, Workload
from fourfold.flops import forward_flops
from fourfold.layer.split import split


class TorchFsdpTensor:
    """``parallelize_module`` with sequence and loss parallelism, then ``fully_shard`` on every block."""

    def __init__(self, workload: Workload, rank: int, ranks: int):
        self.workload = workload
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("fsdp", "tp"))
        self.shards, self.rows = _rows(workload, mesh)
        model = with_torch_layers_(decoder())
        parallelize_module(model, mesh["tp"], ends(True, False))
        for layer in model.model.layers:
            parallelize_module(layer, mesh["tp"], of_layer(True))
            fully_shard(layer, mesh=mesh["fsdp"])
        fully_shard(model, mesh=mesh["fsdp"])
        self.model, self.optimizer = model, adamw(model)

    def step(self, k: int) -> float:
        batch = self.workload.rows(k, self.workload.batch, self.rows)
        with loss_parallel():
            # FSDP2 averages over ranks, so each rank's loss is scaled up by their number.
            loss = torch_cross_entropy_sum(self.model(batch), batch.labels_BS)
            (loss * (self.shards / self.workload.tokens)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        whole = loss.full_tensor() if isinstance(loss, DTensor) else loss
        return float(whole.detach()) / 2


class TorchPipelineOf:
    """PyTorch's 1F1B over stages that FSDP2 shards, or that ``parallelize_module`` cuts."""

    def __init__(self, workload: Workload, rank: int, ranks: int, *, inner: str, microbatches: int):
        self.workload, self.inner = workload, inner
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("pp", inner))
        self.index = mesh.get_local_rank("pp")
        self.shards, self.rows = _rows(workload, mesh) if inner == "fsdp" else (1, range(workload.batch))
        counts = split(forward_flops(MODEL, workload.sequence_length).segments, stages=2)
        stage = Stage(with_torch_layers_(decoder()), counts, self.index, workload.sequence_length)
        (_sharded_ if inner == "fsdp" else _cut_)(stage, mesh[inner], is_first=self.index == 0)
        self.pipeline = pipelining.Schedule1F1B(
            pipelining.PipelineStage(stage, self.index, 2, torch.device("cpu"), group=mesh.get_group("pp")),
            n_microbatches=microbatches,
            loss_fn=self._loss,
            scale_grads=False,
        )
        self.optimizer = adamw(stage)

    def _loss(self, logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
        return torch_cross_entropy_sum(logits_BSV, labels_BS) * (self.shards / self.workload.tokens)

    def step(self, k: int) -> float:
        batch = self.workload.rows(k, self.workload.batch, self.rows)
        losses: list[Tensor] = []
        inputs = (batch.input_ids_BS,) if self.index == 0 else ()
        target: dict[str, Any] = {"target": batch.labels_BS, "losses": losses} if self.index == 1 else {}
        with loss_parallel() if self.inner == "tp" else nullcontext():
            self.pipeline.step(*inputs, return_outputs=False, **target)
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = sum(
            float((loss.full_tensor() if isinstance(loss, DTensor) else loss).detach()) for loss in losses
        )
        return total * self.workload.tokens / (self.shards if self.inner == "fsdp" else 2)


def _rows(workload: Workload, mesh: DeviceMesh) -> tuple[int, range]:
    """How many ranks fsdp has, and which rows this one trains on."""
    shards = mesh["fsdp"].size()
    rows = workload.batch // shards
    first = mesh.get_local_rank("fsdp") * rows
    return shards, range(first, first + rows)


def _sharded_(stage: Stage, mesh: DeviceMesh, *, is_first: bool) -> None:
    for segment in stage.segments:
        fully_shard(segment, mesh=mesh, reshard_after_forward=False)
    fully_shard(stage, mesh=mesh, reshard_after_forward=False)


def _cut_(stage: Stage, mesh: DeviceMesh, *, is_first: bool) -> None:
    plan = ends(True, False)
    if is_first:
        parallelize_module(stage.segments[0], mesh, plan["model.embed_tokens"])
    else:
        head: nn.Module = stage.segments[-1]
        parallelize_module(head, mesh, {"0": plan["model.norm"], "1": plan["lm_head"]})
    for layer in stage.segments[1:] if is_first else stage.segments[:-1]:
        parallelize_module(layer, mesh, of_layer(True))
