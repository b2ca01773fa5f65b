"""The run folder: one for each run, and writable before the run starts."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.errors import RunStopped, UserError
from fourfold.run_folder import LOCK, holding, make_run_folder, resumed_run_folder, writing


def test_a_second_run_gets_a_folder_of_its_own(tmp_path: Path):
    wanted = tmp_path / "runs" / "quickstart"
    folders = [make_run_folder(wanted, f"seed = {number}\n") for number in range(3)]
    assert [folder.name for folder in folders] == ["quickstart", "quickstart-2", "quickstart-3"]
    assert [(folder / "run.toml").read_text() for folder in folders] == [
        "seed = 0\n",
        "seed = 1\n",
        "seed = 2\n",
    ]


def test_an_empty_folder_is_used(tmp_path: Path):
    assert make_run_folder(tmp_path, "") == tmp_path


def test_a_folder_that_cannot_be_written_is_a_mistake(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    for wanted in (tmp_path / "file", tmp_path / "file" / "inside", Path("/proc/run")):
        with pytest.raises(
            UserError, match=f"cannot write into the run folder {wanted}: .* --set folder=PATH"
        ):
            make_run_folder(wanted, "")
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_full_disk_is_named():
    message = r"cannot write /runs/a/loss\.png: No space left on device"
    with pytest.raises(RunStopped, match=message), writing(Path("/runs/a/loss.png")):
        Path("/dev/full").write_text("x")


def test_a_run_that_goes_on_takes_its_folder(tmp_path: Path):
    wanted = tmp_path / "runs" / "quickstart"
    assert resumed_run_folder(wanted, "seed = 0\n") == wanted, "there is nothing yet: it is made"
    assert resumed_run_folder(wanted, "seed = 1\n") == wanted
    assert (wanted / "run.toml").read_text() == "seed = 0\n", "until the run goes on"
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"is not the folder of a run, for it has no run\.toml"):
        resumed_run_folder(tmp_path, "")


def test_two_runs_do_not_write_into_one_folder(tmp_path: Path):
    folder = make_run_folder(tmp_path / "run", "")
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    message = f"another run is at work in .*run, {holder}, since 2.*folder=PATH"
    with holding(folder):
        with pytest.raises(UserError, match=message), holding(folder):
            pass
        with pytest.raises(UserError, match=message):
            resumed_run_folder(folder, "")
        assert (folder / LOCK).exists(), "who was refused leaves it"
    assert not (folder / LOCK).exists()
    assert resumed_run_folder(folder, "") == folder


def test_a_run_that_was_killed_keeps_nobody_out(tmp_path: Path):
    folder = make_run_folder(tmp_path / "run", "")
    code = (
        "import os, pathlib; from fourfold.run_folder import holding\n"
        f"with holding(pathlib.Path({str(folder)!r})): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert (folder / LOCK).exists()
    assert resumed_run_folder(folder, "") == folder
    with holding(folder):
        assert f"process {os.getpid()} " in (folder / LOCK).read_text()
