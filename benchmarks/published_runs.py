"""Published training runs as steps that the planner can predict: models, layouts and machines from a table.

``data/published_runs.csv`` has facts of 1,121 runs from public pages: model, devices, layout, batch, rate and
memory. Rows with ``gold`` = 1 are complete and agree with themselves. A mixture of experts has no
`ModelSpec`, and rows that leave a size open are no step either; both are counted.
"""

import csv
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks.published_software import Row, chunks_of, practice_of, stack_of
from fourfold.errors import UserError
from fourfold.outline import Step
from fourfold.planner.catalogue import BUS_LATENCY, LINK_SHARE, NETWORK_SHARE, machine
from fourfold.planner.machine import Level, Machine
from fourfold.planner.plans import POLICIES, Question
from fourfold.planner.practice import Practice
from fourfold.planner.search import Search
from fourfold.planner.stages import most_stages
from fourfold.specs import Layout, ModelSpec
from fourfold.specs.recompute_name import RecomputeName

TABLE = Path(__file__).parent / "data" / "published_runs.csv"

GPT2_VOCABULARY = 50304
"""Of GPT models whose source names none."""

BUS_BYTES_PER_SECOND = 31e9
"""Of PCIe 4, between boards of devices that their links do not join."""

OMNI_PATH_SHARE = 0.4
"""Of an adapter's line rate, what NCCL reached on Jean Zay: 40.5 of 100 Gb/s in a ring over four nodes of
A100 through one adapter, 54 to 85 through two on V100 (BigScience, ``experiments/bandwidth``)."""


class PlainModel(ModelSpec):
    """A decoder whose feed-forward has two matrices and no gate."""

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Without the gate."""
        return {name: shape for name, shape in super().layer_shapes().items() if "gate_proj" not in name}


@dataclass(frozen=True)
class PublishedRun:
    """A row of the table that the planner can predict.

    Attributes:
        row: as the table has it.
        step: what ran, and ``machine`` on what.
        practice: of its kernels.
        seconds: of a step, None where the row has no rate.
        stack: the software and its release, by source.
    """

    row: Row
    step: Step
    machine: Machine
    practice: Practice
    seconds: float | None

    @property
    def stack(self) -> str:
        """The software that ran, by its source."""
        return stack_of(self.row["source"])


def rows() -> list[Row]:
    """All rows of the table."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def published(row: Row) -> PublishedRun | str:
    """A row as a step, or why it is none."""
    return _published(tuple(row.items()))


@cache
def _published(items: tuple[tuple[str, str], ...]) -> PublishedRun | str:
    row = dict(items)
    try:
        spec = model_of(row)
        if isinstance(spec, str):
            return spec
        step = _step(row, spec)
    except UserError as error:
        return f"no such layout: {error.messages[0][:60]}"
    except ValueError:
        return "a size is not given"
    practice = practice_of(row)
    most = most_stages(step.spec.num_hidden_layers, practice.dealt)
    # The schedule itself is made by the planner, with fewer microbatches.
    if problems := step.layout.problems(
        step.spec.replace({"num_hidden_layers": most}),
        batch=step.batch,
        microbatches=step.microbatches,
        sequence_length=step.sequence_length,
        world_size=None,
    ):
        return f"no such layout: {problems[0][:60]}"
    if row["precision"] == "nvfp4":
        return "products in 4 bits"
    if "offload" in row["notes"]:
        return "state on the host"
    devices = machine_of(row)
    return PublishedRun(row, _fitting(step, row, devices), devices, practice, _seconds(row))


def model_of(row: Row) -> ModelSpec | str:
    """The model of a row, or why there is none."""
    hidden, layers = int(row["d_model"]), int(row["n_layers"])
    heads = int(row["n_heads"] or hidden // 128)
    kind = ModelSpec if row["mlp"] in ("swiglu", "geglu") else PlainModel
    spec = _spec(
        kind,
        int(row["vocab"] or GPT2_VOCABULARY),
        hidden,
        int(row["d_ff"]),
        layers,
        heads,
        int(row["n_kv_heads"] or heads),
        row["tied"] == "1",
    )
    stated = float(row["params_b"]) * 1e9
    if row["ep"] not in ("", "1") or stated > 1.25 * spec.num_parameters:
        return "a mixture of experts"
    return spec if abs(spec.num_parameters / stated - 1) < 0.1 else "its sizes are not its parameters"


@cache
def _spec(
    kind: type[ModelSpec],
    vocab: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    tied: bool,
) -> ModelSpec:
    return kind(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads // 2 * 2,
        tie_word_embeddings=tied,
        max_position_embeddings=1 << 20,
    )


def _step(row: Row, spec: ModelSpec) -> Step:
    replicas, shards = int(row["dp_replicate"] or 1), int(row["dp_shard"] or 1)
    stage = row["zero_stage"]
    options: dict[str, str] = {}
    if stage == "3" or shards > 1:
        dp, fsdp = replicas, shards
    else:  # Megatron's distributed optimizer is ZeRO-1
        dp, fsdp = 1, replicas
        options["fsdp"] = "zero1"
        if stage == "0":
            dp, fsdp = replicas, 1
        elif match := re.search(r"zero1 (?:optimizer shard )?group (\d+)", row["notes"]):
            fsdp = min(int(match[1]), replicas)
            dp = replicas // fsdp
    if stage == "2":
        options["fsdp"] = "zero2"
    pp, tp, cp = int(row["pp"] or 1), int(row["tp"] or 1), int(row["cp"] or 1)
    if pp > 1:
        options["pp"] = _schedule(row)
    if tp > 1 and row["sequence_parallel"] == "0":
        options["tp"] = "allreduce"
    if cp > 1:
        options["cp"] = "ring"
    layout = Layout(
        pp=pp, dp=dp, fsdp=fsdp, cp=cp, tp=tp, options={} if fsdp == 1 and pp == tp == 1 else options
    )
    if layout.world_size != int(row["n_gpus"]):
        raise UserError("the degrees do not multiply to the devices")
    batch, rows_at_once = int(row["global_batch_seqs"]), int(row["micro_batch"])
    return Step(
        spec,
        layout,
        batch=batch,
        sequence_length=int(row["seq_len"]),
        microbatches=max(1, batch // (dp * fsdp * rows_at_once)),
        dtype="bfloat16",  # float16 runs as fast
        recompute=RecomputeName("full" if row["activation_ckpt"] == "full" else "none"),
    )


def _fitting(step: Step, row: Row, devices: Machine) -> Step:
    """A step whose row does not say what runs again: as little as memory allows.

    Where weights are not sharded the row is of Megatron, whose default runs nothing again but what fused
    attention does anyway.
    """
    if row["activation_ckpt"] or not step.layout.placement.weights:
        return step
    search = Search(Question(step.spec, devices, step.layout.world_size, step.sequence_length, step.batch))
    for policy in POLICIES:
        found = replace(step, recompute=RecomputeName(policy))
        if search.fits(search.plan(found)):
            return found
    return step


def _schedule(row: Row) -> str:
    if row["schedule"].startswith("zb"):
        return "zb-h2" if row["schedule"] == "zb-2p" else "zb-h1"
    if row["schedule"] == "gpipe":
        return "gpipe"
    chunks = chunks_of(row)
    return f"interleaved{chunks}" if chunks > 1 else "1f1b"


@cache
def _machine(gpu: str, node: int, linked: int, network: float | None) -> Machine:
    found = machine(gpu.removesuffix("-SXM"), network_bytes_per_second=network)
    near = found.levels[0]
    if near.ranks > 8:  # several trays share the links of a rack
        return found
    levels: tuple[Level, ...] = (replace(near, ranks=linked),)
    if linked < node:  # between boards of a node: the bus
        levels = (*levels, Level(node, BUS_BYTES_PER_SECOND * LINK_SHARE, BUS_LATENCY))
    return replace(found, levels=(*levels, *found.levels[1:]))


def machine_of(row: Row) -> Machine:
    """The devices of a row, with its network where the row says which."""
    node = int(row["gpus_per_node"] or 8)
    # An A100 has 12 links: with 4 to each peer it has 3 peers.
    linked = 4 if "4 links per pair" in row["intra_node_bw"] else node
    return _machine(row["gpu"], node, linked, _network(row["inter_node_bw"], node))


def _network(text: str, node: int) -> float | None:
    """Bytes per second for each device, None where a row does not say."""
    if match := re.match(r"(\d+)x(\d+) Gb/s", text):
        share = OMNI_PATH_SHARE if "Omni-Path" in text else NETWORK_SHARE
        return int(match[1]) * int(match[2]) / 8e-9 / node * share
    if match := re.match(r"(\d+) Gb/s per node", text):
        return int(match[1]) / 8e-9 / node * NETWORK_SHARE
    if match := re.match(r"(\d+)x(\d+) GB/s", text):
        return int(match[1]) * int(match[2]) * 1e9 / node * NETWORK_SHARE
    return None


def _seconds(row: Row) -> float | None:
    if row["step_time_s"]:
        return float(row["step_time_s"])
    rate = row["tok_s_gpu_derived"] or row["tokens_per_s_per_gpu"]
    if not rate:
        return None
    return int(row["global_batch_seqs"]) * int(row["seq_len"]) / float(rate) / int(row["n_gpus"])
