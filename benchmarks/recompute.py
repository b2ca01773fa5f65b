"""Time for memory on a chain of 64 equal blocks: forwards and peak bytes, in theory and measured.

python benchmarks/recompute.py [--json] [--picture docs/recompute.png]

A block adds a feed-forward to its input: with C channels it keeps its input, 4 C and their activation 4 C, a
tape of 9 inputs. One rank, one microbatch. *Forwards* are those of blocks in a step, counted as they run.
*Peak* is the most bytes of tensors that live at once beside weights and their gradients, in inputs of a
block; in theory it is what is kept between two actions, without what a block makes while it runs. Beside ours
stands ``torch.utils.checkpoint`` around every block, and ``checkpoint_sequential`` around every eight.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import comb
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from fourfold.batch.rank_units import rank_units_
from fourfold.batch.unit_specs import unit_specs
from fourfold.batch.units import Unit
from fourfold.build import Sharding, UnitUse, build
from fourfold.execute import Executor
from fourfold.layer.schedules import one_forward_one_backward
from fourfold.ledger import Ledger
from fourfold.memory import Category
from fourfold.mesh import Mesh
from fourfold.models import Microbatch, Piece
from fourfold.program.liveness import Block, peak_bytes
from fourfold.recompute.plan import forwards, plan
from fourfold.segment import Segment
from fourfold.specs import Layout
from fourfold.specs.recompute_name import RecomputeName
from fourfold.weight_gradients import WeightGradients

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLOCKS, ROWS, LENGTH, CHANNELS = 64, 4, 64, 64
INPUT = ROWS * LENGTH * CHANNELS * 4
TAPE, KEPT = 9 * INPUT, 4 * INPUT
POLICIES = (
    "none", "budget:0.02", "selective", "full", "every:4", "sqrt", "slots:8", "slots:4", "slots:3", "slots:2",
    "min",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One way to run a step.

    Attributes:
        policy: its name.
        forwards: of blocks, counted; and ``forwards_in_theory`` by formula, None where there is none.
        peak_inputs: most bytes at once, in inputs of a block; and ``peak_in_theory`` of inputs and tapes.
        seconds: of the processor for a step, the median: other work on the machine counts less.
    """

    policy: str
    forwards: int
    forwards_in_theory: int | None
    peak_inputs: float
    peak_in_theory: float | None
    seconds: float


class Layer(nn.Module):
    """A block, which counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(CHANNELS, 4 * CHANNELS, bias=False)
        self.down = nn.Linear(4 * CHANNELS, CHANNELS, bias=False)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, S, C)."""
        self.forwards += 1
        return x + self.down(F.silu(self.up(x)))


class Chain(nn.Module):
    """Equal blocks; the first starts from a given tensor, the last ends in a sum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(BLOCKS))

    @property
    def forwards(self) -> int:
        """Of all blocks, so far."""
        return sum(layer.forwards for layer in self.layers if isinstance(layer, Layer))


Step = Callable[[], None]


def ours(policy: str) -> Row:
    """A step of our executor."""
    name, model, start = RecomputeName.parse(policy), Chain(), _start()
    keeps = frozenset({"up"}) if name.name == "selective" else frozenset()
    unread = frozenset({"down"}) if keeps else frozenset()
    blocks = [Block(1.0, INPUT, TAPE, 0, KEPT if keeps else 0)] * BLOCKS
    program = build(
        one_forward_one_backward(ranks=1, microbatches=1),
        segments_of_stage=[BLOCKS],
        units=[UnitUse(tuple(range(BLOCKS)))],
        sharding=Sharding(),
        recompute=name,
        blocks=blocks,
    )
    mesh, weight_gradients = Mesh(Layout()), WeightGradients()
    unit = _unit(model, mesh)
    weight_gradients.attach_(model)
    pieces = [
        Piece(str(i), (layer,), partial(_forward, i, layer, start)) for i, layer in enumerate(model.layers)
    ]
    segments = {
        i: Segment(piece, weight_gradients, keeps=keeps, unread=unread) for i, piece in enumerate(pieces)
    }
    executor = Executor(
        program, segments, {0: unit}, weight_gradients=weight_gradients, mesh=mesh,
        activation=lambda _: start,
    )  # fmt: skip
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    batch = Microbatch(ids, ids, ids, ((LENGTH,),) * ROWS)

    def step() -> None:
        executor.step(program.ranks[0], [batch], valid_tokens=1, update=lambda _: None)

    ledger = Ledger(mesh.device)
    ledger.add_unit(unit)
    (peak,) = peak_bytes(program, blocks)
    number = sum(str(action.kind) in ("F", "R") for action in program.ranks[0])
    if name.name != "budget":
        assert number == forwards(plan(name, blocks, at_once=True))
    return _measured(policy, model, step, ledger, _theory(name) or number, peak / INPUT)


def _theory(policy: RecomputeName) -> int | None:
    """Forwards by closed form, where the backward follows at once; None for a budget."""
    N, number = BLOCKS, policy.number
    match policy.name:
        case "none":
            return N
        case "full" | "selective":
            return 2 * N - 1
        case "every" | "sqrt":
            group = int(number or 8)
            return 2 * N - group
        case "slots" | "min":
            s = int(number or 1)
            r = next(r for r in range(N) if comb(s + r, s) >= N)
            return N + r * N - comb(s + r, r - 1)
    return None


def torch_checkpoint(group: int) -> Row:
    """PyTorch's own, around every ``group`` blocks."""
    model, start = Chain(), _start().requires_grad_()
    layers = [layer for layer in model.layers if isinstance(layer, Layer)]

    def step() -> None:
        model.zero_grad(set_to_none=False)
        x = start
        if group == 1:
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=False)
        else:
            x = checkpoint_sequential(layers, BLOCKS // group, x, use_reentrant=False)
        x.sum().backward()

    step()  # makes the gradients
    ledger = Ledger(start.device)
    found = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), start]
    assert start.grad is not None
    ledger.add([*found, start.grad], Category.GRADIENTS)
    name = "torch checkpoint, every block" if group == 1 else f"torch checkpoint_sequential, every {group}"
    return _measured(name, model, step, ledger, None, None)


def _start() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, LENGTH, CHANNELS, generator=generator)


def _forward(index: int, layer: nn.Module, start: Tensor, x: Tensor | None, _: Microbatch) -> Tensor:
    y: Tensor = layer(start if x is None else x)
    return y.sum() if index == BLOCKS - 1 else y


def _unit(model: Chain, mesh: Mesh) -> Unit:
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    [spec] = unit_specs(
        model, {"all": (model,)}, rank_of_segment=[0], shards=1, pieces="flat", dtype=torch.float32
    )
    [unit] = rank_units_(model, [spec], mesh=mesh, dtype=torch.float32).values()
    unit.load_(values.__getitem__)
    return unit


def _measured(
    name: str, model: Chain, step: Step, ledger: Ledger, in_theory: int | None, peak: float | None
) -> Row:
    before = model.forwards
    with ledger:
        step()
    count = model.forwards - before
    seconds = []
    for _ in range(5):
        began = time.process_time()
        step()
        seconds.append(time.process_time() - began)
    most = ledger.peak[Category.ACTIVATIONS] / INPUT
    return Row(name, count, in_theory, most, peak, statistics.median(seconds))


def table(rows: Sequence[Row]) -> Table:
    """The rows as a table."""
    found = Table(title=f"{BLOCKS} equal blocks, a tape of 9 inputs each")
    for column in ("policy", "forwards", "theory", "of none", "peak, inputs", "theory", "cpu ms"):
        found.add_column(column, justify="left" if column == "policy" else "right")
    for row in rows:
        found.add_row(
            row.policy,
            str(row.forwards),
            str(row.forwards_in_theory or "-"),
            f"x{row.forwards / BLOCKS:.2f}",
            f"{row.peak_inputs:.0f}",
            "-" if row.peak_in_theory is None else f"{row.peak_in_theory:.0f}",
            f"{row.seconds * 1e3:.0f}",
        )
    return found


_CROWDED = (44.0, 106.0), (1.80, 2.12)
"""Peaks and forwards of the policies that one picture of all cannot tell apart."""


def picture(rows: Sequence[Row], path: Path) -> None:
    """Forwards over peak memory, both measured, and in theory; what lies close together once more, larger."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.4), dpi=120, layout="constrained")
    axes = figure.subplots()
    closer = axes.inset_axes((0.47, 0.42, 0.53, 0.55), xlim=_CROWDED[0], ylim=_CROWDED[1])
    for row in rows:
        x, y = row.peak_inputs, row.forwards / BLOCKS
        is_crowded = _CROWDED[0][0] < x < _CROWDED[0][1] and _CROWDED[1][0] < y < _CROWDED[1][1]
        _draw(row, axes, label="" if is_crowded else row.policy)
        if is_crowded:
            label = row.policy.replace("torch ", "torch\n").replace(", every", ",\nevery")
            _draw(row, closer, label=label, is_below=True)
    _scales(axes)
    closer.set_xticks((50, 60, 70, 80, 90, 100))
    closer.set_yticks((1.8, 1.9, 2.0, 2.1))
    closer.tick_params(labelsize=8)
    axes.indicate_inset_zoom(closer, edgecolor="#4a5568")
    for each in (axes, closer):
        each.grid(alpha=0.3)
        each.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    names = dict(zip(labels, handles, strict=True))
    axes.legend(names.values(), names.keys(), fontsize=8, loc="lower left", frameon=False)
    figure.savefig(path)


def _draw(row: Row, axes: "Axes", *, label: str, is_below: bool = False) -> None:
    """A policy as a point, with a line to where theory has it; PyTorch's as a cross."""
    x, y = row.peak_inputs, row.forwards / BLOCKS
    is_ours = row.peak_in_theory is not None
    if row.peak_in_theory is not None:
        there = row.peak_in_theory, (row.forwards_in_theory or row.forwards) / BLOCKS
        axes.plot([x, there[0]], [y, there[1]], color="#a0aec0", linewidth=1, zorder=1)
        axes.plot(
            *there,
            "o",
            fillstyle="none",
            color="#718096",
            markersize=9,
            linestyle="none",
            label="between two actions, in theory",
        )
    axes.plot(
        x,
        y,
        "o" if is_ours else "X",
        color="#2b6cb0" if is_ours else "#c05621",
        markersize=6 if is_ours else 8,
        linestyle="none",
        label="measured" if is_ours else "torch.utils.checkpoint, measured",
    )
    # PyTorch's lie on ours, so where both are the names of ours stand below.
    offset, align = ((0, -16), "center") if is_below and is_ours else ((8, 4), "left")
    axes.annotate(label, (x, y), xytext=offset, textcoords="offset points", fontsize=8, ha=align)


def _scales(axes: "Axes") -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(8, 1100)
    axes.set_ylim(0.8, 50)
    for axis, ticks in ((axes.xaxis, (10, 20, 50, 100, 200, 500, 1000)), (axes.yaxis, (1, 2, 5, 10, 20, 50))):
        axis.set_ticks(ticks, labels=[str(tick) for tick in ticks])
        axis.set_ticks([], minor=True)
    axes.set_xlabel("peak memory of activations, in inputs of a block")
    axes.set_ylabel("forwards of blocks, in those of none")
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--picture", type=Path, help="a PNG to draw")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [*map(ours, POLICIES), torch_checkpoint(1), torch_checkpoint(8)]
    if options.picture is not None:
        picture(rows, options.picture)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        Console(width=120).print(table(rows))


if __name__ == "__main__":
    main()
