"""The benchmark of checkpoints runs and prints what it promises; how fast things are is not tested."""

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import Bench, measured, trainer_of

from tests.ranks import RankPool


def rows_of(folder: str) -> tuple[int, list[dict[str, Any]]]:
    bench = Bench(trainer_of(megabytes=12), Path(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peer's own
        return bench.bytes, [asdict(row) for row in measured(bench, rounds=1)]


def test_contestants_save_and_load_the_same_bytes(ranks: RankPool, tmp_path: Path):
    [(size, rows)] = ranks(1, rows_of, str(tmp_path))
    assert 10e6 < size < 20e6
    assert (tmp_path / "raw").stat().st_size == size
    peer = sum(path.stat().st_size for path in (tmp_path / "peer").glob("*.distcp"))
    assert size < peer < 1.05 * size
    by_name = {row["what"]: row for row in rows}
    assert list(by_name) == [
        "raw write",
        "save",
        "save, training goes on",
        "torch save",
        "torch async_save",
        "raw read",
        "load",
        "torch load",
        "pause",
        "torch pause",
        "a step",
        "steps",
    ]
    assert by_name["raw write"]["ratio"] == by_name["raw read"]["ratio"] == by_name["a step"]["ratio"] == 1
    assert all(row["seconds"] > 0 and row["ratio_low"] == row["ratio_high"] for row in rows)
    assert by_name["pause"]["seconds"] < by_name["save, training goes on"]["seconds"]
