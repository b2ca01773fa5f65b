"""``fourfold train``: a training run, from its run file to its run folder."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fourfold.errors import RankFailed, UserError
from fourfold.launch.rank import DEFAULT_TIMEOUT_SECONDS

if TYPE_CHECKING:
    from fourfold.data import Tokenizer
    from fourfold.specs import RunSpec


def train(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")],
    layout: Annotated[str | None, typer.Option(help="Another layout than the run file's, e.g. dp4.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="E.g. training.steps=100; may repeat."),
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="A Hugging Face folder: the model, its weights to begin with, and the tokenizer.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on in the run's folder, from its newest good checkpoint.")
    ] = False,
    max_restarts: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Start local ranks again from the newest checkpoint, when one fails."
        ),
    ] = 0,
    timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=1,
            help="End a run of which no rank moves for so long; of one rank alone only saves are watched.",
        ),
    ] = DEFAULT_TIMEOUT_SECONDS,
) -> None:
    """Train a model. Starts its own local ranks, or joins the torchrun or Slurm job that it is in."""
    from fourfold.cli.train_rank import datasets, prepared_corpus, run_folder, train_on_rank
    from fourfold.doctor import device_type
    from fourfold.launch import check_local_ranks, joined_job, launch

    # Everything that can be wrong is looked at here, before any rank starts.
    run, tokenizer = checked_run(run_file, overrides or (), layout, init)
    folder = None
    if joined_job() is None:
        device_type(run.layout.world_size)
        check_local_ranks(run.layout.world_size)
        datasets(run, prepared_corpus(run, tokenizer))
        folder = run_folder(run, tokenizer, resume=resume)
    elif max_restarts:
        raise UserError("--max-restarts is for local ranks: what started this job starts its ranks again")
    elif not resume and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        raise UserError("torchrun has started the ranks again: give --resume, so that they go on")

    def start(resume: bool) -> None:
        launch(
            run.layout.world_size,
            train_on_rank,
            (run, folder, resume, timeout),
            timeout_seconds=timeout,
        )

    run_again(start, resume=resume, max_restarts=max_restarts)


def checked_run(
    run_file: Path, overrides: Sequence[str], layout: str | None, init: str | None
) -> "tuple[RunSpec, Tokenizer]":
    """Return the run that is asked for, and its tokenizer. Raises UserError where it cannot be done."""
    from fourfold.checkpoint import check_hugging_face
    from fourfold.cli.step_options import loaded_run
    from fourfold.data import load_tokenizer
    from fourfold.launch import joined_job
    from fourfold.loggers import check_loggers
    from fourfold.outline import Step, outline

    run = loaded_run(run_file, overrides, layout, init)
    job = joined_job()
    tokenizer = load_tokenizer(run.data.tokenizer)
    run.check(vocab_size=tokenizer.vocab_size, world_size=job.world_size if job else None)
    model = run.model.spec(tokenizer.vocab_size)
    model.to_config()  # the checkpoint needs it in the end
    outline(Step.of_run(run, model))  # the schedule fits, and so does a memory budget
    check_loggers(run)
    if run.model.init is not None:
        check_hugging_face(Path(run.model.init), model, tell=lambda line: typer.echo(line, err=True))
    return run, tokenizer


def run_again(start: Callable[[bool], None], *, resume: bool, max_restarts: int) -> None:
    """Start a run, and again so many times when a rank fails; ``start`` is told whether to go on."""
    for restart in range(max_restarts + 1):
        try:
            return start(resume or restart > 0)
        except RankFailed as failed:
            if restart == max_restarts:
                raise
            typer.echo(f"error: {failed}", err=True)
            typer.echo(f"starting again, {restart + 1} of {max_restarts} times", err=True)
