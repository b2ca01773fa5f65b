"""Pipeline parallelism against torch.distributed.pipelining.

python benchmarks/pipeline.py [--json] [--workload dense] [--ranks 2] [--rounds 24]
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.contestants import Ours, Plain, TorchPipeline
from benchmarks.report import Row, run
from benchmarks.teams import Build, interleaved
from benchmarks.workloads import MODEL, Workload
from fourfold.events import SCALAR_BYTES, SCALAR_DTYPE
from fourfold.specs import ScheduleName
from fourfold.traffic import Event, sent_bytes

MICROBATCHES = 8

PEERS = {
    "1f1b": "Schedule1F1B",
    "gpipe": "ScheduleGPipe",
    "interleaved2": "ScheduleInterleaved1F1B",
    "zbv": "ScheduleZBVZeroBubble",
}
"""The same schedule, ours and theirs."""


def ours(schedule: str, workload: Workload, rank: int, ranks: int) -> Ours:
    return Ours(workload, f"pp{ranks}:{schedule}", microbatches=MICROBATCHES)


def measure(workload: Workload, ranks: int, *, rounds: int | None) -> list[Row]:
    """A row for each schedule, against PyTorch's with its own norm and loss and with our decoder."""
    builds: dict[str, Build] = {"limit": partial(Plain, workload)}
    for schedule, peer in PEERS.items():
        builds[schedule] = partial(ours, schedule, workload)
        builds[f"torch {peer}"] = partial(
            TorchPipeline, workload, schedule=peer, microbatches=MICROBATCHES, own_decoder=False
        )
    peer = PEERS["1f1b"]
    builds[f"torch {peer}, our decoder"] = partial(
        TorchPipeline, workload, schedule=peer, microbatches=MICROBATCHES, own_decoder=True
    )
    scores = interleaved(builds, ranks, rounds=rounds, workload=workload)
    pairs = [(schedule, f"torch {name}") for schedule, name in PEERS.items()]
    pairs.insert(1, ("1f1b", f"torch {peer}, our decoder"))
    return [
        Row.of(
            workload.name,
            f"pp{ranks}:{schedule}",
            ours=scores[schedule],
            peer=name,
            peer_score=scores[name],
            limit=scores["limit"],
            formula_bytes=formula_bytes(workload, ranks, schedule),
        )
        for schedule, name in pairs
    ]


def formula_bytes(workload: Workload, ranks: int, schedule: str) -> float:
    """Each boundary of stages on two ranks is crossed by all activations and by all their gradients.

    And the loss and the norm are summed over ranks. A mean over ranks: the ends send less.
    """
    stages = ranks * (ScheduleName.parse(schedule).stages_per_rank or 1)
    inner = 1 if schedule == "zbv" else 0  # the turn of the V stays on its rank
    crossings = 2 * (stages - 1 - inner)
    activations = 4 * workload.tokens * MODEL.hidden_size
    sums = sent_bytes(Event("all_reduce", "pp", 3 * SCALAR_BYTES, SCALAR_DTYPE), ranks)
    return crossings * activations / ranks + sums


if __name__ == "__main__":
    run(__doc__, measure, ranks=(2, 4))
