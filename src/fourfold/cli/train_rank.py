"""A training run on one of its ranks: what surrounds ``fourfold.training.train``."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from platform import python_version
from statistics import median

from fourfold import stop
from fourfold.channel.tensor_parallel import TensorParallel
from fourfold.checkpoint import about_files, check_hugging_face
from fourfold.cli.checkpoints import Checkpoints, what_must_stay
from fourfold.cli.prepare import prepare_with_bar
from fourfold.cli.sample import sample_text
from fourfold.data import PYTHON_STDLIB, PackedDataset, Prepared, Tokenizer, load_tokenizer
from fourfold.doctor import device_type, peak_of
from fourfold.errors import RunPaused, RunStopped
from fourfold.explain import explain
from fourfold.gauges import Gauges, RunFlops, summary, time_lines, traffic, traffic_lines
from fourfold.launch import Rank
from fourfold.measured import measured_timeline
from fourfold.mesh import Mesh
from fourfold.outline import Step
from fourfold.parallel_model import ParallelModel
from fourfold.pictures import draw_loss, draw_throughput, draw_time, unigram_entropy
from fourfold.place import HERE
from fourfold.program import Timeline, draw
from fourfold.program.trace import write_trace
from fourfold.reporting import Reporter
from fourfold.run_folder import RUN_FILE, holding, make_run_folder, resumed_run_folder, writing
from fourfold.specs import ModelSpec, RunSpec
from fourfold.traffic import Event
from fourfold.training import Report, StepReport, Trainer, train


def prepared_corpus(run: RunSpec, tokenizer: Tokenizer) -> Prepared:
    """Return the token files of the run, made now with a progress bar if they are not in the cache."""
    return prepare_with_bar(run.data, tokenizer)


def datasets(run: RunSpec, prepared: Prepared) -> tuple[PackedDataset, PackedDataset]:
    """Return the training and the held-out dataset. Raises UserError where the corpus is too short."""
    length = run.data.sequence_length
    return (
        PackedDataset(prepared.train, sequence_length=length, seed=run.seed),
        PackedDataset(prepared.held_out, sequence_length=length, seed=run.seed),
    )


def run_folder(run: RunSpec, tokenizer: Tokenizer, *, resume: bool) -> Path:
    """Make the run folder, or take the one that is there to go on in it; with the resolved run file in it."""
    make = resumed_run_folder if resume else make_run_folder
    return make(Path(run.folder), run.resolved(tokenizer.vocab_size).to_toml())


def train_on_rank(
    rank: Rank, run: RunSpec, folder: Path | None, resume: bool, timeout_seconds: float
) -> None:
    """Run the training on one of its ranks. ``folder`` is None in a joined job: rank 0 makes it then."""
    device = device_type(rank.job.local_world_size)
    tokenizer = load_tokenizer(run.data.tokenizer)
    model_spec = run.model.spec(tokenizer.vocab_size)
    what = what_is_run(run, model_spec, tokenizer)
    rank.connect(device_type=device, agree_on=what, timeout_seconds=timeout_seconds)
    rank.once_per_node("preparing the data", lambda: prepared_corpus(run, tokenizer))
    prepared = prepared_corpus(run, tokenizer)
    rank.agree("the corpus", contents(prepared))
    train_data, eval_data = datasets(run, prepared)
    if folder is None:
        folder = rank.on_first("making the run folder", lambda: run_folder(run, tokenizer, resume=resume))
    run_file = run.resolved(tokenizer.vocab_size).to_toml()
    run, note = with_distinct_evaluation(run, eval_data)
    HERE.begin("while the model is made")
    mesh = Mesh(run.layout, device)
    peak = peak_of(mesh, run.training.dtype)
    gauges = Gauges()
    reporting: AbstractContextManager[Reporter | None] = nullcontext()
    alone: AbstractContextManager[None] = nullcontext()
    unigram = math.nan
    title = (
        f"{Path(run.folder).name}: {_count(model_spec.num_parameters)} parameters on {run.layout}, {device}"
    )
    if rank.is_first:
        assert folder is not None
        alone = holding(folder)
        reporting = Reporter(folder, run, peak=peak, ranks=mesh.world_size)
        unigram = unigram_entropy(prepared.train)
    with alone, reporting as reporter:
        if reporter is not None:
            reporter.console.print(f"{title}; in {folder}")
            reporter.console.print(f"MFU against the {peak.origin}: {_rate(peak.flops_per_second)}")
            if note:
                reporter.console.print(note)
            if run.model.init is not None and not resume:
                reporter.console.print(f"the weights to begin with are those in {run.model.init}")

        def draw_curves() -> None:
            assert reporter is not None
            assert folder is not None
            _draw_curves(reporter, folder, title, unigram)

        def on_report(report: Report) -> None:
            if isinstance(report, StepReport):
                gauges.add(report)
            if reporter is not None:
                reporter(report)

        def on_start(model: ParallelModel) -> None:
            if reporter is not None:
                documents = partial(train_data.documents, batch=run.training.batch)
                keeps = run.training.recompute.not_again(tp=mesh.tp.size)
                reporter.flops = RunFlops(model, documents, keeps=keeps)
            if reporter is not None and len(model.stages.blocks) > 1:
                reporter.console.print(_stages(model))
            if reporter is not None and model.tensor_parallel is not None:
                reporter.console.print(_stream(model.tensor_parallel))

        def tell(line: str) -> None:
            if reporter is not None:
                reporter.console.print(line)

        checkpoints = Checkpoints(
            run,
            folder,
            mesh,
            must_stay=what_must_stay({**what, **contents(prepared)}),
            files=about_files(model_spec, tokenizer),
            resume=resume,
            tell=tell,
            progress=lambda *how_far: None if reporter is None else reporter.wait(*how_far),
        )

        def go_on(trainer: Trainer) -> int:
            start = checkpoints.resume_(trainer)
            if resume and reporter is not None:
                assert folder is not None
                with writing(folder / RUN_FILE):
                    (folder / RUN_FILE).write_text(run_file)
                reporter.go_on(start)
            return start

        def on_step(trainer: Trainer, step: int) -> None:
            is_asked = trainer.is_asked_to_end and step < run.training.steps
            checkpoints.after_step(trainer, step, is_asked=is_asked)
            if is_asked:
                raise RunPaused(_paused(step, checkpoints.folder, run))

        try:
            with stop.listening():
                model = train(
                    run,
                    model_spec,
                    mesh,
                    train_data=train_data,
                    eval_data=eval_data,
                    on_report=on_report,
                    on_start=on_start,
                    resume=go_on,
                    on_step=on_step,
                    on_skip=tell,
                    on_stop=checkpoints.settle,
                )
        except RunPaused:
            raise
        except RunStopped:
            # The pictures show how it came to this, but what is told is why the run stopped. The other ranks
            # wait for them: when one ends, a launcher ends all.
            with suppress(RunStopped):
                rank.on_first("drawing how the run went", draw_curves)
            raise
    if checkpoints.start >= run.training.steps:
        if reporter is not None:
            reporter.console.print("nothing is left to do: give a larger training.steps to go on")
        return
    timeline = measured_timeline(model.executor.trace, mesh.pp)
    by_rank = gauges.of_all_ranks(model)
    text = _sample(run, model, tokenizer)
    if reporter is not None:
        assert folder is not None
        draw_curves()
        _draw_program(model, timeline, folder, step=run.training.steps)
        assert gauges.last is not None
        predicted = _predicted(run, model_spec, train_data, device)
        _tell_gauges(reporter, folder, by_rank, gauges.last, predicted, title)
        _tell(reporter, folder, unigram)
        if text:
            reporter.console.print(f"\nsample, temperature {run.sample.temperature:g}:\n")
            print(text, flush=True)


def _paused(step: int, folder: Path, run: RunSpec) -> str:
    """Say that the run was asked to end, and how it goes on."""
    place = "" if folder == Path(run.folder) else f" and --set folder={folder}"
    return (
        f"asked to end, saved after step {step} of {run.training.steps} in {folder}: to go on give the same "
        f"command with --resume{place}"
    )


def _sample(run: RunSpec, model: ParallelModel, tokenizer: Tokenizer) -> str:
    """Return the sample, the same on all ranks of the first pipeline; empty on the others."""
    if not run.sample.tokens:
        return ""
    model.gather_()
    if model.mesh.data.rank:
        return ""
    return sample_text(model.model, tokenizer, run.sample, seed=run.seed, last_logits=model.last_logits)


def _stages(model: ParallelModel) -> str:
    """Say which segments each pipeline stage has, and where it is."""
    place = model.program.rank_of_segment
    lines = []
    first = 0
    for number, names in enumerate(model.stages.blocks):
        held = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        lines.append(f"stage {number} on pipeline rank {place[first]}: {held}")
        first += len(names)
    return "\n".join(lines)


def _stream(parallel: TensorParallel) -> str:
    """Say how tensor parallelism keeps the residual stream."""
    if parallel.sequence_parallel:
        return f"tp={parallel.axis.size}: the residual stream is cut by tokens (sequence parallelism)"
    return f"tp={parallel.axis.size}: every rank has the whole residual stream"


def what_is_run(run: RunSpec, model_spec: ModelSpec, tokenizer: Tokenizer) -> dict[str, object]:
    """Return what must be the same on all ranks: content, for paths may differ from machine to machine."""
    values = dict(flat(run.model_dump(mode="json", exclude={"model", "folder"})))
    del values["data.source"], values["data.tokenizer"]
    values |= {f"model.{name}": value for name, value in model_spec.model_dump(mode="json").items()}
    values["the content of data.tokenizer"] = tokenizer.fingerprint
    if run.model.init is not None:
        values["what lies where in model.init"] = check_hugging_face(Path(run.model.init), model_spec)
    if run.layout.schedule.is_file:
        values["the content of the schedule in layout"] = Path(run.layout.schedule.name).read_text()
    if PYTHON_STDLIB in run.data.source:
        values["version of Python, whose standard library is data.source"] = python_version()
    return values


def contents(prepared: Prepared) -> dict[str, object]:
    """Return what tells one corpus from another, by the part that differs."""
    return {
        f"the {part} part of the corpus": f"{tokens.num_tokens} tokens in {tokens.num_documents} documents "
        f"with hash {tokens.fingerprint()}"
        for part, tokens in (("training", prepared.train), ("held-out", prepared.held_out))
    }


def with_distinct_evaluation(run: RunSpec, eval_data: PackedDataset) -> tuple[RunSpec, str]:
    """Return the run with no more evaluation batches than there are held-out sequences, and a line on it."""
    asked, batch, there = run.evaluation.batches, run.training.batch, eval_data.num_sequences
    batches = min(asked, max(there // batch, 1))
    if asked * batch <= there:
        return run, ""
    repeats = ", with some of them repeated" if batch > there else ""
    note = (
        f"evaluation: {batches} of evaluation.batches={asked}, since {there} held-out sequences make no more "
        f"batches of {batch}{repeats}"
    )
    fewer = run.evaluation.model_copy(update={"batches": batches})
    return run.model_copy(update={"evaluation": fewer}), note


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
        path.write_text(f"{_stages(model)}\n{_units(model)}\n\n{draw.listing(model.program)}\n")
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
    rows = data.documents(run.training.steps - 1, step.batch)
    size = step.batch // step.microbatches
    documents = [rows[m * size : m * size + step.rows] for m in range(step.microbatches)]
    return explain(step, device_type=device).events(0, shard=0, documents=documents)


def _tell_gauges(
    reporter: Reporter,
    folder: Path,
    by_rank: Sequence[Mapping[str, float]],
    last: StepReport,
    predicted: Sequence[Event],
    title: str,
) -> None:
    """Print, draw and keep where the time went and what was sent."""
    rows = traffic(last, predicted)
    if by_rank:
        reporter.console.print("\n".join(time_lines(by_rank)))
        draw_time(folder / "time.png", by_rank, title=title)
    if rows:
        reporter.console.print("\n".join(traffic_lines(rows)))
    reporter.note({"step": last.step, **summary(by_rank, rows)})


def _tell(reporter: Reporter, folder: Path, unigram: float) -> None:
    """Print what came out."""
    if reporter.evaluations:
        loss = reporter.evaluations[-1].loss
        reporter.console.print(f"held-out loss {loss:.4f} nats per token; unigram entropy {unigram:.4f}")
    middle = median(values["tokens_per_second"] for values in reporter.steps)
    mfu, hfu = reporter.median("mfu"), reporter.median("hfu")
    share = "MFU -, HFU -"
    if mfu is not None and hfu is not None and reporter.peak is not None:
        share = f"MFU {mfu:.1%}, HFU {hfu:.1%} of the {reporter.peak.origin}"
    devices = f" ({middle / reporter.ranks:,.0f} on each of {reporter.ranks})" if reporter.ranks > 1 else ""
    reporter.console.print(f"median {middle:,.0f} tokens/s{devices}; {share}")
    names = sorted(path.name for path in folder.iterdir())
    reporter.console.print(f"run folder {folder}: {', '.join(names)}")


def flat(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield every value of nested mappings with its dotted name."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


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
