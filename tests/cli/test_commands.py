"""Commands in this process: mistakes get one message and exit status 2, and no traceback."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

import fourfold
from fourfold.checkpoint import about_files
from fourfold.cli import app
from fourfold.cli.verify import make_trial
from fourfold.cli.verify_text import table
from fourfold.data import ByteTokenizer, PackedDataset, SyntheticDataset, TokenFile
from fourfold.errors import RunStopped
from fourfold.models import IGNORE
from fourfold.parallel_model import ParallelModel
from fourfold.specs import ModelSpec, ShardingSection
from fourfold.verify import Difference, Verification

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

TRAIN = ["train", "run.toml", "--set"]


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
        (
            ["schedule", "zb-h2", "--cap", "4"],
            ["zb-h2 holds 7 microbatches at once where --cap 4 are allowed: use 1f1b, zb-h1, zbv or auto4"],
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


def test_schedule(tmp_path: Path):
    result = fourfold_(
        "schedule", "gpipe", "--stages", "2", "--microbatches", "2", "--picture", str(tmp_path / "p.png")
    )
    # Two forwards, then two backwards of twice the length; the bubble is (P-1)(F+B) of each rank.
    assert result.stdout.splitlines()[:2] == [
        "rank 0  F0 F1 .  .  .  B0 B0 B1 B1",
        "rank 1  .  F0 F1 B0 B0 B1 B1 .  .",
    ]
    assert result.stdout.splitlines()[2:6] == [
        "",
        "gpipe: 2 stages on 2 ranks, 2 microbatches",
        "makespan 9, of which work 6; bubble 33.3%",
        "most activations held at once, in microbatches, by rank: 2, 2",
    ]
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_schedule_in_numbers():
    result = fourfold_("schedule", "interleaved2", "--times", "1,1,1,0", "--json")
    assert json.loads(result.stdout) == {
        "bubble_fraction": pytest.approx(4.5 / 28.5),
        "peak_activations": [5.5, 4.5, 3.5, 2.5],
        "makespan": 28.5,
    }
    with_messages = json.loads(fourfold_("schedule", "gpipe", "--times", "1,1,1,0.5", "--json").stdout)
    assert with_messages["makespan"] == 33 + 6 * 0.5


def test_schedules_compared():
    result = fourfold_("schedule", "--compare", "--cap", "4", "--stages", "4", "--microbatches", "8")
    rows = {words[0]: words[1:] for line in result.stdout.splitlines() if (words := line.split())}
    heading, _, quickest, *_ = rows
    assert (heading, quickest) == ("schedule", "auto4")
    assert rows["zbv"] == ["25.5", "5.9%", "4", "8"]
    assert rows["gpipe"] == ["33", "27.3%", "8", "!", "4"]
    assert "! more than the 4 microbatches that are allowed" in result.stdout
    numbers = json.loads(fourfold_("schedule", "1f1b2", "--compare", "--json").stdout)
    assert {
        "1f1b2",
        "1f1b",
        "gpipe",
        "interleaved2",
        "bfs4",
        "zb-h1",
        "zb-h2",
        "zbv",
        "dualpipev",
        "auto",
    } <= set(numbers)
    assert min(numbers, key=lambda name: numbers[name]["makespan"]) == "auto"


def test_a_schedule_is_saved_and_read_again(tmp_path: Path):
    for suffix in ("csv", "json"):
        path = str(tmp_path / f"s.{suffix}")
        saved = fourfold_("schedule", "zbv", "--stages", "3", "--microbatches", "5", "--save", path)
        assert saved.stdout.splitlines()[-1] == f"schedule: {path}"
        read = fourfold_("schedule", path)
        assert read.stdout.splitlines()[:3] == saved.stdout.splitlines()[:3], "its sizes are in the file"
        refused = fourfold_("schedule", path, "--stages", "4")
        assert (refused.exit_code, refused.stderr) == (
            2,
            f"error: {path} is a schedule for 3 pipeline ranks: 4 were asked for\n",
        )
    broken = (tmp_path / "s.csv").read_text().replace("5I4,", "")
    (tmp_path / "s.csv").write_text(broken)
    refused = fourfold_("schedule", str(tmp_path / "s.csv"))
    assert refused.exit_code == 2
    assert "the backward of stage 5 on microbatch 4 is B 0, I 0, W 1 times" in refused.stderr


def test_a_schedule_as_a_trace(tmp_path: Path):
    path = tmp_path / "t.json"
    fourfold_("schedule", "auto2", "--stages", "2", "--microbatches", "2", "--trace", str(path))
    events = json.loads(path.read_text())["traceEvents"]
    assert max(event["ts"] + event["dur"] for event in events if event["ph"] == "X") >= 6000


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


def test_explain_and_verify_say_how_tp_keeps_the_stream():
    whole = "tp=4: every rank has the whole residual stream (tp=4 does not divide 62 tokens)"
    arguments = ["--model", "tiny", "--layout", "tp4", "--sequence", "62", "--batch", "2"]
    result = fourfold_("explain", *arguments)
    assert result.stdout.splitlines()[2] == whole
    assert json.loads(fourfold_("explain", *arguments, "--json").stdout)["sequence_parallel"] is False
    close = Difference("loss", 0.0, 1e-10)
    report = Verification(
        "tp4", 62, "float64", 1, close, close, (close,), (close,), (124,), tokens_agree=True
    )
    assert table(report).splitlines()[1] == whole
    assert report.to_json()["sequence_parallel"] is False
    cut = "tp=4: the residual stream is cut by tokens (sequence parallelism)"
    assert table(replace(report, sequence_length=64)).splitlines()[1] == cut


def test_what_cp_means_is_said_with_its_reason():
    why = "cp=4 is ulysses4: ring or ulysses2 would send no less"
    arguments = ["--model", "tiny", "--layout", "cp4", "--sequence", "64", "--batch", "2"]
    assert fourfold_("explain", *arguments).stdout.splitlines()[2] == why
    slower = "cp=4 is ring: ulysses2 or ulysses4 would be slower on L40S"
    arguments[1] = "llama3-8b"
    arguments[5] = "8192"
    assert fourfold_("simulate", *arguments, "--gpu", "L40S").stdout.splitlines()[2] == slower
    found = json.loads(fourfold_("simulate", *arguments, "--gpu", "L40S", "--json").stdout)
    assert found["layout"] == "cp4:ring"


@pytest.fixture
def gradient_off_by_a_millionth(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a parameter whose gradient is 1 + 1e-6 times what it should be."""
    name, step = "model.layers.1.mlp.up_proj.weight", ParallelModel.step

    def wrong_step(model: ParallelModel, batches, *, valid_tokens, update):
        def wrong_update(loss_sum):
            dict(model.named_gradients())[name].mul_(1 + 1e-6)
            update(loss_sum)

        return step(model, batches, valid_tokens=valid_tokens, update=wrong_update)

    monkeypatch.setattr(ParallelModel, "step", wrong_step)
    return name


def test_verify_finds_a_wrong_gradient(gradient_off_by_a_millionth: str):
    result = fourfold_("verify", "--model", "tiny", "--layout", "dp1", "--steps", "1")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert result.exit_code == 1
    worst, second, *_ = (line for line in lines if line[:2] == ["gradient", "of"])
    assert (worst[2], worst[-1]) == (gradient_off_by_a_millionth, "WRONG")
    assert float(worst[3]) == pytest.approx(1e-6, rel=0.01)
    assert second[-1] == "ok"
    [weights] = [line for line in lines if line[:2] == ["weights", "of"] and line[-1] == "WRONG"]
    assert weights[2] == gradient_off_by_a_millionth
    assert lines[-1] == ["FAIL"]


def test_verify_prints_json_even_of_what_is_no_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fourfold.reference._tensor_error", lambda tensor, expected, scale: float("nan"))
    result = fourfold_("verify", "--model", "tiny", "--layout", "dp1", "--steps", "1", "--json")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    report = json.loads(result.stdout, parse_constant=refuse)
    assert result.exit_code == 1
    assert (report["gradient_error"], report["pass"]) == ("inf", False)


@pytest.mark.parametrize(
    ("layout", "microbatches", "batch", "valid_by_rank"),
    [
        ("dp1", 1, 3, ["some"]),
        ("dp2", 1, 4, ["some", "some"]),
        ("dp4", 1, 4, ["some", "0", "some", "some"]),
        ("dp4", 3, 12, ["some", "some", "some", "some"]),
        ("fsdp4", 1, 4, ["some", "0", "some", "some"]),
        ("dp2,fsdp2:zero1", 1, 4, ["some", "0", "some", "some"]),
    ],
)
def test_verify_has_ranks_and_microbatches_without_a_label(
    layout: str, microbatches: int, batch: int, valid_by_rank: list[str]
):
    trial = make_trial(None, "tiny", layout=layout, sizes={"microbatches": microbatches}, sharding={})
    assert trial.batch == batch
    ranks = trial.layout.size("dp", "fsdp")
    data = SyntheticDataset(trial.spec.vocab_size, trial.sequence_length, trial.seed)
    rows = batch // (ranks * microbatches)
    counts = [
        [
            int((data.rows(0, batch, range(start, start + rows)).labels_BS != IGNORE).sum())
            for start in range(rank * rows, batch, ranks * rows)
        ]
        for rank in range(ranks)
    ]
    assert ["some" if sum(count) else "0" for count in counts] == valid_by_rank
    assert (min(map(min, counts)) == 0) == (rows == 1 and batch > 3), "a microbatch without any"


def test_verify_takes_sharding_from_the_run_file_and_the_options_over_it(folder: Path):
    text = RUN + '[sharding]\npieces = "matrices"\nprefetch = 3\n'
    (folder / "sharded.toml").write_text(text)
    from_file = make_trial(folder / "sharded.toml", None, layout="fsdp2", sizes={}, sharding={})
    assert from_file.sharding == ShardingSection(pieces="matrices", prefetch=3)
    options = {"pieces": "flat", "accumulate": "whole"}
    over_it = make_trial(folder / "sharded.toml", None, layout="fsdp2", sizes={}, sharding=options)
    assert over_it.sharding == ShardingSection(pieces="flat", prefetch=3, accumulate="whole")
    alone = make_trial(None, "tiny", layout="fsdp2", sizes={}, sharding={"prefetch": 0})
    assert alone.sharding == ShardingSection(prefetch=0)


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
