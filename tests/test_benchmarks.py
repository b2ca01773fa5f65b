"""The benchmarks run and print what they promise; how fast things are is not tested."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.workloads import MODEL

ROOT = Path(__file__).parent.parent


def test_data_parallel_prints_its_rows() -> None:
    command = "benchmarks/data_parallel.py --workload chatty --ranks 2 --rounds 2 --json"
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["peer"] for row in rows] == ["torch DDP", "torch DDP around our Decoder"]
    row = rows[0]
    assert set(row) == {
        "workload", "layout", "ours_seconds", "peer", "peer_seconds", "ratio", "ratio_low", "ratio_high",
        "limit_seconds",
        "formula_bytes", "ours_bytes", "peer_bytes", "ours_peak_bytes", "peer_peak_bytes",
    }  # fmt: skip
    assert (row["workload"], row["layout"]) == ("chatty", "dp2")
    # What crossed the loopback device is what the formula says, headers and the barrier aside.
    assert row["formula_bytes"] == 4 * MODEL.num_parameters + 8
    assert row["formula_bytes"] <= row["ours_bytes"] < 1.01 * row["formula_bytes"]
