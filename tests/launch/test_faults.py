"""Whole runs that are asked to end, frozen, started again: what they say and what they leave."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fourfold.cli import app
from fourfold.cli.train import run_again
from fourfold.errors import RankFailed, RunPaused, RunStopped, UserError
from tests.cli.test_runs import SECONDS_TO_END, local_ranks, start, start_joined, wait_until
from tests.commands import RUN

TIMEOUT = 6
"""Of a step, at its longest: the first one imports much, on a machine that may be busy."""
LONG = (
    "--set",
    "training.steps=100000",
    "--set",
    "checkpoint.every=20",
    "--set",
    "optimizer.schedule=constant",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    (folder / "run.toml").write_text(RUN)
    (folder / "corpus.txt").write_text("def main(): return 1\n" * 400)
    return folder


def steps_of(run: Path) -> list[int]:
    """The numbers of the finished steps, in the order in which they stand in the metrics."""
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []  # the last may be half written
    return [line["step"] for line in map(json.loads, lines) if "loss" in line]


def checkpoints_of(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_a_frozen_rank_is_named_and_the_run_goes_on_until_it_is_asked_to_end(folder: Path):
    """With a start of its own in between: the run takes up where the newest checkpoint is."""
    asked = ("--max-restarts", "1", "--timeout", str(TIMEOUT), "--set", "folder=frozen", *LONG)
    run = start(folder, "train", "run.toml", *asked)
    frozen = folder / "frozen"
    wait_until(lambda: (frozen / "checkpoints" / "step-000020").exists())
    ranks = local_ranks(folder)
    began = time.monotonic()
    os.kill(ranks[1], signal.SIGSTOP)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
    assert time.monotonic() - began < TIMEOUT + 20
    before = steps_of(frozen)
    saved = int(checkpoints_of(frozen)[-1].removeprefix("step-").removesuffix(".part"))
    wait_until(lambda: len(local_ranks(folder)) == 2 and steps_of(frozen)[-1] > max(before[-1], saved) + 2)
    run.send_signal(signal.SIGUSR1)
    output, errors = run.communicate(timeout=SECONDS_TO_END)
    assert run.returncode == os.EX_TEMPFAIL, errors
    error = re.search(
        rf"error: no rank has moved for {TIMEOUT} s: rank 1 is stopped, as by SIGSTOP or a debugger\n"
        r"  rank 0 (in|after) step \d+.* waiting for all_reduce on axis dp \(\d+ s of CPU time since\)\n"
        r"  rank 1 (in|after) step \d+.* \(stopped\)\n"
        r"starting again, 1 of 1 times\n",
        errors,
    )
    assert error, errors
    assert re.search(r"going on after step (\d+)", output), output
    last = steps_of(frozen)[-1]
    assert steps_of(frozen) == list(range(1, last + 1)), "no step is missing, none is there twice"
    assert errors.splitlines()[-1] == (
        f"asked to end, saved after step {last} of 100000 in frozen: "
        "to go on give the same command with --resume"
    )
    assert f"step-{last:06}" in checkpoints_of(frozen)


def test_one_rank_that_is_asked_to_end_ends_all_at_the_same_step(folder: Path):
    """The ranks agree on it in a sum that the step has anyway, so both have saved the same step."""
    name = "asked"
    ranks = start_joined(folder, "train", "run.toml", *LONG, "--set", f"folder={name}", "--layout", "tp2")
    wait_until(lambda: len(steps_of(folder / name)) > 3)
    ranks[1].send_signal(signal.SIGTERM)
    errors = [rank.communicate(timeout=SECONDS_TO_END)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [os.EX_TEMPFAIL] * 2, errors
    last = steps_of(folder / name)[-1]
    said = f"asked to end, saved after step {last} of 100000 in {name}: "
    assert errors[0].splitlines()[-1].startswith(said)
    assert said not in errors[1], "it is said once"
    assert f"step-{last:06}" in checkpoints_of(folder / name)


def outcome_of(max_restarts: int, *failures: Exception | None) -> tuple[list[bool], Exception | None]:
    """Which starts there were, each with whether it goes on, and what was raised in the end."""
    starts: list[bool] = []

    def run(resume: bool) -> None:
        starts.append(resume)
        if (failure := failures[len(starts) - 1]) is not None:
            raise failure

    try:
        run_again(run, resume=False, max_restarts=max_restarts)
    except Exception as error:
        return starts, error
    return starts, None


def test_what_is_started_again(capsys: pytest.CaptureFixture[str]):
    lost, stopped, user, paused = RankFailed("x"), RunStopped("full"), UserError("typo"), RunPaused("asked")
    assert outcome_of(2, lost, lost, None) == ([False, True, True], None)
    assert capsys.readouterr().err == (
        "error: x\nstarting again, 1 of 2 times\nerror: x\nstarting again, 2 of 2 times\n"
    )
    assert outcome_of(1, lost, lost) == ([False, True], lost)
    assert outcome_of(0, lost) == ([False], lost)
    for never in (stopped, user, paused):
        assert outcome_of(5, never) == ([False], never)
    assert outcome_of(5, lost, user) == ([False, True], user)


def test_what_torchrun_starts_again_must_go_on(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    job = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in {**job, "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["train", "run.toml"])
    assert result.exit_code == 2
    assert "torchrun has started the ranks again: give --resume, so that they go on" in result.stderr
    result = CliRunner().invoke(app, ["train", "run.toml", "--max-restarts", "2"])
    assert result.exit_code == 2
    assert "--max-restarts is for local ranks" in result.stderr
