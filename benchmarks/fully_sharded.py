"""Fully sharded data parallelism against PyTorch's FSDP2 and DDP, and DeepSpeed's ZeRO-3 where installed.

python benchmarks/fully_sharded.py [--json] [--workload dense] [--ranks 2] [--rounds 24]
"""

import importlib.util
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.contestants import Ddp, DeepSpeedZero3, Fsdp2, Ours, Plain
from benchmarks.report import Row, run
from benchmarks.teams import Build, interleaved
from benchmarks.workloads import MODEL, Workload
from fourfold.events import SCALAR_BYTES, SCALAR_DTYPE
from fourfold.traffic import Event, sent_bytes

LAYOUTS = ("fsdp{}", "fsdp{}:zero2", "fsdp{}:zero1")


def ours(layout: str, workload: Workload, rank: int, ranks: int) -> Ours:
    return Ours(workload, layout.format(ranks))


def measure(workload: Workload, ranks: int, *, rounds: int | None) -> list[Row]:
    """A row for each layout and peer, all interleaved."""
    builds: dict[str, Build] = {layout: partial(ours, layout, workload) for layout in LAYOUTS}
    builds |= {
        "limit": partial(Plain, workload),
        "torch FSDP2": partial(Fsdp2, workload),
        "torch DDP": partial(Ddp, workload, own_decoder=False),
    }
    peers = ["torch FSDP2", "torch DDP"]
    if importlib.util.find_spec("deepspeed") is not None:
        builds["DeepSpeed ZeRO-3"] = partial(DeepSpeedZero3, workload)
        peers.append("DeepSpeed ZeRO-3")
    scores = interleaved(builds, ranks, rounds=rounds, workload=workload)
    return [
        Row.of(
            workload.name,
            layout.format(ranks),
            ours=scores[layout],
            peer=peer,
            peer_score=scores[peer],
            limit=scores["limit"],
            formula_bytes=formula_bytes(ranks, layout),
        )
        for layout in LAYOUTS
        for peer in peers
    ]


def formula_bytes(ranks: int, layout: str) -> float:
    """The textbook's: weights once or twice, gradients once, in float32; and two scalars.

    `fourfold.events.step_events` predicts less for FSDP, and exactly: the backward of the embedding
    needs no weights, and the last unit stays at the turn.
    """
    weights = 4 * MODEL.num_parameters
    passes = 1 if "zero" in layout else 2
    messages = [Event("all_gather", "fsdp", weights, "float32")] * passes
    messages.append(Event("reduce_scatter", "fsdp", weights, "float32"))
    messages.append(Event("all_reduce", "fsdp", 3 * SCALAR_BYTES, SCALAR_DTYPE))  # the loss and the norm
    return sum(sent_bytes(message, ranks) for message in messages)


if __name__ == "__main__":
    run(__doc__, measure, ranks=(2, 4))
