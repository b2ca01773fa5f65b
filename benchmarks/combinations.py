"""Two axes at once on 4 ranks, against the same combination of PyTorch's own modules.

python benchmarks/combinations.py [--json] [--workload chatty] [--rounds 8]
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.combination_contestants import TorchFsdpTensor, TorchPipelineOf
from benchmarks.contestants import Ours, Plain
from benchmarks.report import Row, run
from benchmarks.teams import Build, interleaved
from benchmarks.workloads import MODEL, Workload
from fourfold.explain import explain
from fourfold.outline import Step
from fourfold.specs import Layout

MICROBATCHES = 4


def ours(layout: str, microbatches: int, workload: Workload, rank: int, ranks: int) -> Ours:
    return Ours(workload, layout, microbatches=microbatches)


def measure(workload: Workload, ranks: int, *, rounds: int | None) -> list[Row]:
    """A row for each combination."""
    pipeline = partial(TorchPipelineOf, workload, microbatches=MICROBATCHES)
    peers: dict[str, tuple[str, int, Build]] = {
        "fsdp2,tp2": ("torch FSDP2 x parallelize_module", 1, partial(TorchFsdpTensor, workload)),
        "pp2,fsdp2": ("torch 1F1B x FSDP2", MICROBATCHES, partial(pipeline, inner="fsdp")),
        "pp2,tp2": ("torch 1F1B x parallelize_module", MICROBATCHES, partial(pipeline, inner="tp")),
    }
    builds: dict[str, Build] = {"limit": partial(Plain, workload)}
    for layout, (name, microbatches, peer) in peers.items():
        builds[layout] = partial(ours, layout, microbatches, workload)
        builds[name] = peer
    scores = interleaved(builds, ranks, rounds=rounds, workload=workload)
    return [
        Row.of(
            workload.name,
            layout,
            ours=scores[layout],
            peer=name,
            peer_score=scores[name],
            limit=scores["limit"],
            formula_bytes=formula_bytes(workload, layout, microbatches),
        )
        for layout, (name, microbatches, _) in peers.items()
    ]


def formula_bytes(workload: Workload, layout: str, microbatches: int) -> float:
    """What a rank sends in a step as `fourfold explain` predicts it, a mean over pipeline ranks."""
    step = Step(
        MODEL,
        Layout.parse(layout),
        batch=workload.batch,
        sequence_length=workload.sequence_length,
        microbatches=microbatches,
        dtype="float32",
    )
    found = explain(step, device_type="cpu").traffic
    return sum(kind.sent_bytes for rank in found for kind in rank) / len(found)


if __name__ == "__main__":
    run(__doc__, measure, ranks=(4,))
