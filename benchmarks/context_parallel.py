"""Context parallelism by ring and by Ulysses against others' attention over ranks, and against PyTorch's DDP.

python benchmarks/context_parallel.py [--json] [--workload dense] [--ranks 2] [--rounds 24]

All train the same model on the same batch. DDP cuts rows where the others cut sequences: the ratio to it is
what that costs. The limit is a bare loop over as many rows, with nothing sent. Peers that cannot run here are
named with the reason.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.contestants import Ddp, Ours, Plain
from benchmarks.context_contestants import ATTENTION, CutTokens, left_out
from benchmarks.report import Row, run
from benchmarks.teams import Build, interleaved
from benchmarks.workloads import MODEL, Workload
from fourfold.events import SCALAR_BYTES, SCALAR_DTYPE
from fourfold.sequence.costs import SequenceCosts
from fourfold.specs import Layout
from fourfold.traffic import Event, sent_bytes

ROWS_INSTEAD = "torch DDP, rows instead"
LAYOUTS = ("cp{}:ring", "cp{}:ulysses")


def ours(layout: str, workload: Workload, rank: int, ranks: int) -> Ours:
    return Ours(workload, layout.format(ranks))


def measure(workload: Workload, ranks: int, *, rounds: int | None) -> list[Row]:
    """A row for each layout and peer, all interleaved."""
    missing = left_out()
    for name, reason in missing.items():
        print(f"{workload.name}, {ranks} ranks, left out: {name}: {reason}", file=sys.stderr)
    peers: dict[str, Build] = {ROWS_INSTEAD: partial(Ddp, workload, own_decoder=False)}
    peers |= {name: partial(CutTokens, workload, peer=name) for name in ATTENTION if name not in missing}
    builds: dict[str, Build] = {"limit": partial(Plain, workload), **peers}
    builds |= {layout: partial(ours, layout, workload) for layout in LAYOUTS}
    scores = interleaved(builds, ranks, rounds=rounds, workload=workload)
    return [
        Row.of(
            workload.name,
            layout.format(ranks),
            ours=scores[layout],
            peer=peer,
            peer_score=scores[peer],
            limit=scores["limit"],
            formula_bytes=formula_bytes(workload, Layout.parse(layout.format(ranks))),
        )
        for layout in LAYOUTS
        for peer in peers
    ]


def formula_bytes(workload: Workload, layout: Layout) -> float:
    """What a rank sends in a step: attention's messages, one all-reduce of every gradient, and the loss."""
    total = 0.0
    for rank in range(layout.cp):
        costs = SequenceCosts(
            documents=[((workload.sequence_length,),) * workload.batch],
            heads=MODEL.num_attention_heads,
            kv_heads=MODEL.num_key_value_heads,
            head_dim=MODEL.head_dim,
            window=None,
            dtype="float32",
            itemsize=4,
            ring=layout.cp // layout.ulysses(MODEL),
            ulysses=layout.ulysses(MODEL),
            rank=rank,
        )
        attention = [*costs.forward(0), *costs.backward(0)] * MODEL.num_hidden_layers
        # Heads are exchanged among the ranks of Ulysses alone; a message of the ring is sent whole.
        total += sum(sent_bytes(event, layout.ulysses(MODEL)) for event in attention)
    messages = [
        Event("all_reduce", "cp", 4 * MODEL.num_parameters, "float32"),
        Event("all_reduce", "cp", 2 * SCALAR_BYTES, SCALAR_DTYPE),
    ]
    return total / layout.cp + sum(sent_bytes(message, layout.cp) for message in messages)


if __name__ == "__main__":
    run(__doc__, measure, ranks=(2, 4))
