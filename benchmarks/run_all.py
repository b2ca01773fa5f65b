"""Every benchmark beside its peers in one table, printed and written to benchmarks/RESULTS.md: `make bench`.

python benchmarks/run_all.py [--workload chatty] [--ranks 2] [--rounds 8]
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.report import COLUMNS, Row, show
from benchmarks.workloads import WORKLOADS

BENCHMARKS = {
    "data_parallel.py": (1, 2, 4),
    "fully_sharded.py": (2, 4),
    "pipeline.py": (2, 4),
    "tensor_parallel.py": (2, 4),
    "context_parallel.py": (2, 4),
    "combinations.py": (4,),
}
"""What is measured, and on how many ranks."""

RESULTS = Path(__file__).parent / "RESULTS.md"
PACKAGES = ("torch", "megatron-core", "deepspeed", "yunchang")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="default: all")
    parser.add_argument("--ranks", action="append", type=int, choices=(1, 2, 4), help="default: all")
    parser.add_argument("--rounds", type=int, help="steps of each contestant; default: by workload")
    given = parser.parse_args()
    rows: list[Row] = []
    for name, counts in BENCHMARKS.items():
        for ranks in counts:
            if ranks not in (given.ranks or counts):
                continue
            for workload in given.workload or WORKLOADS:
                rounds = [] if given.rounds is None else ["--rounds", str(given.rounds)]
                found = measured(name, ["--workload", workload, "--ranks", str(ranks), *rounds])
                show(found, json=False)
                rows += found
                RESULTS.write_text(page(rows))  # after each, since all of them take hours


def measured(name: str, options: Sequence[str]) -> list[Row]:
    """The rows of one benchmark."""
    command = [sys.executable, str(Path(__file__).parent / name), "--json", *options]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    printed = done.stdout[done.stdout.index("[\n") :]  # a peer may say something first
    return [Row(**row) for row in json.loads(printed)]


def page(rows: Sequence[Row]) -> str:
    """All rows in Markdown, with what they were measured on."""
    versions = ", ".join(f"{name} {found}" for name in PACKAGES if (found := _version(name)))
    lines = [
        "# Ours beside the peers'",
        "",
        f"By `make bench` on {date.today()}: {os.cpu_count()} cores, a thread each, gloo, {versions}.",
        "Medians of interleaved steps; ratio: ours / peer, round by round, with quartiles;",
        "MiB sent a rank and step; peak MiB above the imports and a step of a tiny model. How it is",
        "measured, and what it says: [README.md](README.md).",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|---" * len(COLUMNS) + "|",
    ]
    lines += ["| " + " | ".join(row.cells()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    main()
