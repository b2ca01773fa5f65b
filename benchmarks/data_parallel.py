"""Plain data parallelism against PyTorch's DistributedDataParallel, and one rank against a bare PyTorch loop.

python benchmarks/data_parallel.py [--json] [--workload dense] [--ranks 2] [--rounds 24]
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.contestants import Ddp, Ours, Plain
from benchmarks.report import Row, run
from benchmarks.teams import Build, interleaved
from benchmarks.workloads import MODEL, Workload
from fourfold.events import SCALAR_BYTES, SCALAR_DTYPE
from fourfold.traffic import Event, sent_bytes


def ours(workload: Workload, rank: int, ranks: int) -> Ours:
    return Ours(workload, f"dp{ranks}")


PEERS = {"torch DDP": False, "torch DDP around our Decoder": True}


def measure(workload: Workload, ranks: int, *, rounds: int | None) -> list[Row]:
    """A row for each peer: ours, the peers and the limit, interleaved."""
    builds: dict[str, Build] = {"ours": partial(ours, workload), "limit": partial(Plain, workload)}
    if ranks > 1:
        builds |= {peer: partial(Ddp, workload, own_decoder=own) for peer, own in PEERS.items()}
    scores = interleaved(builds, ranks, rounds=rounds, workload=workload)
    peers = {peer: scores[peer] for peer in PEERS} if ranks > 1 else {"bare PyTorch loop": scores["limit"]}
    return [
        Row.of(
            workload.name,
            f"dp{ranks}",
            ours=scores["ours"],
            peer=peer,
            peer_score=score,
            limit=scores["limit"],
            formula_bytes=formula_bytes(ranks),
        )
        for peer, score in peers.items()
    ]


def formula_bytes(ranks: int) -> float:
    """What a rank sends in a step: one all-reduce of every gradient in float32, and one of the loss."""
    messages = [
        Event("all_reduce", "dp", 4 * MODEL.num_parameters, "float32"),
        Event("all_reduce", "dp", 2 * SCALAR_BYTES, SCALAR_DTYPE),
    ]
    return sum(sent_bytes(message, ranks) for message in messages)


if __name__ == "__main__":
    run(__doc__, measure, ranks=(1, 2, 4))
