"""What rank 0 tells of a run while it goes: the live line and metrics.jsonl."""

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from fourfold.doctor import Peak
from fourfold.loggers import started_loggers
from fourfold.run_folder import METRICS, writing
from fourfold.specs import RunSpec
from fourfold.step_flops import StepFlops
from fourfold.training import EvaluationReport, StepReport

# Rates and the time left are taken over this many steps: long enough to be steady, short enough to follow.
RECENT_STEPS = 20
LIVE_SECONDS = 0.1
PLAIN_SECONDS = 5.0
LONG_SECONDS = 2.0
"""What takes less is not worth a line on how far it is."""
PLAIN_WAIT_SECONDS = 10.0
"""The same without a terminal, and how often there is such a line."""


class Reporter:
    """Shows and keeps the reports of a run. Rank 0 has one; it is a context manager.

    On a terminal there is one line that changes; elsewhere a line every few seconds.

    Args:
        folder: of the run.
        run: its settings.
        peak: the rate of all ranks together; None where it is not known.
        ranks: how many there are.
        console: where to print.
    """

    def __init__(
        self,
        folder: Path,
        run: RunSpec,
        *,
        peak: Peak | None,
        ranks: int = 1,
        console: Console | None = None,
    ):
        self.steps: list[dict[str, Any]] = []
        self.evaluations: list[EvaluationReport] = []
        self.total_steps = run.training.steps
        self.flops: Callable[[int], StepFlops] | None = None
        """The FLOPs of a step, from 0; set once the model is there."""
        self.model_flops_square: int | None = None
        """The model's of any step with the convention ``square``, beside ours: see `fourfold.flops`."""
        self.peak = peak
        self.ranks = ranks
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._path = folder / METRICS
        with writing(self._path):
            # Without a buffer: each line is there at once, and closing has nothing left that could fail.
            self._file = self._path.open("ab", buffering=0)
        self._recent: deque[tuple[float, int, int | None]] = deque(maxlen=RECENT_STEPS)
        self._line = LiveLine(self.console)
        self._loggers = started_loggers(folder, run)

    def __enter__(self) -> "Reporter":
        if self.console.is_terminal:
            live = Live(console=self.console, auto_refresh=False)
            live.start()
            self._line = LiveLine(self.console, live)
            # A killed process could not show the cursor again.
            self.console.show_cursor(True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._line.live is not None:
            self._line.live.stop()
        for logger in self._loggers:
            logger.close()
        self._file.close()

    def __call__(self, report: StepReport | EvaluationReport) -> None:
        """Show and keep one report. Raises RunStopped where it cannot be written."""
        if isinstance(report, StepReport):
            self._step(report)
        else:
            self._evaluation(report)

    def _step(self, report: StepReport) -> None:
        flops = None if self.flops is None else self.flops(report.step - 1)
        model_flops = None if flops is None else flops.model
        executed_flops = None if flops is None else flops.executed
        self._recent.append((report.seconds, report.tokens, model_flops))
        values = {
            "step": report.step,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "learning_rate": report.learning_rate,
            "tokens": report.tokens,
            "valid_tokens": report.valid_tokens,
            "tokens_per_second": report.tokens / report.seconds,
            "tokens_per_second_per_device": report.tokens / report.seconds / self.ranks,
            "model_flops": model_flops,
            "model_flops_square": self.model_flops_square,
            "executed_flops": executed_flops,
            "model_flops_per_second_per_device": self.of_each(model_flops, report.seconds),
            "executed_flops_per_second_per_device": self.of_each(executed_flops, report.seconds),
            "mfu": self.of_peak(model_flops, report.seconds),
            "mfu_square": self.of_peak(self.model_flops_square, report.seconds),
            "hfu": self.of_peak(executed_flops, report.seconds),
            "seconds": report.seconds,
            "memory_bytes": report.memory_bytes,
            **({} if report.spent is None else {"seconds_by_part": report.spent.parts()}),
        }
        self.steps.append(values)
        self._write(values)
        for logger in self._loggers:
            logger.log(dict(_numbers(values)), report.step)
        self._show(report)

    def _evaluation(self, report: EvaluationReport) -> None:
        self.evaluations.append(report)
        values = {
            "step": report.step,
            "evaluation_loss": report.loss,
            "evaluation_valid_tokens": report.valid_tokens,
        }
        self._write(values)
        for logger in self._loggers:
            logger.log({"evaluation_loss": report.loss}, report.step)
        self.console.print(f"step {report.step}: held-out loss {report.loss:.4f}")

    def go_on(self, start: int) -> None:
        """Take back what the metrics have of later steps than ``start``; the curves go on from the rest.

        A line that was cut off when the run ended goes too. Where a run begins anew, the metrics of before
        are kept in a file of their own.
        """
        if not start:
            return self._begin_anew()
        kept = 0
        with writing(self._path):
            for line in self._path.read_bytes().splitlines(keepends=True):
                try:
                    values = json.loads(line)
                except ValueError:
                    break
                if not line.endswith(b"\n") or values["step"] > start:
                    break
                kept += len(line)
                if "evaluation_loss" in values:
                    report = (
                        values["step"],
                        float(values["evaluation_loss"]),
                        values["evaluation_valid_tokens"],
                    )
                    self.evaluations.append(EvaluationReport(*report))
                elif "loss" in values:
                    self.steps.append({**values, "loss": float(values["loss"])})
            os.truncate(self._path, kept)
        self.console.print(f"going on after step {start}")

    def _begin_anew(self) -> None:
        told = f"beginning at step 1: no checkpoint in {self._path.parent}"
        with writing(self._path):
            if self._path.stat().st_size:
                names = (self._path.with_name(f"{METRICS}.{number}") for number in count(1))
                earlier = next(path for path in names if not path.exists())
                self._path.rename(earlier)
                self._file.close()
                self._file = self._path.open("ab", buffering=0)
                told = f"{told}; the metrics of before are kept as {earlier.name}"
        self.console.print(told)

    def of_each(self, flops: int | None, seconds: float) -> float | None:
        """Return the FLOP/s of one device, None where they are not known."""
        return None if flops is None else flops / seconds / self.ranks

    def of_peak(self, flops: int | None, seconds: float) -> float | None:
        """Return FLOPs over what the peak would do in that time: MFU or HFU. None where either is unknown."""
        return None if self.peak is None or flops is None else flops / seconds / self.peak.flops_per_second

    def median(self, name: str) -> float | None:
        """Return the median of a value over the steps; None where it is not known."""
        values = [step[name] for step in self.steps if step.get(name) is not None]
        return median(values) if values else None

    def note(self, values: Mapping[str, Any]) -> None:
        """Keep what is known only after the last step, as a line of its own."""
        with writing(self._path), self._path.open("ab") as file:
            file.write(json_text(values).encode() + b"\n")

    def _write(self, values: dict[str, Any]) -> None:
        """Append one line."""
        line = json_text(values).encode() + b"\n"
        with writing(self._path):
            while line:
                line = line[self._file.write(line) :]

    def _show(self, report: StepReport) -> None:
        """Bring the live line up to date, or print a line when the last one is some seconds old."""
        if report.step in (1, self.total_steps) or self._line.is_due:
            self._line.show(self.line(report))

    def wait(self, what: str, done_bytes: int, total_bytes: int, seconds: float) -> None:
        """Show how far something is that training waits for, once it takes long."""
        self._line.wait(how_far(what, done_bytes, total_bytes, seconds), seconds)

    def line(self, report: StepReport) -> str:
        """Return the state of the run: rates over the last steps, everything else of this one."""
        seconds = sum(seconds for seconds, _, _ in self._recent)
        tokens = sum(tokens for _, tokens, _ in self._recent)
        flops = [flops for _, _, flops in self._recent if flops is not None]
        mfu = self.of_peak(sum(flops) if flops else None, seconds)
        left = (self.total_steps - report.step) * seconds / len(self._recent)
        return "  ".join(
            [
                f"step {report.step:>{len(str(self.total_steps))}}/{self.total_steps}",
                f"loss {report.loss:.4f}",
                f"{tokens / seconds:,.0f} tokens/s",
                f"MFU {'-' if mfu is None else f'{mfu:.1%}'}",
                f"memory {report.memory_bytes / 1e9:.2f} GB",
                f"{clock_time(left)} left",
            ]
        )


class LiveLine:
    """A line of the terminal that changes, not too often; without one (``live``) a line now and then."""

    def __init__(self, console: Console, live: Live | None = None):
        self.live = live
        self._console = console
        self._shown = -math.inf

    @property
    def is_due(self) -> bool:
        """Whether the last line is old enough for another one."""
        return self._is_older(LIVE_SECONDS if self.live is not None else PLAIN_SECONDS)

    def _is_older(self, seconds: float) -> bool:
        return time.monotonic() - self._shown >= seconds

    def show(self, line: str) -> None:
        """Show a line; on a terminal in place of the one before."""
        self._shown = time.monotonic()
        if self.live is not None:
            self.live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        else:
            self._console.print(line)

    def wait(self, line: str, seconds: float) -> None:
        """Show how far something is that has taken so many seconds, once that is long."""
        long, interval = PLAIN_WAIT_SECONDS, PLAIN_WAIT_SECONDS
        if self.live is not None:
            long, interval = LONG_SECONDS, LIVE_SECONDS
        if seconds >= long and self._is_older(interval):
            self.show(line)


def _numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the values that are there, those of a mapping inside with its name before them."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif value is not None:
            yield f"{prefix}{name}", value


def json_text(values: Mapping[str, Any]) -> str:
    """Return the values as a JSON object; infinity and nan, which JSON lacks, are ``"inf"`` and ``"nan"``."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: plain(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [plain(inner) for inner in value]
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(values))


def how_far(what: str, done_bytes: int, total_bytes: int, seconds: float) -> str:
    """Return a line on work that has taken so many seconds, with the time that it will still take."""
    rate = done_bytes / seconds if seconds else 0.0
    left = clock_time((total_bytes - done_bytes) / rate) if rate else "-"
    size = f"{done_bytes / 1e9:.2f} of {total_bytes / 1e9:.2f} GB"
    return f"{what}: {size}  {rate / 1e9:.2f} GB/s  {left} left"


def clock_time(seconds: float) -> str:
    """Return a duration as minutes and seconds, with hours where there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
