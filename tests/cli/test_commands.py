"""Commands in this process: mistakes get one message and exit status 2, and no traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fourfold
from fourfold.checkpoint import about_files
from fourfold.data import ByteTokenizer, PackedDataset, TokenFile
from fourfold.errors import RunStopped
from fourfold.specs import ModelSpec
from tests.commands import RUN, fourfold_

TRAIN = ["train", "run.toml", "--set"]


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
            [*TRAIN, "data.sequence_length=5000", "--set", "model.max_position_embeddings=5000"],
            ["sequence_length=5000 needs 5001 tokens"],
        ),
        (
            [*TRAIN, "data.sequence_length=129"],
            ["data.sequence_length=129 is more than model.max_position_embeddings=128: use"],
        ),
        ([*TRAIN, "training.recompute=budget:1e-6"], ["recompute='budget:1e-06' is too little: the act"]),
        ([*TRAIN, "training.batch=2000000001"], ["dp=2 does not divide batch=2000000001 (Batch axis): use"]),
        (
            ["train", "run.toml", "--layout", "dp1000", "--set", "training.batch=1000"],
            ["1000 ranks on this machine are more than 8 for each of its "],
        ),
        (
            ["verify", "--model", "tiny", "--layout", "dp1000"],
            ["1000 ranks on this machine are more than 8 for each of its "],
        ),
        ([*TRAIN, "data.source=records.jsonl"], ["records.jsonl line 1 has no field 'text', the text; its"]),
        ([*TRAIN, "model.overrides={hidden_size = 64}"], ["model.overrides does not exist."]),
        (["verify", "run.toml", "--model", "tiny"], ["give a run file or --model, one of them"]),
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
        (
            ["verify", "--model", "tiny", "--layout", "fsdp2", "--pieces", "row", "--prefetch", "-1"],
            [
                "pieces='row' is not a choice: use 'auto', 'blocks', 'matrices', 'rows' or 'flat'",
                "prefetch=-1 is too small: use 0 or more",
            ],
        ),
        (
            ["verify", "--model", "tiny", "--layout", "fsdp2:zero"],
            ["Use fsdp2:zero2 or fsdp2:zero1, or fsdp2 to cut the weights too"],
        ),
        (
            [*TRAIN, "sharding.accumulate=all"],
            ["sharding.accumulate='all' is not a choice: use 'auto', 'pieces' or 'whole'"],
        ),
        (["sample", "nowhere"], ["run folder nowhere does not exist"]),
        (["sample", "."], ["there is no checkpoint in "]),
        (["prepare", "corpse.txt"], ["no such file or folder: corpse.txt"]),
        (["prepare", "corpus.txt", "--held-out", "2"], ["held_out=2"]),
        (["schedule", "1f1bb"], ["there is no schedule '1f1bb'"]),
        (
            ["schedule", "1f1b", "--stages", "0", "--times", "1,x", "--save", "s.txt"],
            [
                "--stages 0 is too small: use 1 or more",
                "--times 1,x: write F,I,W or F,I,W,SEND, e.g. 1,1.2,0.8,0.1",
                "--save s.txt: the file's name must end in .csv or .json",
            ],
        ),
        (["schedule", "1f1b", "--times", "1e308,1,1"], ["e.g. 1,1.2,0.8,0.1: numbers from 0 to 1e+09"]),
        (["schedule"], ["which schedule? Use gpipe, 1f1b, interleaved2"]),
        (["schedule", "no.csv"], ["cannot read the schedule no.csv: No such file or directory"]),
        (["schedule", "1f1b", "--times", "no.json"], ["cannot read no.json: No such file or directory: use"]),
        (["schedule", "1f1b", "--stages", "9999"], ["9999 pipeline ranks and 8 microbatches are too many"]),
        (["schedule", "1f1b", "--picture", "no/x.png"], ["--picture no/x.png: there is no folder "]),
        (["bench", "--json", "."], ["--json .: it is a folder: name a file in it"]),
        (
            ["schedule", "zb-h2", "--cap", "4"],
            [
                "zb-h2 holds 7 microbatches at once where --cap 4 are allowed: use 1f1b, zb-h1, zbv or auto4 "
                "(0F4 on rank 0: with it the rank holds 5 microbatches' activations of its share of the model"
            ],
        ),
    ],
)
def test_a_mistake_has_one_message_for_each_problem(arguments: list[str], messages: list[str], folder: Path):
    (folder / "bad.parquet").write_bytes(b"PAR1 not really PAR1")
    (folder / "records.jsonl").write_text(json.dumps({"code": "x = 1"}))
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


def test_output_that_nobody_reads():
    """``fourfold ... | head`` is no failure, and nothing is said of it."""
    unread, output = os.pipe()
    os.close(unread)
    command = [sys.executable, "-m", "fourfold", "schedule", "1f1b", "--stages", "4", "--microbatches", "8"]
    ended = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True)
    os.close(output)
    assert (ended.returncode, ended.stderr) == (141, "")


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


def test_prepare_tells_what_there_is(folder: Path):
    first, second = fourfold_("prepare", "run.toml"), fourfold_("prepare", "corpus.txt", "--held-out", "0.1")
    assert first.exit_code == second.exit_code == 0
    assert first.stdout == second.stdout, "the same corpus, tokenized once"
    assert (first.stderr, second.stderr) == ("tokenizing 0.0 MB\n", "")
    lines = first.stdout.splitlines()
    assert lines[0].startswith("training: ")
    assert lines[1].startswith("held out: ")
    assert lines[2].startswith("vocabulary: 257, unigram entropy ")


def test_the_field_of_the_run_file_is_tokenised(folder: Path):
    records = [{"text": "aaaa " * 40, "code": "x = 1\n" * 40} for _ in range(20)]
    (folder / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
    text = fourfold_("prepare", "records.jsonl").stdout
    code = fourfold_("prepare", "records.jsonl", "--field", "code").stdout
    assert text.startswith("training: 3,940 tokens in 20 documents, ")
    assert code.startswith("training: 4,700 tokens in 20 documents, ")
    (folder / "run.toml").write_text(RUN.replace('"corpus.txt"', '"records.jsonl"\nfield = "code"'))
    trained = fourfold_("train", "run.toml", "--layout", "dp1", "--set", "sample.tokens=0")
    assert trained.exit_code == 0
    prepared = fourfold_("prepare", "run.toml")
    assert prepared.stderr == "", "the run tokenized the same field"
    path = prepared.stdout.splitlines()[0].split()[-1]
    assert bytes(TokenFile(path).tokens[:6].tolist()) == b"x = 1\n"


def test_an_evaluation_repeats_no_sequence(folder: Path):
    trained = fourfold_("train", "run.toml", "--layout", "dp1", "--set", "evaluation.batches=500")
    assert trained.exit_code == 0
    there = PackedDataset(
        TokenFile(next((folder / "cache").rglob("held_out.tokens"))), sequence_length=16, seed=0
    )
    assert there.num_sequences == 5
    [line] = [line for line in trained.stdout.splitlines() if line.startswith("evaluation: ")]
    assert line == (
        "evaluation: 1 of evaluation.batches=500, since 5 held-out sequences make no more batches of 4"
    )
    lines = map(json.loads, (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines())
    assert [line["evaluation_valid_tokens"] for line in lines if "evaluation_loss" in line] == [64]


@pytest.mark.parametrize(
    ("preset", "broken"), [("tiny", "model.norm.weight"), ("tiny-qwen3", "model.embed_tokens.weight")]
)
def test_a_sample_of_a_broken_model_is_a_mistake(preset: str, broken: str, folder: Path):
    spec = ModelSpec.preset(preset).replace({"vocab_size": 257})
    weights = {name: torch.zeros(shape) for name, shape in spec.parameter_shapes().items()}
    weights[broken][3] = float("nan")
    files = about_files(spec, ByteTokenizer()) | ByteTokenizer().files()
    (folder / "model").mkdir()
    for name, content in files.items():
        (folder / "model" / name).write_bytes(content)
    save_file(weights, folder / "model" / "model.safetensors")
    result = fourfold_("sample", "model", "--prompt", "def")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: model/model.safetensors: {broken} has values that are not finite in torch.float32\n"
    )
