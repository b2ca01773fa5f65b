"""What one layout saves every other one loads: the same bits of every weight and every moment."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fourfold.checkpoint import Saving, load_newest_, save
from fourfold.checkpoint.files import OpenFiles
from fourfold.checkpoint.manifest import read_manifest
from fourfold.checkpoint.stripes import Runs
from fourfold.specs import Layout
from tests.checkpoint.trainers import SIZES, differing, fill_, places, run_spec, trainer_of
from tests.ranks import RankPool

LAYOUTS = {
    "dp1": "auto",
    "dp2": "auto",
    "fsdp2": "flat",
    "fsdp2:zero1": "rows",
    "fsdp2:zero2": "matrices",
    "pp2:1f1b": "auto",
    "pp2:zbv": "auto",
    "tp2": "auto",
    "cp2": "auto",
    "tp4": "auto",  # key and value heads in copies
    "dp2,fsdp2": "blocks",
    "pp2,tp2": "auto",
    "fsdp2,tp2": "flat",
    "pp2,fsdp2": "rows",
    "fsdp2,cp2": "auto",
    "dp2,pp2": "auto",
}
"""Each with the way in which its units are cut."""


MUON = {"dp1": "auto", "fsdp2": "blocks", "pp2": "auto", "dp2,fsdp2": "matrices"}


def ranks_of(layout: str) -> int:
    return Layout.parse(layout).world_size


def seed_of(layout: str) -> int:
    """Every layout saves other numbers, so that none can be mistaken for another's."""
    return zlib.crc32(layout.encode()) % 10**6


def save_one(layout: str, pieces: str, optimizer: str, folder: str) -> None:
    trainer = trainer_of(run_spec(layout, pieces=pieces, optimizer=optimizer))
    fill_(trainer, seed_of(layout))
    save(trainer.parallel, trainer.update, Saving(Path(folder) / layout, {}, {}), step=7)


def load_all(layout: str, pieces: str, optimizer: str, sources: list[str], folder: str) -> list[str]:
    """Load one after another into the same training; return what is not as it was saved, or read twice."""
    trainer = trainer_of(run_spec(layout, pieces=pieces, optimizer=optimizer))
    held = list(places(trainer))
    owned_bytes = sum(values.numel() * values.itemsize for *_, values in held)
    wrong = []
    for source in sources:
        with reads() as runs:
            assert load_newest_(trainer.parallel, trainer.update, Path(folder) / source, run={}) == 7
        wrong += [f"{source}: {name}" for name in differing(trainer, seed_of(source), held)]
        wrong += [
            f"{source}: read twice"
            for one, two in pairwise(sorted(runs))
            if one[2] > two[1] and one[0] == two[0]
        ]
        if sum(stop - start for _, start, stop in runs) != owned_bytes:
            wrong.append(f"{source}: other bytes than a rank owns")
    return wrong


@contextmanager
def reads() -> Iterator[list[tuple[str, int, int]]]:
    """Yield where this process reads tensors from: file, first byte, end."""
    runs: list[tuple[str, int, int]] = []
    read = OpenFiles.read_into

    def noted(files: OpenFiles, path: str, target: NDArray[np.uint8], offset: int) -> None:
        runs.append((path, offset, offset + len(target)))
        read(files, path, target, offset)

    OpenFiles.read_into = noted
    try:
        yield runs
    finally:
        OpenFiles.read_into = read


@pytest.fixture(scope="module", params=[("adamw", LAYOUTS), ("muon", MUON)], ids=lambda param: param[0])
def saved(
    request: pytest.FixtureRequest, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, str], str]:
    """A checkpoint of each layout in a folder of its name."""
    optimizer, layouts = request.param
    folder = str(tmp_path_factory.mktemp(optimizer))
    for layout, pieces in layouts.items():
        ranks(ranks_of(layout), save_one, layout, pieces, optimizer, folder)
    return optimizer, layouts, folder


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_any_to_any(world_size: int, saved: tuple[str, dict[str, str], str], ranks: RankPool):
    # OPT-04
    optimizer, layouts, folder = saved
    for layout, pieces in layouts.items():
        if ranks_of(layout) == world_size:
            wrong = ranks(world_size, load_all, layout, pieces, optimizer, list(layouts), folder)
            assert wrong == [[]] * world_size, layout


def test_every_element_is_written_once(saved: tuple[str, dict[str, str], str]):
    optimizer, layouts, folder = saved
    for layout in layouts:
        manifest = read_manifest(Path(folder) / layout / "step-000007")
        states = {tensor.state for tensor in manifest.tensors.values()}
        assert states == {"weight", "exp_avg", "exp_avg_sq"} | (
            {"momentum_buffer"} if optimizer == "muon" else set()
        )
        for name, tensor in manifest.tensors.items():
            runs = Runs.of([s for piece in manifest.pieces if piece.tensor == name for s in piece.stripes])
            assert runs.start[0] == 0
            assert runs.start[1:].tolist() == runs.stop[:-1].tolist(), (layout, name)
            assert runs.stop[-1] == SIZES[tensor.parameter]
        sizes = [entry.size_bytes for name, entry in manifest.files.items() if name.startswith("rank-")]
        assert len(sizes) == ranks_of(layout)
        if "pp" not in layout and LAYOUTS[layout] in ("auto", "flat"):
            assert max(sizes) < 1.25 * min(sizes), f"{layout}: replicas deal out the writing"
