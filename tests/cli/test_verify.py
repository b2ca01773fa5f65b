"""``fourfold verify`` in this process: what it compares, finds and prints."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fourfold.cli.step_options import Given, loaded_run, step_asked_for
from fourfold.cli.verify import make_trial, verify_on_rank
from fourfold.cli.verify_text import table
from fourfold.data import SyntheticDataset
from fourfold.models import IGNORE
from fourfold.parallel_model import ParallelModel
from fourfold.specs import Layout, ModelSpec, ShardingSection
from fourfold.trial import Trial
from fourfold.verify import Difference, Verification
from tests.commands import RUN, fourfold_


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


def test_microbatches_that_nobody_gave_are_those_of_a_schedule_file(folder: Path):
    fourfold_("schedule", "gpipe", "--stages", "2", "--microbatches", "3", "--save", "s.csv")
    layout = "pp2:s.csv"
    trials = [
        make_trial(None, "tiny", layout=layout, sizes={}, sharding={}),
        make_trial(folder / "run.toml", None, layout=layout, sizes={}, sharding={}),
        step_asked_for(None, "tiny", Given(64, 12, layout, None, None, None), device="cpu"),
        loaded_run(folder / "run.toml", layout=layout).training,
    ]
    assert [trial.microbatches for trial in trials] == [3, 3, 3, 3]
    given = loaded_run(folder / "run.toml", ["training.microbatches=4"], layout=layout)
    assert given.training.microbatches == 4
    refused = fourfold_("verify", "--model", "tiny", "--layout", layout, "--microbatches", "4")
    message = "s.csv is a schedule for 3 microbatches: 4 were asked for, use microbatches=3"
    assert (refused.exit_code, refused.stderr) == (2, f"error: {message}\n")


class _AgreedOn(Exception):
    """Ends a rank where it would meet the others."""


def test_ranks_that_verify_agree_on_what_a_schedule_file_holds(folder: Path):
    def connect(*, device_type: str, agree_on: dict[str, object]) -> None:
        raise _AgreedOn(agree_on)

    rank: Any = SimpleNamespace(job=SimpleNamespace(local_rank=0, local_world_size=1), connect=connect)
    trial = Trial(ModelSpec.preset("tiny"), Layout.parse("pp1:s.csv"), batch=2, sequence_length=8)
    found = []
    for text in ("0F0,0B0,0F1,0B1", "0F0,0F1,0B0,0B1"):
        Path("s.csv").write_text(text)
        with pytest.raises(_AgreedOn) as caught:
            verify_on_rank(rank, [trial], aloud=False)
        found.append(caught.value.args[0])
    key = "the content of the schedule in layout"
    assert found[0].pop(key) != found[1].pop(key)
    assert found[0] == found[1]
