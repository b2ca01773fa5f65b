"""The live line, metrics.jsonl and the loggers."""

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fourfold.doctor import Peak
from fourfold.errors import RunStopped, UserError
from fourfold.loggers import check_loggers
from fourfold.measured import TimeSpent
from fourfold.reporting import Reporter, _numbers, clock_time, json_text
from fourfold.specs import RunSpec
from fourfold.step_flops import StepFlops
from fourfold.training import EvaluationReport, StepReport


def run(**logging: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "model": {"preset": "tiny"},
            "training": {"steps": 10, "batch": 4},
            "optimizer": {"learning_rate": 1e-3},
            "logging": logging,
        }
    )


def step(number: int, *, loss: float = 2.5, seconds: float = 0.5, **changes: Any) -> StepReport:
    values = {
        "grad_norm": 1.25,
        "learning_rate": 1e-3,
        "tokens": 1000,
        "valid_tokens": 990,
        "memory_bytes": 3 * 10**9,
    }
    return StepReport(step=number, loss=loss, seconds=seconds, **{**values, **changes})


def reporter(folder: Path, *, terminal: bool = False, peak: float | None = 4e6, **logging: Any) -> Reporter:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)
    rate = None if peak is None else Peak(peak, "test peak")
    report = Reporter(folder, run(**logging), peak=rate, ranks=4, console=console)
    report.model_flops_square = 1_500_000
    report.flops = lambda step: StepFlops(model=10**6, recomputed=10**5, attention_again=10**4)
    return report


def shown(report: Reporter) -> str:
    assert isinstance(report.console.file, io.StringIO)
    return report.console.file.getvalue()


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_step_and_evaluation_is_one_line(tmp_path: Path):
    with reporter(tmp_path) as report:
        report(step(1))
        assert len(lines(tmp_path)) == 1, "written at once, not at the end"
        report(step(2, loss=2.25))
        report(EvaluationReport(2, 2.125, 77))
    assert lines(tmp_path) == [
        {
            "step": 1,
            "loss": 2.5,
            "grad_norm": 1.25,
            "learning_rate": 1e-3,
            "tokens": 1000,
            "valid_tokens": 990,
            "tokens_per_second": 2000.0,
            "tokens_per_second_per_device": 500.0,
            "model_flops": 10**6,
            "model_flops_square": 1_500_000,
            "executed_flops": 1_110_000,
            "model_flops_per_second_per_device": 500_000.0,
            "executed_flops_per_second_per_device": 555_000.0,
            "mfu": 0.5,
            "mfu_square": 0.75,
            "hfu": 0.555,
            "seconds": 0.5,
            "memory_bytes": 3 * 10**9,
        },
        {**lines(tmp_path)[0], "step": 2, "loss": 2.25},
        {"step": 2, "evaluation_loss": 2.125, "evaluation_valid_tokens": 77},
    ]


def test_the_line_has_rates_over_the_last_steps(tmp_path: Path):
    with reporter(tmp_path) as report:
        for number in (1, 2, 3):
            report(step(number, seconds=0.1 * number, loss=float(number)))
        line = report.line(step(3, loss=3.0))
    # 3000 tokens in 0.6 s; 1e6 FLOPs in 0.2 s over 4e6 FLOP/s; 7 more steps of 0.2 s.
    assert line == "step  3/10  loss 3.0000  5,000 tokens/s  MFU 125.0%  memory 3.00 GB  0:01 left"


def test_without_a_peak_there_is_no_mfu(tmp_path: Path):
    with reporter(tmp_path, peak=None) as report:
        report(step(1))
    assert lines(tmp_path)[0]["mfu"] is None
    assert report.median("mfu") is None
    assert report.median("executed_flops") == 1_110_000
    assert "MFU -  " in shown(report)


def test_where_the_time_went_is_kept_and_logged_by_part(tmp_path: Path):
    spent = TimeSpent(compute=0.375, exposed={"tp": 0.125})
    with reporter(tmp_path) as report:
        report(step(1, spent=spent))
    report.note({"step": 1, "ranks": [{"compute": math.inf}]})
    first, last = lines(tmp_path)
    assert first["seconds_by_part"] == spent.parts()
    assert first["seconds_by_part"]["exposed tp"] == 0.125
    assert last == {"step": 1, "ranks": [{"compute": "inf"}]}, "after the run has been closed"
    assert dict(_numbers({"a": 1.0, "parts": {"b": 2.0}, "c": None})) == {"a": 1.0, "parts/b": 2.0}


def test_nan_is_shown_and_kept_as_nan(tmp_path: Path):
    """Seen in huggingface/trl#6702: a log that averages hides the step at which the loss broke."""
    with reporter(tmp_path) as report:
        for number in range(1, 11):
            report(step(number, loss=math.nan if number == 10 else 2.0))
    assert [values["loss"] for values in lines(tmp_path)] == [2.0] * 9 + ["nan"]
    assert "step 10/10  loss nan" in shown(report)


def test_json_has_no_word_for_infinity():
    values = {"error": math.inf, "tolerances": {"loss": -math.inf}, "steps": 3, "pass": False, "mfu": None}
    expected = {**values, "error": "inf", "tolerances": {"loss": "-inf"}}
    assert json.loads(json_text(values), parse_constant=lambda constant: None) == expected


def test_without_a_terminal_lines_are_few(tmp_path: Path):
    with reporter(tmp_path) as report:
        for number in range(1, 11):
            report(step(number))
    printed = shown(report).splitlines()
    assert [line.split()[1] for line in printed] == ["1/10", "10/10"]
    assert "\x1b" not in shown(report)


def test_a_terminal_has_one_live_line_and_keeps_its_cursor(tmp_path: Path):
    with reporter(tmp_path, terminal=True) as report:
        for number in range(1, 11):
            report(step(number))
    text = shown(report)
    assert text.count("step 10/10") >= 1
    assert text.count("\n") <= 2, "the line is drawn over itself"
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_a_long_wait_is_shown_on_a_terminal_only(tmp_path: Path):
    with reporter(tmp_path, terminal=True) as report:
        report.wait("saving", 10**9, 4 * 10**9, 1.9)
        assert "saving" not in shown(report), "not long"
        report.wait("saving", 10**9, 4 * 10**9, 2.0)
        report.wait("saving", 2 * 10**9, 4 * 10**9, 2.0)
    assert "saving: 1.00 of 4.00 GB  0.50 GB/s  0:06 left" in shown(report)
    assert "2.00 of" not in shown(report), "not too often"
    with reporter(tmp_path) as report:
        report.wait("saving", 10**9, 4 * 10**9, 9.0)
    assert not shown(report)


def test_a_full_disk_stops_the_run(tmp_path: Path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    message = r"cannot write .*metrics\.jsonl: No space left on device"
    with pytest.raises(RunStopped, match=message), reporter(tmp_path) as report:
        report(step(1))


def test_a_logger_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError) as caught:
        check_loggers(run(tensorboard=True, wandb="project"))
    assert caught.value.messages == (
        "logging.tensorboard needs the package tensorboard, which is not installed: "
        "pip install 'fourfold[tensorboard]'",
        "logging.wandb needs the package wandb, which is not installed: pip install 'fourfold[wandb]'",
    )
    check_loggers(run())


def test_tensorboard_gets_the_metrics(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with reporter(tmp_path, tensorboard=True) as report:
        report(step(1, loss=2.5))
        report(step(2, loss=2.25))
        report(EvaluationReport(2, 2.0, 77))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.5), (2, 2.25)]
    assert [event.value for event in events.Scalars("evaluation_loss")] == [2.0]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (61, "1:01"), (3723, "1:02:03")])
def test_clock_time(seconds: float, text: str):
    assert clock_time(seconds) == text


def test_a_run_that_begins_anew_keeps_the_metrics_of_before(tmp_path: Path):
    with reporter(tmp_path) as report:
        report.go_on(0)
        report(step(1))
    assert shown(report).startswith(f"beginning at step 1: no checkpoint in {tmp_path}\n")
    before = lines(tmp_path)
    for number in (1, 2):
        with reporter(tmp_path) as report:
            report.go_on(0)
            report(step(1, loss=number))
        assert (
            shown(report)
            .replace("\n", "")
            .startswith(
                f"beginning at step 1: no checkpoint in {tmp_path}; the metrics of before are kept as "
                f"metrics.jsonl.{number}"
            )
        )
        assert [line["loss"] for line in lines(tmp_path)] == [number]
    assert [json.loads((tmp_path / "metrics.jsonl.1").read_text())] == before
    with reporter(tmp_path) as report:
        report.go_on(1)
    assert shown(report) == "going on after step 1\n"
    assert [line["loss"] for line in lines(tmp_path)] == [2]
