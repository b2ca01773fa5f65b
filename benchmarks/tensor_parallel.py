"""Tensor parallelism against PyTorch and Megatron-core, with and without sequence parallelism.

python benchmarks/tensor_parallel.py [--json] [--workload dense] [--ranks 2] [--rounds 24]
"""

import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.contestants import Ours, Plain
from benchmarks.report import Row, run
from benchmarks.teams import Build, interleaved
from benchmarks.tensor_contestants import TorchTensorParallel
from benchmarks.workloads import MODEL, Workload
from fourfold.channel.costs import ChannelCosts
from fourfold.events import SCALAR_BYTES, SCALAR_DTYPE, SegmentCosts
from fourfold.traffic import Event, sent_bytes

LAYOUTS = {"tp{}": True, "tp{}:allreduce": False}
"""Ours, and whether the residual stream is cut by tokens. The peers do the same."""


def ours(layout: str, workload: Workload, rank: int, ranks: int) -> Ours:
    return Ours(workload, layout.format(ranks))


def peers(workload: Workload, *, is_cut: bool) -> dict[str, Build]:
    """Who is compared with us, with sequence parallelism or without."""
    torch_peer = partial(TorchTensorParallel, workload, sequence_parallel=is_cut)
    found: dict[str, Build] = {
        "torch, sequence and loss parallel" if is_cut else "torch, loss parallel": torch_peer
    }
    if not is_cut:
        found["torch, logits gathered"] = partial(torch_peer, whole_logits=True)
    if find_spec("megatron") is not None:
        from benchmarks.megatron_contestant import VERSION, MegatronTensorParallel

        name = f"megatron-core {VERSION}" + (", sequence parallel" if is_cut else "")
        found[name] = partial(MegatronTensorParallel, workload, sequence_parallel=is_cut)
    return found


def measure(workload: Workload, ranks: int, *, rounds: int | None) -> list[Row]:
    """A row for each layout and peer; PyTorch's has its own norm and loss."""
    if find_spec("megatron") is None:
        print(
            "megatron-core is left out: it is not installed (pip install --no-deps megatron-core)",
            file=sys.stderr,
        )
    against = {layout: peers(workload, is_cut=is_cut) for layout, is_cut in LAYOUTS.items()}
    builds: dict[str, Build] = {"limit": partial(Plain, workload)}
    for layout in LAYOUTS:
        builds |= {layout: partial(ours, layout, workload)} | against[layout]
    scores = interleaved(builds, ranks, rounds=rounds, workload=workload)
    return [
        Row.of(
            workload.name,
            layout.format(ranks),
            ours=scores[layout],
            peer=peer,
            peer_score=scores[peer],
            limit=scores["limit"],
            formula_bytes=formula_bytes(workload, ranks, sequence_parallel=is_cut),
        )
        for layout, is_cut in LAYOUTS.items()
        for peer in against[layout]
    ]


def formula_bytes(workload: Workload, ranks: int, *, sequence_parallel: bool) -> float:
    """What a rank sends in a step: two collectives a layer and direction, the ends, the loss and the norm.

    With sequence parallelism also the gradients of the norms' weights, which each rank has of its tokens.
    """
    blocks = ("embed", *(f"layer.{i}" for i in range(MODEL.num_hidden_layers)), "head")
    costs = ChannelCosts(
        tokens=[workload.tokens],
        hidden_size=MODEL.hidden_size,
        vocab_size=MODEL.vocab_size,
        dtype="float32",
        itemsize=4,
        statistics_dtype="float32",
        statistics_itemsize=4,
        ranks=ranks,
        sequence_parallel=sequence_parallel,
    )
    inside = SegmentCosts([blocks], channel=costs)
    messages = [
        *inside.forward(0, 0),
        *inside.backward(0, 0),
        Event("all_reduce", "tp", 3 * SCALAR_BYTES, SCALAR_DTYPE),
    ]
    if sequence_parallel:
        norms = (2 * MODEL.num_hidden_layers + 1) * MODEL.hidden_size
        messages.append(Event("all_reduce", "tp", 4 * norms, "float32"))
    return sum(sent_bytes(message, ranks) for message in messages)


if __name__ == "__main__":
    run(__doc__, measure, ranks=(2, 4))
