"""Commands in this process: mistakes get one message and exit status 2, and no traceback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import fourfold
from fourfold.cli import app
from fourfold.errors import RunStopped

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
steps = 3
batch = 4
[optimizer]
learning_rate = 1e-3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run file and a corpus, as the current one."""
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "corpus.txt").write_text("def main(): return 1\n" * 40)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FOURFOLD_CACHE", str(tmp_path / "cache"))
    return tmp_path


def fourfold_(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def test_the_command_line_starts_without_torch():
    code = (
        "import sys; from typer.testing import CliRunner; from fourfold.cli import app\n"
        "for text in ('--help', 'train --help', 'schedule 1f1b', 'schedule x', '--version', 'trian'):\n"
        "    CliRunner().invoke(app, text.split())\n"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'pyarrow', 'matplotlib', 'tokenizers')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version():
    assert fourfold_("--version").output.strip() == fourfold.__version__


def test_python_m_fourfold():
    shown = subprocess.run(
        [sys.executable, "-m", "fourfold", "--version"], capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == fourfold.__version__


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["train", "runn.toml"], ["run file runn.toml does not exist. Did you mean 'run.toml'?"]),
        (
            ["train", "run.toml", "--set", "training.stepss=5", "--set", "optimizer.learning_rate=fast"],
            ["training.stepss does not exist. Did you mean 'steps'?", "optimizer.learning_rate='fast'"],
        ),
        (["train", "run.toml", "--layout", "dp3"], ["dp=3 does not divide batch=4 (Batch axis): use batch="]),
        (["train", "run.toml", "--layout", "pd2"], ["axis 'pd' does not exist. Axes: pp, dp, fsdp, cp, tp"]),
        (["train", "run.toml", "--set", "data.source=corpse.txt"], ["no such file or folder: corpse.txt"]),
        (
            ["train", "run.toml", "--set", "data.source=bad.parquet"],
            ["bad.parquet is not a readable Parquet file"],
        ),
        (
            ["train", "run.toml", "--set", "data.tokenizer=no.json"],
            ["cannot read the tokenizer no.json: No such file or directory"],
        ),
        (
            ["train", "run.toml", "--set", "data.sequence_length=5000"],
            ["sequence_length=5000 needs 5001 tokens"],
        ),
        (
            ["train", "run.toml", "--set", "folder=corpus.txt"],
            ["cannot write into the run folder corpus.txt"],
        ),
        (["train", "run.toml", "--set", "folder=/proc/run"], ["cannot write into the run folder /proc/run"]),
        (
            ["train", "run.toml", "--set", "model.vocab_size=100"],
            ["model.vocab_size=100 is less than the tokenizer's"],
        ),
        (["verify"], ["give a run file or --model, one of them"]),
        (["verify", "--model", "tiny"], ["--model needs --layout"]),
        (
            ["verify", "--model", "tinny", "--layout", "dp2"],
            ["preset 'tinny' does not exist. Did you mean 'tiny'?"],
        ),
        (
            ["verify", "--model", "tiny", "--layout", "dp3", "--batch", "8"],
            ["dp=3 does not divide batch=8 (Batch axis): use batch=6 or 9"],
        ),
        (
            ["verify", "--model", "tiny", "--layout", "dp2", "--dtype", "floa32", "--steps", "0"],
            [
                "--dtype floa32 does not exist. Did you mean 'float32'?",
                "--steps 0 is too small: use 1 or more",
            ],
        ),
        (["sample", "nowhere"], ["run folder nowhere does not exist"]),
        (["sample", "."], ["there is no checkpoint in "]),
        (["prepare", "corpse.txt"], ["no such file or folder: corpse.txt"]),
        (["prepare", "corpus.txt", "--held-out", "2"], ["held_out=2"]),
        (["schedule", "1f1bb"], ["there is no schedule '1f1bb'"]),
        (["schedule", "1f1b", "--stages", "0"], ["stages=0: must be at least 1"]),
    ],
)
def test_a_mistake_has_one_message_for_each_problem(arguments: list[str], messages: list[str], folder: Path):
    (folder / "bad.parquet").write_bytes(b"PAR1 not really PAR1")
    result = fourfold_(*arguments)
    errors = [line for line in result.stderr.splitlines() if not line.startswith("tokenizing")]
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(errors) == len(messages), errors
    for line, message in zip(errors, messages, strict=True):
        assert line.startswith("error: ")
        assert message in line
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["trian"], "train"),
        (["train", "--layot", "dp2"], "--layout"),
        (["verify", "--stepps", "1"], "--steps"),
    ],
)
def test_a_misspelled_command_or_option_has_a_hint(arguments: list[str], hint: str):
    result = fourfold_(*arguments)
    assert result.exit_code == 2
    assert hint in result.stderr.splitlines()[-1]


def test_a_job_of_another_size_than_the_layout(folder: Path, monkeypatch: pytest.MonkeyPatch):
    job = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    result = fourfold_("train", "run.toml")
    assert result.exit_code == 2
    assert result.stderr.startswith("rank 1: error: layout dp2 needs 2 ranks, and there are 3")


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (RunStopped("the loss is nan"), 1, "error: the loss is nan\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (
            OSError(28, "No space left on device", "cache/x"),
            1,
            "error: cannot write cache/x: No space left on device\n",
        ),
    ],
)
def test_how_a_command_ends(
    error: BaseException, status: int, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("fourfold.launch.launch", fail)
    result = fourfold_("train", "run.toml")
    assert (result.exit_code, result.stderr.splitlines(keepends=True)[-1]) == (status, message)


def test_schedule(tmp_path: Path):
    result = fourfold_(
        "schedule", "gpipe", "--stages", "2", "--microbatches", "2", "--picture", str(tmp_path / "p.png")
    )
    # Two forwards, then two backwards of twice the length; the bubble is (P-1)(F+B) of each rank.
    assert result.stdout.splitlines()[:2] == [
        "rank 0  F0 F1 .  .  .  B0 B0 B1 B1",
        "rank 1  .  F0 F1 B0 B0 B1 B1 .  .",
    ]
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_prepare_tells_what_there_is(folder: Path):
    first, second = fourfold_("prepare", "run.toml"), fourfold_("prepare", "corpus.txt", "--held-out", "0.1")
    assert first.exit_code == second.exit_code == 0
    assert first.stdout == second.stdout, "the same corpus, tokenized once"
    assert (first.stderr, second.stderr) == ("tokenizing 0.0 MB\n", "")
    lines = first.stdout.splitlines()
    assert lines[0].startswith("training: ")
    assert lines[1].startswith("held out: ")
    assert lines[2].startswith("vocabulary: 257, unigram entropy ")


def test_verify_in_one_process_prints_one_object():
    result = fourfold_("verify", "--model", "tiny", "--layout", "dp1", "--steps", "2", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0
    errors = {"loss_error", "gradient_error", "gradient_worst", "norm_error", "weight_error"}
    assert report.keys() >= {"layout", "dtype", "steps", "pass"} | errors
    assert (report["layout"], report["dtype"], report["steps"], report["pass"]) == ("dp1", "float64", 2, True)
    assert max(report["loss_error"], report["gradient_error"], report["weight_error"]) < 1e-10


def test_verify_of_a_run_file_and_its_table(folder: Path):
    result = fourfold_("verify", "run.toml", "--layout", "dp1", "--steps", "1")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert lines[0] == "dp1 against one process, 1 steps of SGD in float64"
    assert lines[-1] == "pass"
    gradients = [float(line.split()[-3]) for line in lines if line.startswith("gradient of")]
    assert gradients == sorted(gradients, reverse=True), "the worst first"


def test_verify_fails_with_status_1(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fourfold.verify.TOLERANCE", {"float64": -1.0})
    result = fourfold_("verify", "--model", "tiny", "--layout", "dp1", "--steps", "1")
    assert result.exit_code == 1
    assert "WRONG" in result.stdout
    assert result.stdout.splitlines()[-1] == "FAIL"
