"""What a checkpoint costs: saving, the pause, loading; beside the same bytes raw, and PyTorch's own.

python benchmarks/checkpoints.py [--json] [--megabytes 200] [--rounds 8] [--folder FOLDER]

One process, weights and both moments of AdamW in float32. In every round each contestant has one turn, in an
order drawn anew, and its ratio is to the raw bytes of the same round: one file written in chunks of 16 MiB
and brought onto the disk, in place of the one before, or read. Before each turn all files leave the system's
memory. The peer is torch.distributed.checkpoint with its defaults, on the same tensors. *pause* is how long
training stands still for an asynchronous save; *steps* are steps of training while a snapshot is written, as
a multiple of steps while none is.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fourfold.checkpoint import Saver, Saving, load_newest_, save
from fourfold.checkpoint.files import CHUNK_BYTES, content_of
from fourfold.checkpoint.state import held
from fourfold.data import SyntheticDataset
from fourfold.mesh import Mesh
from fourfold.specs import ModelSpec, RunSpec
from fourfold.training import Trainer

LENGTH = 64


@dataclass(frozen=True)
class Row:
    """One contestant: median seconds, and the quartiles of its ratios to ``beside``, round by round."""

    what: str
    beside: str
    seconds: float
    gigabytes_per_second: float
    ratio: float
    ratio_low: float
    ratio_high: float


def trainer_of(megabytes: int) -> Trainer:
    """Return a training whose weights and moments take about so much: 12 bytes a parameter."""
    spec = ModelSpec.preset("tiny").replace(
        {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 1}
    )
    one = spec.num_parameters
    layer = spec.replace({"num_hidden_layers": 2}).num_parameters - one
    layers = max(1, round((megabytes * 1e6 / 12 - one) / layer) + 1)
    run = RunSpec.model_validate(
        {
            "layout": "dp1",
            "model": {"preset": "tiny"},
            "data": {"sequence_length": LENGTH},
            "training": {"steps": 10**6, "batch": 4, "microbatches": 1},
            "optimizer": {"name": "adamw", "learning_rate": 1e-3},
        }
    )
    data = SyntheticDataset(spec.vocab_size, sequence_length=LENGTH, seed=0)
    return Trainer(run, spec.replace({"num_hidden_layers": layers}), Mesh(run.layout), data=data)


class Bench:
    """The contestants, by what they do, on one training."""

    def __init__(self, trainer: Trainer, folder: Path):
        self.trainer, self.folder, self.step = trainer, folder, 0
        parts = list(held(trainer.parallel, trainer.update))
        self.tensors = {part.tensor.name: part.values.view(part.tensor.shape) for part in parts}
        self.bytes = sum(values.nbytes for values in self.tensors.values())
        self.saving = Saving(folder / "ours", {}, {})
        self.saver = Saver(self.saving, trainer.parallel.mesh)
        self.pauses: dict[str, float] = {}
        self.during: list[float] = []

    def raw_write(self) -> None:
        """Write the bytes, and bring them onto the disk."""
        with (self.folder / "raw").open("wb", buffering=0) as file:
            for values in self.tensors.values():
                content = content_of(values.view(-1)).data
                for first in range(0, len(content), CHUNK_BYTES):
                    file.write(content[first : first + CHUNK_BYTES])
            os.fsync(file.fileno())

    def raw_read(self) -> None:
        """Read the bytes into new memory."""
        with (self.folder / "raw").open("rb", buffering=0) as file:
            for values in self.tensors.values():
                content = content_of(torch.empty_like(values).view(-1)).data
                while content:
                    content = content[file.readinto(content[:CHUNK_BYTES]) :]

    def save(self) -> None:
        """Save, and wait for it."""
        self.step += 1
        save(self.trainer.parallel, self.trainer.update, self.saving, step=self.step)

    def save_behind(self) -> None:
        """Save while training goes on."""
        self.step += 1
        began = time.perf_counter()
        self.saver.begin(self.trainer.parallel, self.trainer.update, self.step)
        self.pauses["ours"] = time.perf_counter() - began
        flight = self.saver._flight
        assert flight is not None
        while not flight.is_told:
            self.during.append(self.one_step())
            self.saver.after_step()
        self.saver.finish()

    def one_step(self) -> float:
        """Train one step, and return how many seconds it took."""
        began = time.perf_counter()
        self.trainer.step(self.step)
        return time.perf_counter() - began

    def load(self) -> None:
        """Load, with all checks."""
        load_newest_(self.trainer.parallel, self.trainer.update, self.saving.checkpoints, run={})

    def peer_save(self) -> None:
        """PyTorch's save."""
        shutil.rmtree(self.folder / "peer", ignore_errors=True)
        dcp.save(self.tensors, checkpoint_id=self.folder / "peer")

    def peer_save_behind(self) -> None:
        """PyTorch's asynchronous save."""
        shutil.rmtree(self.folder / "peer", ignore_errors=True)
        began = time.perf_counter()
        future = dcp.async_save(self.tensors, checkpoint_id=self.folder / "peer")
        self.pauses["peer"] = time.perf_counter() - began
        assert isinstance(future, Future)
        future.result()

    def peer_load(self) -> None:
        """PyTorch's load, in place."""
        state: dict[str, Tensor] = dict(self.tensors)
        dcp.load(state, checkpoint_id=self.folder / "peer")


def forget(folder: Path) -> None:
    """Let all files leave the system's memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measured(bench: Bench, rounds: int) -> list[Row]:
    """Let the contestants take turns."""
    turns: dict[str, tuple[str, Callable[[], None]]] = {
        "raw write": ("raw write", bench.raw_write),
        "save": ("raw write", bench.save),
        "save, training goes on": ("raw write", bench.save_behind),
        "torch save": ("raw write", bench.peer_save),
        "torch async_save": ("raw write", bench.peer_save_behind),
        "raw read": ("raw read", bench.raw_read),
        "load": ("raw read", bench.load),
        "torch load": ("raw read", bench.peer_load),
    }
    seconds: dict[str, list[float]] = {
        name: [] for name in (*turns, "pause", "torch pause", "a step", "steps")
    }
    bench.save_behind()  # makes the copies in host memory
    bench.during.clear()
    bench.raw_write()  # for the first that read
    bench.peer_save()
    draw = random.Random(0)
    for _ in range(rounds):
        for name in draw.sample(list(turns), len(turns)):
            forget(bench.folder)
            began = time.perf_counter()
            turns[name][1]()
            seconds[name].append(time.perf_counter() - began)
        seconds["pause"].append(bench.pauses["ours"])
        seconds["torch pause"].append(bench.pauses["peer"])
        seconds["a step"].append(statistics.median(bench.one_step() for _ in range(3)))
        seconds["steps"].append(statistics.median(bench.during))
        bench.during.clear()
    beside = {name: other for name, (other, _) in turns.items()}
    beside |= {"pause": "raw write", "torch pause": "raw write", "a step": "a step", "steps": "a step"}
    rows = []
    for name, other in beside.items():
        ratios = [a / b for a, b in zip(seconds[name], seconds[other], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        median = statistics.median(seconds[name])
        rows.append(Row(name, other, median, bench.bytes / median / 1e9, middle, low, high))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--megabytes", type=int, default=200, help="of weights and moments")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure; default: that of temporary files"
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        folder = Path(name)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the peer's
        bench = Bench(trainer_of(asked.megabytes), folder)
        rows = measured(bench, asked.rounds)
        dist.destroy_process_group()
    if asked.json:
        print(json.dumps([{**asdict(row), "bytes": bench.bytes} for row in rows]))
        return
    table = Table(title=f"{bench.bytes / 1e6:,.0f} MB, medians of {asked.rounds} rounds")
    for column in ("what", "seconds", "GB/s", "ratio", "quartiles", "to"):
        table.add_column(column, justify="left" if column in ("what", "to") else "right")
    for row in rows:
        quartiles = f"{row.ratio_low:.2f} to {row.ratio_high:.2f}"
        rate = "" if row.what in ("a step", "steps") else f"{row.gigabytes_per_second:.2f}"
        table.add_row(row.what, f"{row.seconds:.3f}", rate, f"{row.ratio:.2f}", quartiles, row.beside)
    Console().print(table)


if __name__ == "__main__":
    main()
