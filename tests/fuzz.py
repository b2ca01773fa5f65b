"""Random layouts of random models, each against one process, until the time is up: ``make fuzz``.

Prints a line for each trial and, for one that fails, the command that repeats it. The same seed draws the
same trials.
"""

import argparse
import sys
import time
from itertools import islice

from fourfold.cli.verify_text import HEADING, line
from fourfold.trial import Trial
from fourfold.verify import Verification, oracle_of, verify_trial
from tests.random_trials import endless
from tests.ranks import RankPool


def on_a_rank(trial: Trial) -> Verification:
    """Verify the trial on one of its ranks."""
    return verify_trial(trial, oracle_of(trial))


def main() -> int:
    """Run trials and return the exit status: 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--seconds", type=float, default=600.0, help="no trial starts later than this")
    parser.add_argument("--trials", type=int, default=10**9, help="no more than these")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first so many")
    chosen = parser.parse_args()
    began, count, failed = time.monotonic(), 0, []
    pool = RankPool()
    print(HEADING, flush=True)
    for trial in islice(endless(chosen.seed), chosen.skip, chosen.skip + chosen.trials):
        if time.monotonic() - began > chosen.seconds:
            break
        count += 1
        try:
            report = pool(trial.layout.world_size, on_a_rank, trial)[0]
            print(line(report), flush=True)
            wrong = None if report.passes else report.where
        except Exception as error:  # whatever happens, the others are worth a try
            wrong = f"{type(error).__name__}: {error}"
        if wrong is not None:
            failed.append(trial)
            print(f"    {wrong}\n    {trial.command()}", flush=True)
    pool.close()
    print(f"\nseed {chosen.seed}: {count} trials, {len(failed)} failed, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
