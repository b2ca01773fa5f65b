"""A training run on one of its ranks: what surrounds ``fourfold.training.train``."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from platform import python_version

from fourfold import stop
from fourfold.checkpoint import about_files, check_hugging_face
from fourfold.cli.checkpoints import Checkpoints, shared_folder, what_must_stay
from fourfold.cli.prepare import prepare_with_bar
from fourfold.cli.sample import sample_text
from fourfold.cli.telling import Telling, telling
from fourfold.data import PYTHON_STDLIB, PackedDataset, Prepared, Tokenizer, load_tokenizer
from fourfold.doctor import chosen_here, device_type
from fourfold.errors import RankFailed, RunPaused, RunStopped
from fourfold.launch import Rank
from fourfold.layer import schedule_file
from fourfold.mesh import Mesh
from fourfold.outline import Step
from fourfold.parallel_model import ParallelModel
from fourfold.place import HERE
from fourfold.run_folder import make_run_folder, resumed_run_folder
from fourfold.specs import ModelSpec, RunSpec
from fourfold.training import Trainer, train


def prepared_corpus(run: RunSpec, tokenizer: Tokenizer) -> Prepared:
    """Return the token files of the run, made now with a progress bar if they are not in the cache."""
    return prepare_with_bar(run.data, tokenizer)


def shared_corpus(rank: Rank, run: RunSpec, tokenizer: Tokenizer) -> Prepared:
    """Return the token files, made once on every node. Raises UserError where those of two nodes differ."""
    rank.once_per_node("preparing the data", lambda: prepared_corpus(run, tokenizer))
    prepared = prepared_corpus(run, tokenizer)
    rank.agree("the corpus", contents(prepared))
    return prepared


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
    return make(Path(run.folder), run.resolved(tokenizer.vocab_size))


def train_on_rank(
    rank: Rank, run: RunSpec, folder: Path | None, resume: bool, timeout_seconds: float
) -> None:
    """Run the training on one of its ranks. ``folder`` is None in a joined job: rank 0 makes it then."""
    device = device_type(rank.job.local_world_size)
    tokenizer = load_tokenizer(run.data.tokenizer)
    model_spec = run.model.spec(tokenizer.vocab_size)
    job = rank.job
    choice = chosen_here(
        Step.of_run(run, model_spec), device, local_rank=job.local_rank, local_world_size=job.local_world_size
    )
    asked, run = run, run.model_copy(update={"layout": choice.layout})  # the run's folder says what was asked
    what = what_is_run(run, model_spec, tokenizer)
    rank.connect(device_type=device, agree_on=what, timeout_seconds=timeout_seconds)
    prepared = shared_corpus(rank, run, tokenizer)
    train_data, eval_data = datasets(run, prepared)
    if folder is None:
        folder = rank.on_first("making the run folder", lambda: run_folder(asked, tokenizer, resume=resume))
    run, note = with_distinct_evaluation(run, eval_data)
    HERE.begin("while the model is made")
    mesh = Mesh(run.layout, device)
    folder = shared_folder(folder, mesh)
    with telling(rank, run, folder, mesh, prepared) as told:
        told.begin(model_spec, (choice.why, note), resume=resume)
        checkpoints = Checkpoints(
            run,
            folder,
            mesh,
            must_stay=what_must_stay({**what, **contents(prepared)}),
            files=about_files(model_spec, tokenizer),
            resume=resume,
            tell=told.line,
            progress=told.wait,
            timeout_seconds=timeout_seconds,
        )

        def go_on(trainer: Trainer) -> int:
            start = checkpoints.resume_(trainer)
            if resume:
                told.go_on(start, asked.resolved(tokenizer.vocab_size))
            return start

        with drawn_where_it_stops(rank, told), stop.listening():
            model = train(
                run,
                model_spec,
                mesh,
                train_data=train_data,
                eval_data=eval_data,
                on_report=told.report,
                on_init=partial(told.wait, "reading the first weights"),
                on_start=partial(told.started, data=train_data),
                resume=go_on,
                on_step=checkpoints.after_step,
                on_skip=told.line,
                on_stop=checkpoints.settle,
            )
    if checkpoints.start >= run.training.steps:
        told.line("nothing is left to do: give a larger training.steps to go on")
        return
    told.end(model, model_spec, train_data, lambda: _sample(run, model, tokenizer))


@contextmanager
def drawn_where_it_stops(rank: Rank, told: Telling) -> Iterator[None]:
    """Draw the pictures of a run that stops, too: they show how it came to this."""
    try:
        yield
    except (RunPaused, RankFailed):
        raise  # what hung while a checkpoint was written would hang again
    except RunStopped:
        # What is told is why the run stopped. The other ranks wait: when one ends, a launcher ends all.
        with suppress(RunStopped):
            rank.on_first("drawing how the run went", told.draw_curves)
        raise


def _sample(run: RunSpec, model: ParallelModel, tokenizer: Tokenizer) -> str:
    """Return the sample, the same on all ranks of the first pipeline; empty on the others."""
    if not run.sample.tokens:
        return ""
    model.gather_()
    if model.mesh.data.rank:
        return ""
    return sample_text(model.model, tokenizer, run.sample, seed=run.seed, last_logits=model.last_logits)


def what_is_run(run: RunSpec, model_spec: ModelSpec, tokenizer: Tokenizer) -> dict[str, object]:
    """Return what must be the same on all ranks: content, for paths may differ from machine to machine."""
    values = dict(flat(run.model_dump(mode="json", exclude={"model", "folder"})))
    del values["data.source"], values["data.tokenizer"]
    values |= {f"model.{name}": value for name, value in model_spec.model_dump(mode="json").items()}
    values["the content of data.tokenizer"] = tokenizer.fingerprint
    if run.model.init is not None:
        values["what lies where in model.init"] = check_hugging_face(Path(run.model.init), model_spec)
    values |= schedule_file.contents([run.layout.schedule])
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


def flat(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield every value of nested mappings with its dotted name."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
