"""Whole runs on real local ranks: what they leave, and how they end."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fourfold.checkpoint import load_checkpoint
from fourfold.cli import app
from fourfold.launch.watch_together import LOOK_SECONDS
from fourfold.specs import ModelSpec, RunSpec
from tests.commands import RUN, Command, joined

SECONDS_TO_END = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "run.toml").write_text(RUN)
    (folder / "corpus.txt").write_text("def main(): return 1\n" * 400)
    return folder


def start(folder: Path, *arguments: str) -> Command:
    """Start a command that starts ranks; its temporary files are in the folder."""
    return Command(folder, arguments, {**cache_of(folder), "TMPDIR": str(folder)})


def cache_of(folder: Path) -> dict[str, str]:
    return {"FOURFOLD_CACHE": str(folder / "cache")}


def start_joined(folder: Path, *arguments: str, **places: Any) -> list[Command]:
    return joined(folder, *arguments, variables=cache_of(folder), **places)


def trained(folder: Path, *arguments: str) -> tuple[list[int | None], list[str], list[str]]:
    """Train on two ranks of a joined job; return exit statuses, outputs and errors by rank."""
    ranks = start_joined(folder, "train", "run.toml", *arguments)
    outputs, errors = zip(*(rank.communicate(SECONDS_TO_END) for rank in ranks), strict=True)
    return [rank.returncode for rank in ranks], list(outputs), list(errors)


def trained_alone(folder: Path, *arguments: str, **limits: int) -> tuple[int | None, str, str]:
    """Train on one rank; return exit status, output and errors."""
    run = Command(folder, ["train", "run.toml", "--layout", "dp1", *arguments], cache_of(folder), **limits)
    output, errors = run.communicate(SECONDS_TO_END)
    return run.returncode, output, errors


@pytest.fixture(scope="module")
def finished(folder: Path) -> tuple[Path, str]:
    """A run that was left to its end, and what it printed."""
    run = start(folder, "train", "run.toml", "--set", "sample.tokens=8", "--set", "sample.prompt=def main")
    output, errors = run.communicate(timeout=120)
    assert run.returncode == 0
    assert errors in ("tokenizing 0.0 MB\n", ""), "another test's run may have been the first"
    return folder / "runs" / "run", output


@pytest.fixture(scope="module")
def tokenized(finished: tuple[Path, str], folder: Path) -> Path:
    """The folder once its corpus is in the cache: what a run says then is about the run alone."""
    return folder


def test_a_run_leaves_its_folder(finished: tuple[Path, str]):
    folder, output = finished
    names = {
        "run.toml",
        "metrics.jsonl",
        "loss.png",
        "throughput.png",
        "time.png",
        "program.json",
        "program.png",
        "program.txt",
        "checkpoints",
    }
    assert {path.name for path in folder.iterdir()} == names
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 3, 3]
    assert lines[0]["tokens"] == 4 * 16
    assert 5 < lines[0]["loss"] < 6, "about ln 257 at the start"
    assert lines[0]["hfu"] > lines[0]["mfu"] > 0
    assert lines[0]["executed_flops"] > lines[0]["model_flops"], "attention computes its scores again"
    assert sum(lines[0]["seconds_by_part"].values()) == pytest.approx(lines[0]["seconds"])
    assert lines[4]["seconds_by_part"]["compute"] > 0
    for row in lines[4]["traffic_of_rank_0"]:
        assert (row["calls"], row["bytes"]) == (row["predicted_calls"], row["predicted_bytes"])
    for row in lines[4]["memory"]:
        counted, predicted = (sum(row[name]["at_peak"].values()) for name in ("counted", "predicted"))
        assert counted == pytest.approx(predicted, rel=0.05)
    assert "held in a step, tensor by tensor, in MB (in brackets: predicted):" in output
    assert "of a step went, mean of 2 ranks" in output
    assert 3 < lines[3]["evaluation_loss"] < 6
    assert "step 3/3  loss" in output
    assert "MFU against the float32 matmul peak measured on this machine" in output
    assert "\nsample, temperature 0.8:\n\ndef main" in output


def test_the_resolved_run_file_stands_alone(finished: tuple[Path, str]):
    folder, _ = finished
    assert "preset" not in tomllib.loads((folder / "run.toml").read_text())["model"]
    run = RunSpec.load(folder / "run.toml")
    assert run.sample.tokens == 8
    assert run.model.spec() == ModelSpec.preset("tiny").replace({"vocab_size": 257})


def test_the_sample_is_what_the_run_printed(finished: tuple[Path, str]):
    folder, output = finished
    result = CliRunner().invoke(app, ["sample", str(folder)], catch_exceptions=False)
    assert result.exit_code == 0
    assert output.endswith(result.stdout)
    other = CliRunner().invoke(app, ["sample", str(folder), "--prompt", "class", "--tokens", "4"])
    assert other.stdout.startswith("class")


def test_a_sharded_run_leaves_the_weights_of_one_that_is_not(finished: tuple[Path, str], folder: Path):
    """The same files, whole weights in the checkpoint, and the gathers in the program."""
    options = ["folder=sharded", "sample.tokens=8", "sample.prompt=def main"]
    statuses, outputs, errors = trained(
        folder, "--layout", "fsdp2", *(word for option in options for word in ("--set", option))
    )
    assert (statuses, errors) == ([0, 0], ["", ""])
    assert "\nsample, temperature 0.8:\n\ndef main" in outputs[0]
    replicated, _ = finished
    sharded = folder / "sharded"
    assert {path.name for path in sharded.iterdir()} == {path.name for path in replicated.iterdir()}
    expected, found = (load_checkpoint(f).model.state_dict() for f in (replicated, sharded))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5, msg=name)
    assert "0GATHER0" in (sharded / "program.txt").read_text()
    assert "GATHER" not in (replicated / "program.txt").read_text()


RESUMED = (
    *("training.steps=8", "optimizer.schedule=constant", "checkpoint.every=2", "checkpoint.keep=9"),
    *("evaluation.every=3", "sample.tokens=8"),
)


def settings_of(*values: str) -> list[str]:
    return [word for value in (*RESUMED, *values) for word in ("--set", value)]


def losses_of(folder: Path) -> list[tuple[int, str, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    names = ("loss", "grad_norm", "learning_rate", "evaluation_loss")
    return [(line["step"], name, line[name]) for line in lines for name in names if name in line]


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[tuple[int, str, float]]:
    """The losses of a run of eight steps that nothing happens to."""
    assert trained(folder, *settings_of("folder=whole"))[0] == [0, 0]
    return losses_of(folder / "whole")


def test_a_killed_run_goes_on_as_if_nothing_had_been(folder: Path, undisturbed: list[tuple[int, str, float]]):
    """The same losses, bit for bit: batches, learning rate, weights and moments are those of step 4."""
    ranks = start_joined(folder, "train", "run.toml", *settings_of("folder=cut", "training.steps=100000"))
    wait_until(lambda: (folder / "cut" / "checkpoints" / "step-000004").exists())
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.communicate(SECONDS_TO_END)
    for path in (folder / "cut" / "checkpoints").iterdir():
        if path.name > "step-000004":
            shutil.rmtree(path)  # it may have come some steps further
    (folder / "cut" / "checkpoints" / "step-000006.part").mkdir()
    with (folder / "cut" / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 5, "lo')
    statuses, outputs, errors = trained(folder, *settings_of("folder=cut"), "--resume")
    assert (statuses, errors) == ([0, 0], ["", ""])
    assert "\ngoing on after step 4\n" in outputs[0]
    assert losses_of(folder / "cut") == undisturbed
    names = {path.name for path in (folder / "cut" / "checkpoints").iterdir()}
    assert names == {f"step-00000{step}" for step in (2, 4, 6, 8)}


def test_a_run_goes_on_on_another_layout_and_only_as_itself(
    folder: Path, undisturbed: list[tuple[int, str, float]]
):
    assert trained(folder, *settings_of("folder=first", "training.steps=4"))[0] == [0, 0]
    asked = settings_of("folder=first")
    before = (folder / "first" / "run.toml").read_text()
    statuses, _, errors = trained(
        folder, *asked, "--resume", "--set", "seed=7", "--set", "model.rope_theta=9"
    )
    assert statuses == [2, 2]
    lines = dict.fromkeys(line.partition("error: ")[2] for line in errors[0].splitlines())
    assert list(lines) == [
        "first/checkpoints/step-000004 is of another run: undo these changes, or start a new run without "
        "--resume",
        "model.rope_theta: the checkpoint has 10000.0, the run 9.0",
        "seed: the checkpoint has 0, the run 7",
    ]
    assert (folder / "first" / "run.toml").read_text() == before
    assert trained(folder, *asked, "--resume", "--layout", "tp2")[2] == ["", ""]
    assert RunSpec.load(folder / "first" / "run.toml").layout.tp == 2
    mine = [line for line in losses_of(folder / "first") if line[:2] != (4, "evaluation_loss")]
    for one, two in zip(mine, undisturbed, strict=True):
        assert one[:2] == two[:2]
        assert one[2] == pytest.approx(two[2], rel=1e-3)
    status, output, error = trained_alone(folder, *asked, "--resume")
    assert (status, error) == (0, "")
    assert output.endswith("nothing is left to do: give a larger training.steps to go on\n")


def test_a_killed_rank_ends_the_run(tokenized: Path):
    run = start(tokenized, "train", "run.toml", "--set", "training.steps=100000", "--set", "folder=killed")
    metrics = tokenized / "killed" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 3)
    ranks = local_ranks(tokenized)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    _, errors = run.communicate(timeout=SECONDS_TO_END)
    assert run.returncode == 1
    message = errors.splitlines()[-1]
    found = re.match(
        r"error: rank 1 was killed by SIGKILL \(out of memory\?\) (?:in|after) step (\d+)", message
    )
    assert found, message
    assert int(found[1]) >= 3
    assert len(errors.splitlines()) == 1
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


def test_a_full_disk_ends_the_run(tokenized: Path):
    asked = ("--set", "training.steps=100000", "--set", "folder=full")
    status, _, errors = trained_alone(tokenized, *asked, largest_file_bytes=4096)
    assert (status, errors) == (1, "error: cannot write full/metrics.jsonl: File too large\n")


def test_a_port_in_use(folder: Path):
    with socket.create_server(("localhost", 0)) as server:
        port = str(server.getsockname()[1])
        job = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
        }
        run = Command(folder, ["verify", "--model", "tiny", "--layout", "dp2"], {**cache_of(folder), **job})
        _, errors = run.communicate(SECONDS_TO_END)
    assert run.returncode == 2
    assert errors == (
        f"rank 0: error: port {port} on localhost is in use: rank 0 needs it to meet the other ranks; "
        "set MASTER_PORT to a free port, the same on all ranks\n"
    )


def test_torchrun_starts_the_ranks_of_two_machines(finished: tuple[Path, str], folder: Path):
    """An agent and a cache each, which meet by c10d: the losses are those of local ranks, to the bit."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    agents = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
                *(f"--rdzv-endpoint=localhost:{port}", "--rdzv-backend=c10d", "--rdzv-id=two-machines"),
                *("--local-addr=localhost", "--module", "fourfold"),
                *("train", "run.toml", "--set", "folder=two-machines"),
            ],
            cwd=folder,
            env={**os.environ, "FOURFOLD_CACHE": str(folder / cache), "TMPDIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for cache in ("cache", "cache-of-another-machine")
    ]
    try:
        said = [agent.communicate(timeout=SECONDS_TO_END) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert sum(output.count("step 3/3") for output, _ in said) == 1, "rank 0 alone reports"
    local, _ = finished
    assert losses_of(folder / "two-machines") == losses_of(local)
    names = {path.name for path in (folder / "two-machines" / "checkpoints" / "step-000003").iterdir()}
    assert names == {"manifest.json", "config.json", "rank-00000.safetensors", "rank-00001.safetensors"}
    assert sorted(path.name for path in folder.glob("two-machines*")) == ["two-machines"]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_of_a_joined_job(tokenized: Path, killed: int):
    name = f"killed-joined-{killed}"
    ranks = start_joined(
        tokenized, "train", "run.toml", "--set", "training.steps=100000", "--set", f"folder={name}"
    )
    metrics = tokenized / name / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 3)
    time.sleep(4 * LOOK_SECONDS)  # both have told that they are in a step
    ranks[killed].kill()
    _, errors = ranks[1 - killed].communicate(SECONDS_TO_END)
    ranks[killed].communicate(SECONDS_TO_END)
    assert ranks[1 - killed].returncode == 1
    place = r"(?:in|after) step (\d+)"
    found = re.match(
        rf"rank {1 - killed}: error: rank {killed} is gone: killed \(out of memory\?\), or its machine or "
        rf"link is; when last heard of rank {killed} was {place}.*\n"
        rf"rank {1 - killed} lost the connection to another rank {place}, .*"
        r"(?:after|waiting for) [a-z_]+ on axis \w+: .*\n$",
        errors,
    )
    assert found, errors
    last_heard, lost = map(int, found.groups())
    assert 3 <= last_heard <= lost


def test_a_bad_corpus_of_a_joined_job(folder: Path):
    (folder / "bad.parquet").write_bytes(b"PAR1 not really PAR1")
    asked = ("--set", "data.source=bad.parquet", "--set", "folder=bad")
    statuses, _, told = trained(folder, *asked)
    errors = [text.splitlines() for text in told]
    assert statuses == [2, 1]
    assert errors[0][-1].startswith("rank 0: error: bad.parquet is not a readable Parquet file")
    assert len(errors[0]) == 2, "and the line that tokenizing started"
    assert errors[1] == ["rank 1: error: rank 0 failed"]
    assert not (folder / "bad").exists()


def errors_on_two_machines(folder: Path, *own: str) -> list[list[str]]:
    """Train on two machines with a corpus each, and return what each rank says is wrong."""
    each = [["--set", f"data.source=machine-{rank}.txt", *(own if rank else ())] for rank in range(2)]
    ranks = start_joined(folder, "train", "run.toml", "--set", "folder=machines", each=each, local=False)
    errors = [rank.communicate(SECONDS_TO_END)[1].splitlines() for rank in ranks]
    return [[line for line in lines if not line.startswith("tokenizing")] for lines in errors]


def test_what_machines_have_to_agree_on(folder: Path):
    text = "def main(): return 1\n" * 400
    (folder / "machine-0.txt").write_text(text)
    (folder / "machine-1.txt").write_text(text.replace("1", "2"))
    errors = errors_on_two_machines(folder)
    assert [len(lines) for lines in errors] == [2, 2]
    for rank, lines in enumerate(errors):
        for line, part in zip(lines, ("held-out", "training"), strict=True):
            assert line.startswith(f"rank {rank}: error: ranks differ in the {part} part of the corpus: ")
            assert re.search(r"(\d+ tokens in 1 documents) with hash \w+ on rank 1, \1 with hash", line)
    (folder / "machine-1.txt").write_text(text)
    message = "error: ranks differ in training.steps: 2 on rank 1, 3 on rank 0: give all ranks the same"
    errors = errors_on_two_machines(folder, "--set", "training.steps=2")
    assert errors == [[f"rank {rank}: {message}"] for rank in range(2)]
    assert not (folder / "machines").exists()
    assert errors_on_two_machines(folder) == [[], []], "the same content by other names"


def test_the_run_folder_is_one_that_all_ranks_see(tokenized: Path, tmp_path: Path):
    """A relative one is that of rank 0; where a rank cannot see it, it would train without a checkpoint."""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
        for name in ("run.toml", "corpus.txt"):
            shutil.copy(tokenized / name, folder)
    # Below this path each process sees its own current folder.
    apart = "/proc/self/cwd/apart"
    (folders[1] / "apart").mkdir()
    outcomes = []
    for name in ("run", apart):
        words = ["train", "run.toml", "--set", f"folder={name}"]
        ranks = joined(folders, *words, variables=cache_of(tokenized), local=False)
        said = [rank.communicate(SECONDS_TO_END)[1].splitlines() for rank in ranks]
        errors = [[line for line in lines if not line.startswith("tokenizing")] for lines in said]
        outcomes.append(([rank.returncode for rank in ranks], errors))
    message = f"rank 1 on {socket.gethostname()} does not see {apart}: the ranks must share it"
    advice = "set folder to a path on a file system that all machines have"
    told = [[f"rank 0: error: {message}: {advice}"], [f"error: {message}: {advice}"]]
    assert outcomes == [([0, 0], [[], []]), ([2, 2], told)]
    left = {path.name for path in (folders[0] / "run" / "checkpoints" / "step-000003").iterdir()}
    assert {"manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"} <= left
    assert not (folders[1] / "run").exists()
    assert {path.name for path in (folders[0] / "apart").iterdir()} == {"run.toml", "metrics.jsonl"}
    assert not any((folders[0] / "run").glob(".seen-*"))


def test_a_run_that_diverges_leaves_its_pictures(tokenized: Path):
    asked = ("optimizer.schedule=constant", "optimizer.learning_rate=1e30", "folder=diverged")
    statuses, _, errors = trained(tokenized, *(word for value in asked for word in ("--set", value)))
    assert statuses == [1, 1]
    for rank, text in enumerate(errors):
        [message] = text.splitlines()
        assert message.startswith(f"rank {rank}: error: step 2 is not finite; no weight was changed by it: ")
    left = {"run.toml", "metrics.jsonl", "loss.png", "throughput.png"}
    assert {path.name for path in (tokenized / "diverged").iterdir()} == left
    last = json.loads((tokenized / "diverged" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 2
    assert "nan" in (last["loss"], last["grad_norm"])


def test_a_last_step_that_breaks_the_weights_keeps_no_checkpoint(tokenized: Path):
    asked = (
        "optimizer.schedule=constant",
        "optimizer.learning_rate=3e38",
        "training.steps=1",
        "folder=broken",
    )
    settings = [word for value in asked for word in ("--set", value)]
    status, _, errors = trained_alone(tokenized, *settings)
    assert status == 1
    [message] = errors.splitlines()
    assert message.startswith("error: the held-out loss after step 1 is nan: ")
    left = {"run.toml", "metrics.jsonl", "loss.png", "throughput.png"}
    assert {path.name for path in (tokenized / "broken").iterdir()} == left


def local_ranks(folder: Path) -> list[int]:
    """The processes of the ranks that were started in the folder: they map where they are into memory."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if place := re.search(rf"{folder}/fourfold-\w+/place-(\d+)$", path.read_text(), re.MULTILINE):
                found[int(place[1])] = int(path.parent.name)
    return [pid for _, pid in sorted(found.items())]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
