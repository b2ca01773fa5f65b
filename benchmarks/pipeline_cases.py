"""What pipelines are asked for beside speed: ours and torch.distributed.pipelining on the same cases.

python benchmarks/pipeline_cases.py [--json]

Two ranks train one step of a small decoder by 1F1B. Each cell is the worst relative error of a gradient
against one process, in float64, or what was refused, in the words of the refusal, cut short.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed import pipelining

from benchmarks.contestants import Stage
from fourfold.initialize import initialize_, whole
from fourfold.launch import Rank, launch
from fourfold.layer.split import split
from fourfold.mesh import Mesh
from fourfold.models import Decoder, Microbatch
from fourfold.models.loss import cross_entropy_sum
from fourfold.specs import Layout, ModelSpec
from fourfold.training import initialized

RANKS = 2
LENGTH = 16


@dataclass(frozen=True)
class Case:
    """One step: the lengths of its microbatches of one row, and whether the head is tied."""

    name: str
    lengths: tuple[int, ...]
    tied: bool = False


CASES = (
    Case("4 microbatches", (LENGTH,) * 4),
    Case("fewer microbatches than ranks", (LENGTH,)),
    Case("microbatches of different lengths", (8, 16, 12, 4)),
    Case("head tied to the embedding", (LENGTH,) * 4, tied=True),
)

CALLS = "the same batch twice, then one update"


def batches_of(case: Case, vocab_size: int) -> list[Microbatch]:
    """The microbatches of a case, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for length in case.lengths:
        tokens = torch.randint(vocab_size, (1, length + 1), generator=generator)
        positions = torch.arange(length)[None]
        batches.append(
            Microbatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, ((length,),))
        )
    return batches


def decoder(spec: ModelSpec) -> Decoder:
    """The model in float64 with its initial weights."""
    model = Decoder(spec).double()
    initialize_(whole(dict(model.named_parameters())), model, seed=0, std=spec.initializer_range)
    return model


def one_process(spec: ModelSpec, batches: list[Microbatch]) -> dict[str, Tensor]:
    """Every gradient of the mean loss, by plain PyTorch."""
    model = decoder(spec)
    tokens = sum(batch.labels_BS.numel() for batch in batches)
    for batch in batches:
        (model.loss_sum(batch) / tokens).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def ours(spec: ModelSpec, batches: list[Microbatch], calls: int) -> dict[str, Tensor]:
    """Every gradient of ours, whole on every rank. Two calls are a step of twice the microbatches."""
    batches = batches * calls
    mesh = Mesh(Layout.parse(f"pp{RANKS}"))
    longest = max(batch.labels_BS.shape[1] for batch in batches)
    model = initialized(
        spec, mesh, microbatches=len(batches), dtype="float64", seed=0, sequence_length=longest
    )
    tokens = sum(batch.labels_BS.numel() for batch in batches)
    found: dict[str, Tensor] = {}

    def update(_: Tensor) -> None:
        found.update({name: g * calls for name, g in model.named_gradients()})

    model.step(batches, valid_tokens=tokens, update=update)
    return found


def torchs(spec: ModelSpec, batches: list[Microbatch], calls: int) -> dict[str, Tensor]:
    """The gradients of PyTorch's own pipeline that this rank holds."""
    rank = dist.get_rank()
    model = decoder(spec)
    counts = split([0, *[1.0] * spec.num_hidden_layers, 1], stages=RANKS)
    module = Stage(model, counts, rank, batches[0].labels_BS.shape[1])
    stage = pipelining.PipelineStage(module, rank, RANKS, torch.device("cpu"))
    tokens = sum(batch.labels_BS.numel() for batch in batches)
    pipeline = pipelining.Schedule1F1B(
        stage,
        n_microbatches=len(batches),
        loss_fn=lambda logits, labels: cross_entropy_sum(logits, labels) * len(batches) / tokens,
    )
    if len({batch.labels_BS.shape for batch in batches}) > 1:
        raise NotImplementedError("step() takes one tensor and cuts it into equal microbatches")
    ids = torch.cat([batch.input_ids_BS for batch in batches])
    labels = torch.cat([batch.labels_BS for batch in batches])
    for _ in range(calls):
        if rank == 0:
            pipeline.step(ids)
        else:
            pipeline.step(target=labels, losses=[])
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None and used(module, p)}


def used(module: torch.nn.Module, parameter: Tensor) -> bool:
    """Whether a stage holds a parameter."""
    return any(parameter is own for own in module.parameters())


def outcome(run: Callable[[], dict[str, Tensor]], expected: dict[str, Tensor], factor: int) -> str:
    """The worst error over ranks, or the message of what was refused."""
    try:
        found, message = run(), ""
    except Exception as error:
        found, message = {}, f"refused: {type(error).__name__}: {str(error).splitlines()[0][:70]}"
    worst = max(
        (
            float((g - factor * expected[name]).abs().max() / (factor * expected[name]).abs().max())
            for name, g in found.items()
        ),
        default=0.0,
    )
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, (worst, message))
    messages = [text for _, text in everyone if text]
    return messages[0] if messages else f"{max(error for error, _ in everyone):.0e}"


def measure(rank: Rank) -> list[dict[str, str]]:
    """The rows, on each rank."""
    rank.connect(device_type="cpu", agree_on={})
    rows = []
    base = ModelSpec.preset("tiny")
    for case, calls in [*((case, 1) for case in CASES), (replace(CASES[0], name=CALLS), 2)]:
        spec = base.replace({"tie_word_embeddings": case.tied})
        batches = batches_of(case, spec.vocab_size)
        expected = one_process(spec, batches)
        row = {"case": case.name}
        for name, run in (("fourfold", ours), ("torch", torchs)):
            row[name] = outcome(partial(run, spec, batches, calls), expected, calls)
        rows.append(row)
    return rows


def main() -> None:
    from benchmarks import pipeline_cases  # ranks import what they run

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()
    rows = launch(RANKS, pipeline_cases.measure)
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(title="worst relative error of a gradient against one process, float64")
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*row.values())
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
