"""Runs whose ranks are killed at random moments, until the time or the kills are up: ``make chaos``.

Each run trains a tiny model on a layout. Again and again one of its ranks is killed, at any moment, also
while it saves; the run is started again with ``--resume`` and must go on from the newest checkpoint that was
complete. In the end its losses and its last checkpoint must be those of a run that nothing happened to, bit
for bit.

The ranks are copies of this process, which has imported torch already, in a job as torchrun makes it.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from fourfold.specs import Layout

RUN = """
layout = "dp2"
[model]
preset = "tiny"
vocab_size = 257
[data]
source = "corpus.txt"
sequence_length = 16
held_out = 0.1
[training]
steps = 24
batch = 4
[optimizer]
learning_rate = 1e-3
[evaluation]
every = 5
[checkpoint]
every = 3
keep = 2
[sample]
tokens = 0
"""
LAYOUTS = ("dp1", "dp2", "fsdp2", "tp2", "pp2", "cp2")
"""In turn, the first by the seed: short campaigns of several seeds come to all of them."""
MOST_KILLS = 8
"""Of one run: then it is left to its end."""
LIMIT_SECONDS = 60.0
ALONE_SECONDS = 6.0
"""How long ranks get to end by themselves once one is gone; then they are ended, as a launcher does."""


@dataclass
class Outcome:
    """What came out of one run.

    Attributes:
        kills: how many ranks were killed.
        during_saves: how many of them while a checkpoint was being written.
        ended_by_hand: starts whose other ranks waited for one that had not come yet, and were ended.
        wrong: what is not as it must be.
    """

    kills: int = 0
    during_saves: int = 0
    ended_by_hand: int = 0
    wrong: list[str] = field(default_factory=list)


def start(folder: Path, layout: str, name: str) -> dict[int, int]:
    """Start the ranks of a run in ``folder`` and return their processes, by rank."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    world_size = Layout.parse(layout).world_size
    found = {}
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            _be_rank(folder, layout, name, rank, world_size, port)
        found[rank] = pid
    return found


def _be_rank(folder: Path, layout: str, name: str, rank: int, world_size: int, port: int) -> None:
    """Run ``fourfold train`` in this process, and end it."""
    status = 1
    try:
        os.chdir(folder)
        output = os.open(f"{name}-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if world_size > 1:
            job = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "MASTER_PORT": port}
            os.environ.update({key: str(value) for key, value in job.items()}, MASTER_ADDR="localhost")
        from fourfold.cli import app

        words = ["train", "run.toml", "--layout", layout, "--set", f"folder={name}", "--resume"]
        app(words, prog_name="fourfold")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def ended(pids: dict[int, int], seconds: float) -> dict[int, int | None]:
    """Wait for the processes and return their exit statuses: None of those that were killed in the end."""
    deadline = time.monotonic() + seconds
    statuses: dict[int, int | None] = {}
    while len(statuses) < len(pids):
        for rank, pid in pids.items():
            if rank not in statuses:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    statuses[rank] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    statuses[rank] = None
        time.sleep(0.005)
    return statuses


def complete(run: Path) -> list[int]:
    """Return the steps of the complete checkpoints."""
    found = (re.fullmatch(r"step-(\d+)", path.name) for path in run.glob("checkpoints/step-*"))
    return sorted(int(name[1]) for name in found if name)


def unfinished(run: Path) -> set[tuple[str, int]]:
    """Return the checkpoints that are being written, or were when a rank was killed."""
    found = set()
    for path in run.glob("checkpoints/*.part"):
        with contextlib.suppress(FileNotFoundError):
            found.add((path.name, path.stat().st_ino))
    return found


def losses(run: Path) -> list[tuple[int, str, float]]:
    """Return what the metrics say of the training itself, in their order."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    names = ("loss", "grad_norm", "learning_rate", "evaluation_loss")
    return [(line["step"], name, line[name]) for line in lines for name in names if name in line]


def content(run: Path) -> dict[str, bytes]:
    """Return the files of the newest checkpoint: weights and moments, and the manifest with their digests."""
    newest = run / "checkpoints" / f"step-{complete(run)[-1]:06}"
    return {path.name: path.read_bytes() for path in newest.iterdir()}


def wait_for_the_moment(draw: random.Random, run: Path, pids: dict[int, int], usual: float) -> None:
    """Wait for the moment of a kill: while a checkpoint is written, in some step, or at any time.

    Args:
        draw: decides.
        run: the folder of the run.
        pids: the ranks; where one has ended, no more is waited for.
        usual: seconds that an undisturbed run takes.
    """
    choice = draw.random()
    if choice < 0.2:
        time.sleep(draw.uniform(0, usual / 2))
        return
    left_over = unfinished(run)  # by the last kill
    target = lines_of(run) + draw.randrange(1, 9)
    while not has_ended(pids):
        if choice < 0.6:
            if unfinished(run) - left_over:
                time.sleep(draw.uniform(0, 0.03))
                return
        elif lines_of(run) >= target:
            time.sleep(draw.uniform(0, 0.1))
            return
        time.sleep(0.001)


def has_ended(pids: dict[int, int]) -> bool:
    """Whether one of the processes has, which is still to be waited for."""
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return any(os.waitid(os.P_PID, pid, look) is not None for pid in pids.values())


def lines_of(run: Path) -> int:
    """Return how many lines the metrics have."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def metrics_of(run: Path) -> bytes:
    """Return the metrics that are there, which may be none."""
    path = run / "metrics.jsonl"
    return path.read_bytes() if path.exists() else b""


def start_problem(newest: int, told: str, *, has_moved: bool) -> str | None:
    """Return what is wrong with where a start began, None where nothing is.

    Args:
        newest: the step of the newest checkpoint that was there; 0 for none.
        told: what its rank 0 printed.
        has_moved: whether it finished a step, or ended well: then it has told where it began.
    """
    begun = re.findall(r"going on after step (\d+)|beginning at step 1:", told)
    if not begun:
        return f"it did not say where it began, with a checkpoint of step {newest}" if has_moved else None
    found = int(begun[0] or 0)
    return f"it went on after step {found} with a checkpoint of step {newest}" if found != newest else None


def disturbed(
    folder: Path,
    layout: str,
    name: str,
    draw: random.Random,
    usual: float,
    deadline: float,
    most_kills: int,
) -> Outcome:
    """Run to the end with kills in between, of which there are none after the deadline."""
    outcome, run, log = Outcome(), folder / name, folder / f"{name}-0.log"
    for attempt in range(most_kills + 1):
        newest = max(complete(run), default=0)
        told = log.stat().st_size if log.exists() else 0
        left_over, before = unfinished(run), metrics_of(run)
        pids = start(folder, layout, name)
        if attempt < most_kills and time.monotonic() < deadline:
            wait_for_the_moment(draw, run, pids, usual)
            victim, saving = draw.choice(sorted(pids)), bool(unfinished(run) - left_over)
            os.kill(pids[victim], signal.SIGKILL)  # it is there, if only to be waited for
            statuses = ended(pids, ALONE_SECONDS)
            outcome.kills += statuses[victim] == -signal.SIGKILL
            outcome.during_saves += saving and statuses[victim] == -signal.SIGKILL
            outcome.ended_by_hand += None in statuses.values()
        else:
            statuses = ended(pids, LIMIT_SECONDS)
            if any(statuses.values()) or None in statuses.values():
                outcome.wrong.append(f"an undisturbed start ended with {statuses}")
                break
        ended_well = all(status == 0 for status in statuses.values())
        # What was there and is only shorter now was cut to the checkpoint, perhaps before a word of it.
        has_moved = ended_well or not before.startswith(metrics_of(run))
        if problem := start_problem(newest, log.read_text()[told:], has_moved=has_moved):
            outcome.wrong.append(problem)
        if newest > max(complete(run), default=0):
            outcome.wrong.append(f"the checkpoint of step {newest} is gone")
        if ended_well:
            break
    return outcome


def check(folder: Path, name: str, whole: str) -> list[str]:
    """Return in what a run differs from the undisturbed one."""
    wrong = []
    if losses(folder / name) != losses(folder / whole):
        wrong.append("the losses differ")
    one, two = content(folder / name), content(folder / whole)
    wrong += [f"{file} differs" for file in sorted(one.keys() | two.keys()) if one.get(file) != two.get(file)]
    return wrong


def main() -> int:
    """Run until the time or the kills are up and return the exit status: 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--seconds", type=float, default=600.0, help="nothing is killed later than this")
    parser.add_argument("--kills", type=int, default=sys.maxsize, help="no more than so many are killed")
    chosen = parser.parse_args()
    _import_all()
    began, draw, failed = time.monotonic(), random.Random(chosen.seed), 0
    runs = during_saves = by_hand = 0
    kills = Counter[str]()
    usual: dict[str, float] = {}
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    os.environ["FOURFOLD_CACHE"] = str(folder / "cache")
    (folder / "run.toml").write_text(RUN)
    (folder / "corpus.txt").write_text("def main(): return 1\n" * 400)
    while time.monotonic() - began < chosen.seconds and kills.total() < chosen.kills:
        layout = LAYOUTS[(chosen.seed + runs) % len(LAYOUTS)]
        whole, name = f"whole-{layout}", f"run-{runs}"
        if layout not in usual:
            start_seconds = time.monotonic()
            statuses = ended(start(folder, layout, whole), LIMIT_SECONDS)
            usual[layout] = time.monotonic() - start_seconds
            good = all(status == 0 for status in statuses.values())
            assert good, (folder / f"{whole}-0.log").read_text()
        deadline = began + chosen.seconds
        most_kills = min(MOST_KILLS, chosen.kills - kills.total())
        outcome = disturbed(folder, layout, name, draw, usual[layout], deadline, most_kills)
        wrong = outcome.wrong or check(folder, name, whole)
        runs += 1
        kills[layout] += outcome.kills
        during_saves, by_hand = during_saves + outcome.during_saves, by_hand + outcome.ended_by_hand
        failed += bool(wrong)
        told = f"{outcome.kills} kills, {outcome.during_saves} during saves"
        print(f"{name} {layout:6} {told}: {'; '.join(wrong) or 'as if nothing had been'}", flush=True)
        if wrong:
            print(f"    left in {folder / name}", flush=True)
        else:
            shutil.rmtree(folder / name)
    if not failed:
        shutil.rmtree(folder)
    seconds = time.monotonic() - began
    where = ", ".join(f"{layout} {count}" for layout, count in kills.items())
    print(
        f"seed {chosen.seed}: {runs} runs, {kills.total()} kills ({where}), {during_saves} during saves, "
        f"{by_hand} times ranks waited for one that had not come yet, {failed} runs failed, {seconds:.0f} s"
    )
    return 1 if failed else 0


def _import_all() -> None:
    """Import, once, what every rank needs: a copy of this process then starts at once."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch
    import torch._dynamo  # the first optimizer of a process would import it

    import fourfold.cli.train_rank  # noqa: F401

    torch.set_num_threads(1)


if __name__ == "__main__":
    sys.exit(main())
