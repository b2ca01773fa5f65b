"""A training run on one of its ranks: what surrounds ``fourfold.training.train``."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from fourfold.checkpoint import save_checkpoint, tokenizer_files
from fourfold.cli.prepare import prepare_with_bar
from fourfold.cli.sample import sample_text
from fourfold.data import PackedDataset, Prepared, Tokenizer, load_tokenizer
from fourfold.doctor import device_type, peak_of
from fourfold.errors import RunStopped
from fourfold.flops import model_flops
from fourfold.launch import Rank
from fourfold.mesh import Mesh
from fourfold.pictures import draw_loss, draw_throughput, unigram_entropy
from fourfold.program import Timeline, draw
from fourfold.reporting import Reporter
from fourfold.run_folder import CHECKPOINT, make_run_folder, writing
from fourfold.specs import ModelSpec, RunSpec
from fourfold.training import Report, train

if TYPE_CHECKING:
    from fourfold.parallel_model import ParallelModel


def prepared_corpus(run: RunSpec, tokenizer: Tokenizer) -> Prepared:
    """Return the token files of the run, made now with a progress bar if they are not in the cache."""
    return prepare_with_bar(run.data.source, tokenizer, run.data.held_out)


def datasets(run: RunSpec, prepared: Prepared) -> tuple[PackedDataset, PackedDataset]:
    """Return the training and the held-out dataset. Raises UserError where the corpus is too short."""
    length = run.data.sequence_length
    return (
        PackedDataset(prepared.train, sequence_length=length, seed=run.seed),
        PackedDataset(prepared.held_out, sequence_length=length, seed=run.seed),
    )


def new_folder(run: RunSpec, tokenizer: Tokenizer) -> Path:
    """Make the run folder, with the resolved run file in it."""
    return make_run_folder(Path(run.folder), run.resolved(tokenizer.vocab_size).to_toml())


def train_on_rank(rank: Rank, run: RunSpec, folder: Path | None) -> None:
    """Run the training on one of its ranks. ``folder`` is None in a joined job: rank 0 makes it then."""
    device = device_type(rank.job.local_world_size)
    rank.connect(device_type=device, agree_on=dict(flat(run.model_dump(mode="json"))))
    tokenizer = load_tokenizer(run.data.tokenizer)
    if folder is None:
        folder = rank.on_first("making the run folder", lambda: new_folder(run, tokenizer))
    rank.once_per_node("preparing the data", lambda: prepared_corpus(run, tokenizer))
    prepared = prepared_corpus(run, tokenizer)
    train_data, eval_data = datasets(run, prepared)
    model_spec = run.model.spec(tokenizer.vocab_size)
    mesh = Mesh(run.layout, device)
    peak = peak_of(mesh, run.training.dtype)
    rank.finished(0)
    flops = model_flops(model_spec, batch=run.training.batch, sequence_length=run.data.sequence_length)
    reporting: AbstractContextManager[Reporter | None] = nullcontext()
    if rank.is_first:
        assert folder is not None
        reporting = Reporter(folder, run, model_flops=flops, peak=peak)

    with reporting as reporter:

        def on_report(report: Report) -> None:
            if reporter is not None:
                reporter(report)
            rank.finished(report.step)

        if reporter is None:
            train(run, model_spec, mesh, train_data=train_data, eval_data=eval_data, on_report=on_report)
            return
        assert folder is not None
        title = f"{folder.name}: {_count(model_spec.num_parameters)} parameters on {run.layout}, {device}"
        reporter.console.print(f"{title}; in {folder}")
        reporter.console.print(f"MFU against the {peak.origin}: {_rate(peak.flops_per_second)}")
        files = tokenizer_files(tokenizer)
        unigram = unigram_entropy(prepared.train)
        try:
            model = train(
                run, model_spec, mesh, train_data=train_data, eval_data=eval_data, on_report=on_report
            )
        except RunStopped:
            # The pictures show how it came to this, but what is told is why the run stopped.
            with suppress(RunStopped):
                _draw(reporter, folder, title, unigram)
            raise
    _keep(model, run, model_spec, folder, files)
    _draw(reporter, folder, title, unigram)
    _draw_program(model, reporter, folder)
    _tell(reporter, folder, unigram)
    if run.sample.tokens:
        reporter.console.print(f"\nsample, temperature {run.sample.temperature:g}:\n")
        text = sample_text(model.model, tokenizer, run.sample, seed=run.seed)
        print(text, flush=True)


def _keep(
    model: "ParallelModel", run: RunSpec, spec: ModelSpec, folder: Path, tokenizer: Mapping[str, bytes]
) -> None:
    """Write the checkpoint of the finished run: the master weights."""
    save_checkpoint(
        folder / CHECKPOINT,
        weights=dict(model.named_masters()),
        spec=spec,
        step=run.training.steps,
        tokenizer=tokenizer,
    )


def _draw(reporter: Reporter, folder: Path, title: str, unigram: float) -> None:
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
        mfu=reporter.median_mfu(),
        origin=reporter.peak.origin if reporter.peak else "",
        title=title,
    )


def _draw_program(model: "ParallelModel", reporter: Reporter, folder: Path) -> None:
    """Write the program of a step as text, and draw the step whose actions were timed."""
    path = folder / "program.txt"
    with writing(path):
        path.write_text(draw.listing(model.program) + "\n")
    if reporter.spans is not None:
        step, spans = reporter.spans
        picture = folder / "program.png"
        with writing(picture):
            title = f"Step {step} on rank 0, measured"
            draw.picture(Timeline(spans, {}, 1), picture, title=title)


def _tell(reporter: Reporter, folder: Path, unigram: float) -> None:
    """Print what came out."""
    if reporter.evaluations:
        loss = reporter.evaluations[-1].loss
        reporter.console.print(f"held-out loss {loss:.4f} nats per token; unigram entropy {unigram:.4f}")
    middle = median(values["tokens_per_second"] for values in reporter.steps)
    mfu = reporter.median_mfu()
    share = "-" if mfu is None or reporter.peak is None else f"{mfu:.1%} of the {reporter.peak.origin}"
    reporter.console.print(f"median {middle:,.0f} tokens/s; MFU {share}")
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
