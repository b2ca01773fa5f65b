"""Every benchmark, one after another: `make bench`.

python benchmarks/run_all.py
"""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = ["data_parallel.py", "fully_sharded.py", "pipeline.py"]


def main() -> None:
    for name in BENCHMARKS:
        subprocess.run([sys.executable, str(Path(__file__).parent / name), *sys.argv[1:]], check=True)


if __name__ == "__main__":
    main()
