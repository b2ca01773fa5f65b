"""What rank 0 tells of a training run, in lines, numbers and pictures; on the other ranks nothing."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

from fourfold.data import PackedDataset, Prepared
from fourfold.doctor import peak_of
from fourfold.explain import explain
from fourfold.flops import model_flops
from fourfold.gauges import (
    Gauges,
    MemoryRow,
    RunFlops,
    TrafficRow,
    memory,
    memory_lines,
    summary,
    time_lines,
    traffic,
    traffic_lines,
)
from fourfold.launch import Rank
from fourfold.measured import measured_timeline
from fourfold.mesh import Mesh
from fourfold.outline import Step
from fourfold.parallel_model import ParallelModel
from fourfold.pictures import draw_loss, draw_throughput, draw_time, unigram_entropy
from fourfold.program import Timeline, draw
from fourfold.program.trace import write_trace
from fourfold.reporting import Reporter
from fourfold.run_folder import RUN_FILE, holding, write_run_file, writing
from fourfold.specs import ModelSpec, RunSpec
from fourfold.traffic import Event
from fourfold.training import Report, StepReport


@contextmanager
def telling(
    rank: Rank, run: RunSpec, folder: Path | None, mesh: Mesh, prepared: Prepared
) -> Iterator["Telling"]:
    """Yield what tells of a run on this rank. While it is open, rank 0 holds the run's folder."""
    peak = peak_of(mesh, run.training.dtype, given_tflops=run.logging.peak_tflops)
    if not rank.is_first:
        yield Telling(run, mesh, None, None, math.nan)
        return
    assert folder is not None
    with holding(folder), Reporter(folder, run, peak=peak, ranks=mesh.world_size) as reporter:
        yield Telling(run, mesh, folder, reporter, unigram_entropy(prepared.train))


class Telling:
    """Tells of one run, where there is a reporter.

    Args:
        run: its settings.
        mesh: the ranks.
        folder: of the run, and ``reporter`` what prints and keeps; None on all ranks but the first.
        unigram: the entropy of single tokens, which a loss is shown beside.
    """

    def __init__(
        self, run: RunSpec, mesh: Mesh, folder: Path | None, reporter: Reporter | None, unigram: float
    ):
        self._run, self._mesh, self._unigram = run, mesh, unigram
        self._folder, self._reporter = folder, reporter
        self._gauges = Gauges()
        self._title = ""

    def line(self, text: str) -> None:
        """Print a line."""
        if self._reporter is not None:
            self._reporter.console.print(text)

    def wait(self, what: str, done_bytes: int, total_bytes: int, seconds: float) -> None:
        """Show how far something is that training waits for; see `Reporter.wait`."""
        if self._reporter is not None:
            self._reporter.wait(what, done_bytes, total_bytes, seconds)

    def begin(self, model_spec: ModelSpec, notes: Sequence[str], *, resume: bool) -> None:
        """Say what is trained, and on what; and the notes that are not empty."""
        run = self._run
        self._title = (
            f"{Path(run.folder).name}: {_count(model_spec.num_parameters)} parameters on "
            f"{run.layout}, {self._mesh.device.type}"
        )
        if self._reporter is None:
            return
        peak = self._reporter.peak
        assert peak is not None
        self.line(f"{self._title}; in {self._folder}")
        self.line(f"MFU against the {peak.origin}: {_rate(peak.flops_per_second)}")
        for note in filter(None, notes):
            self.line(note)
        if run.model.init is not None and not resume:
            self.line(f"the weights to begin with are those in {run.model.init}")

    def started(self, model: ParallelModel, data: PackedDataset) -> None:
        """Say how the model is laid out, and count its FLOPs from here on."""
        if self._reporter is None:
            return
        documents = partial(data.documents, batch=self._run.training.batch)
        keeps = self._run.training.recompute.not_again(tp=self._mesh.tp.size)
        self._reporter.flops = RunFlops(model, documents, keeps=keeps)
        self._reporter.model_flops_square = model_flops(
            model.model.spec,
            batch=self._run.training.batch,
            sequence_length=self._run.data.sequence_length,
            convention="square",
        )
        if len(model.stages.blocks) > 1:
            self.line(stage_lines(model))
        if stream := self._mesh.layout.stream(self._run.data.sequence_length):
            self.line(stream)

    def go_on(self, start: int, run: RunSpec) -> None:
        """Take the run up after ``start`` steps, with the settings that it has now, spelled out."""
        if self._reporter is None:
            return
        assert self._folder is not None
        with writing(self._folder / RUN_FILE):
            write_run_file(self._folder, run)
        self._reporter.go_on(start)

    def report(self, report: Report) -> None:
        """Take a step's or an evaluation's report."""
        if isinstance(report, StepReport):
            self._gauges.add(report)
        if self._reporter is not None:
            self._reporter(report)

    def draw_curves(self) -> None:
        """Draw the loss and the throughput as far as the run came."""
        assert self._reporter is not None
        assert self._folder is not None
        _draw_curves(self._reporter, self._folder, self._title, self._unigram)

    def end(
        self, model: ParallelModel, model_spec: ModelSpec, data: PackedDataset, sample: Callable[[], str]
    ) -> None:
        """Tell what came out, when nothing failed. All ranks call it; ``sample`` makes a text on all."""
        timeline = measured_timeline(model.executor.trace, self._mesh.pp)
        by_rank = self._gauges.of_all_ranks(model)
        held = self._gauges.held_by_all_ranks(model)
        text = sample()
        if self._reporter is None:
            return
        assert self._folder is not None
        run, last, counted_at = self._run, self._gauges.last, self._gauges.held_at_step
        assert last is not None
        assert counted_at is not None
        self.draw_curves()
        _draw_program(model, timeline, self._folder, step=run.training.steps)
        device = self._mesh.device.type
        sent = traffic(last, _predicted(run, model_spec, data, device))
        documents = data.documents(counted_at - 1, run.training.batch)
        rows = memory(held, Step.of_run(run, model_spec), documents, device_type=device)
        _tell_gauges(self._reporter, self._folder, by_rank, sent, rows, self._title)
        self._reporter.note({"step": last.step, **summary(by_rank, sent, rows)})
        _tell(self._reporter, self._folder, self._unigram)
        if text:
            self.line(f"\nsample, temperature {run.sample.temperature:g}:\n")
            print(text, flush=True)


def stage_lines(model: ParallelModel) -> str:
    """Say which blocks each pipeline stage has, and where it is."""
    lines = []
    place = model.stages.order.rank_of_segment
    for number, names in enumerate(model.stages.blocks):
        held = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        lines.append(f"stage {number} on pipeline rank {place[number]}: {held}")
    return "\n".join(lines)


def _draw_curves(reporter: Reporter, folder: Path, title: str, unigram: float) -> None:
    """Draw the loss and the throughput as far as the run came."""
    if not reporter.steps:
        return
    evaluations = [(report.step, report.loss) for report in reporter.evaluations]
    draw_loss(
        folder / "loss.png",
        [values["loss"] for values in reporter.steps],
        evaluations=evaluations,
        unigram=unigram,
        title=title,
    )
    draw_throughput(
        folder / "throughput.png",
        [values["tokens_per_second"] for values in reporter.steps],
        mfu=reporter.median("mfu"),
        origin=reporter.peak.origin if reporter.peak else "",
        title=title,
    )


def _draw_program(model: ParallelModel, timeline: Timeline, folder: Path, *, step: int) -> None:
    """Write the program of a step as text; draw the last step as it ran, and write it as a trace."""
    path = folder / "program.txt"
    with writing(path):
        path.write_text(f"{stage_lines(model)}\n{_units(model)}\n\n{draw.listing(model.program)}\n")
    if timeline.spans:
        ranks = "on rank 0" if timeline.num_ranks == 1 else f"on {timeline.num_ranks} pipeline ranks"
        picture = folder / "program.png"
        with writing(picture):
            draw.picture(timeline, picture, title=f"Step {step} {ranks}, measured")
        trace = folder / "program.json"
        with writing(trace):
            write_trace(timeline, trace)


def _units(model: ParallelModel) -> str:
    """Say which parameters each unit of the program has."""
    return "\n".join(
        f"unit {number}: {unit.name}{'' if unit.is_trained else ', frozen'}, used by segments "
        f"{', '.join(map(str, unit.users))}"
        for number, unit in enumerate(model.unit_specs)
    )


def _predicted(run: RunSpec, model_spec: ModelSpec, data: PackedDataset, device: str) -> list[Event]:
    """What rank 0 sends in the last step, by formula."""
    step = Step.of_run(run, model_spec)
    documents = step.documents_of(0, data.documents(run.training.steps - 1, step.batch))
    return explain(step, device_type=device).events(0, shard=0, documents=documents)


def _tell_gauges(
    reporter: Reporter,
    folder: Path,
    by_rank: Sequence[Mapping[str, float]],
    sent: Sequence[TrafficRow],
    held: Sequence[MemoryRow],
    title: str,
) -> None:
    """Print and draw where the time went; print what was sent and what was held."""
    if by_rank:
        reporter.console.print("\n".join(time_lines(by_rank)))
        draw_time(folder / "time.png", by_rank, title=title)
    if sent:
        reporter.console.print("\n".join(traffic_lines(sent)))
    reporter.console.print("\n".join(memory_lines(held)))


def _tell(reporter: Reporter, folder: Path, unigram: float) -> None:
    """Print what came out."""
    if reporter.evaluations:
        loss = reporter.evaluations[-1].loss
        reporter.console.print(f"held-out loss {loss:.4f} nats per token; unigram entropy {unigram:.4f}")
    middle = median(values["tokens_per_second"] for values in reporter.steps)
    model = reporter.median("model_flops_per_second_per_device")
    executed = reporter.median("executed_flops_per_second_per_device")
    if model is not None and executed is not None:
        reporter.console.print(f"each device: {_rate(model)} of the model, {_rate(executed)} executed")
    mfu, hfu = reporter.median("mfu"), reporter.median("hfu")
    share = "MFU -, HFU -"
    if mfu is not None and hfu is not None and reporter.peak is not None:
        share = f"MFU {mfu:.1%}, HFU {hfu:.1%} of the {reporter.peak.origin}"
        if (square := reporter.median("mfu_square")) is not None:
            share += f" (attention of pairs that see each other; MFU {square:.1%} with all pairs, square)"
    devices = f" ({middle / reporter.ranks:,.0f} on each of {reporter.ranks})" if reporter.ranks > 1 else ""
    reporter.console.print(f"median {middle:,.0f} tokens/s{devices}; {share}")
    names = sorted(path.name for path in folder.iterdir())
    reporter.console.print(f"run folder {folder}: {', '.join(names)}")


def _count(number: int) -> str:
    """Return a number of parameters with two or three digits and its unit."""
    for factor, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return str(number)


def _rate(flops_per_second: float) -> str:
    """Return a rate in GFLOP/s or TFLOP/s."""
    tera = flops_per_second / 1e12
    return f"{tera:,.1f} TFLOP/s" if tera >= 1 else f"{flops_per_second / 1e9:,.1f} GFLOP/s"
