"""The run folder: one for each run, and writable before the run starts."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.errors import RunStopped, UserError
from fourfold.run_folder import LOCK, holding, make_run_folder, resumed_run_folder, write_run_file, writing
from fourfold.specs import RunSpec


def run_of(**values: object) -> RunSpec:
    """A run with its sizes spelled out."""
    sections = {"training": {"steps": 1, "batch": 1}, "optimizer": {"learning_rate": 1.0}}
    return RunSpec.model_validate({"model": {"preset": "tiny"}, **sections, **values}).resolved(256)


def test_a_second_run_gets_a_folder_of_its_own(tmp_path: Path):
    wanted = tmp_path / "runs" / "quickstart"
    folders = [make_run_folder(wanted, run_of(seed=number)) for number in range(3)]
    assert [folder.name for folder in folders] == ["quickstart", "quickstart-2", "quickstart-3"]
    assert [RunSpec.load(folder / "run.toml") for folder in folders] == [run_of(seed=n) for n in range(3)]


def test_an_empty_folder_is_used(tmp_path: Path):
    assert make_run_folder(tmp_path, run_of()) == tmp_path


def test_a_folder_that_cannot_be_written_is_a_mistake(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    for wanted in (tmp_path / "file", tmp_path / "file" / "inside", Path("/proc/run")):
        with pytest.raises(
            UserError, match=f"cannot write into the run folder {wanted}: .* --set folder=PATH"
        ):
            make_run_folder(wanted, run_of())
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_full_disk_is_named():
    message = r"cannot write /runs/a/loss\.png: No space left on device"
    with pytest.raises(RunStopped, match=message), writing(Path("/runs/a/loss.png")):
        Path("/dev/full").write_text("x")


def test_a_run_that_goes_on_takes_its_folder(tmp_path: Path):
    wanted = tmp_path / "runs" / "quickstart"
    assert resumed_run_folder(wanted, run_of()) == wanted, "there is nothing yet: it is made"
    assert resumed_run_folder(wanted, run_of(seed=1)) == wanted
    assert RunSpec.load(wanted / "run.toml") == run_of(), "until the run goes on"
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"is not the folder of a run, for it has no run\.toml"):
        resumed_run_folder(tmp_path, run_of())


def test_a_schedule_file_is_kept_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text("0F0,0B0\n")
    folder = make_run_folder(Path("runs", "own"), run_of(layout="pp1:mine.csv"))
    Path("mine.csv").unlink()
    run = RunSpec.load(folder / "run.toml")
    assert str(run.layout) == f"pp1:{tmp_path}/runs/own/schedule.csv"
    write_run_file(folder, run)  # a run that goes on by its own run file
    assert RunSpec.load(folder / "run.toml") == run
    assert (folder / "schedule.csv").read_text() == "0F0,0B0\n"
    other = make_run_folder(Path("runs", "a,b"), run)
    assert RunSpec.load(other / "run.toml") == run, "a layout can name no path with a comma"


def test_two_runs_do_not_write_into_one_folder(tmp_path: Path):
    folder = make_run_folder(tmp_path / "run", run_of())
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    message = f"another run is at work in .*run, {holder}, since 2.*folder=PATH"
    with holding(folder):
        with pytest.raises(UserError, match=message), holding(folder):
            pass
        with pytest.raises(UserError, match=message):
            resumed_run_folder(folder, run_of())
        assert (folder / LOCK).exists(), "who was refused leaves it"
    assert not (folder / LOCK).exists()
    assert resumed_run_folder(folder, run_of()) == folder


def test_a_run_that_was_killed_keeps_nobody_out(tmp_path: Path):
    folder = make_run_folder(tmp_path / "run", run_of())
    code = (
        "import os, pathlib; from fourfold.run_folder import holding\n"
        f"with holding(pathlib.Path({str(folder)!r})): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert (folder / LOCK).exists()
    assert resumed_run_folder(folder, run_of()) == folder
    with holding(folder):
        assert f"process {os.getpid()} " in (folder / LOCK).read_text()
