"""Plain data parallelism against PyTorch's DistributedDataParallel, and one rank against a bare PyTorch loop.

python benchmarks/data_parallel.py [--json] [--workload dense] [--ranks 2] [--rounds 8]
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.contestants import Ddp, Ours, Plain
from benchmarks.report import Row, arguments, show
from benchmarks.teams import Build, interleaved
from benchmarks.workloads import MODEL, WORKLOADS, Workload
from fourfold.batch.reduction import LOSS_BYTES, LOSS_DTYPE
from fourfold.traffic import Event, sent_bytes


def ours(workload: Workload, rank: int, ranks: int) -> Ours:
    return Ours(workload, f"dp{ranks}")


def measure(workload: Workload, ranks: int, *, rounds: int) -> Row:
    """One row: ours, the peer and the limit, interleaved."""
    builds: dict[str, Build] = {"ours": partial(ours, workload), "limit": partial(Plain, workload)}
    if ranks > 1:
        builds["ddp"] = partial(Ddp, workload)
    scores = interleaved(builds, ranks, rounds=rounds, workload=workload)
    peer = "ddp" if ranks > 1 else "limit"
    return Row.of(
        workload.name,
        f"dp{ranks}",
        ours=scores["ours"],
        peer="torch DDP" if ranks > 1 else "bare PyTorch loop",
        peer_score=scores[peer],
        limit=scores["limit"],
        formula_bytes=formula_bytes(ranks),
    )


def formula_bytes(ranks: int) -> float:
    """What a rank sends in a step: one all-reduce of every gradient in float32, and one of the loss."""
    messages = [
        Event("all_reduce", "dp", 4 * MODEL.num_parameters, "float32"),
        Event("all_reduce", "dp", LOSS_BYTES, LOSS_DTYPE),
    ]
    return sum(sent_bytes(message, ranks) for message in messages)


def main() -> None:
    options = arguments(__doc__, ranks=(1, 2, 4))
    rows = [
        measure(WORKLOADS[name], ranks, rounds=options.rounds)
        for name in options.workloads
        for ranks in options.ranks
    ]
    show(rows, json=options.json)


if __name__ == "__main__":
    main()
