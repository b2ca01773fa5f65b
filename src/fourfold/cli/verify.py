"""``fourfold verify``: the same steps on one process and on a layout, compared."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fourfold.cli.step_options import ModelName, Recompute, loaded_run
from fourfold.cli.verify_text import HEADING, line, summary, table

if TYPE_CHECKING:
    from fourfold.launch import Rank
    from fourfold.specs import ModelSpec
    from fourfold.trial import Trial
    from fourfold.verify import Verification

MICROBATCHES_OF_ALL = 4
"""Of a sweep over all layouts: as many as the longest pipeline of 8 ranks in which the small presets fit."""


RunFile = Annotated[Path | None, typer.Argument(metavar="RUN.toml", help="A run file; the data is made up.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="E.g. model.num_hidden_layers=3; may repeat."),
]
AllLayouts = Annotated[
    bool, typer.Option("--all", help="Every layout of --ranks ranks that fits, one after the other.")
]
Shrink = Annotated[
    bool, typer.Option("--shrink", help="Make the model small first, with the heads that the layout cuts.")
]
Batch = Annotated[
    int | None, typer.Option(help="Sequences of a step. Default: one a rank and microbatch, 3 at least.")
]
Microbatches = Annotated[
    int | None,
    typer.Option(help="Pieces of a rank's share of a batch. Default: 1, or 2*pp, or of a schedule's file."),
]
Pieces = Annotated[
    str | None, typer.Option(help="What a rank of fsdp owns: auto, blocks, matrices, rows or flat.")
]
Accumulate = Annotated[str | None, typer.Option(help="Over microbatches: pieces (small) or whole (fast).")]


def verify(
    run_file: RunFile = None,
    model: ModelName = None,
    overrides: Overrides = None,
    layout: Annotated[str | None, typer.Option(help="The layout on trial, e.g. dp4.")] = None,
    all_layouts: AllLayouts = False,
    ranks: Annotated[int | None, typer.Option(help="With --all: how many.")] = None,
    shrink: Shrink = False,
    batch: Batch = None,
    microbatches: Microbatches = None,
    steps: Annotated[int, typer.Option(help="SGD steps to compare.")] = 3,
    dtype: Annotated[str, typer.Option(help="float64, float32 or bfloat16.")] = "float64",
    sequence: Annotated[int | None, typer.Option(help="Tokens of a sequence. Default: 64.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights and data. Default: 0.")] = None,
    pieces: Pieces = None,
    prefetch: Annotated[int | None, typer.Option(help="Segments gathered ahead of their use.")] = None,
    accumulate: Accumulate = None,
    recompute: Recompute = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, an object for each layout.")] = False,
) -> None:
    """Check a layout against one process.

    Compared are loss, gradients, norm, weights and token counts. Ends with status 0 if all errors are within
    the tolerance of the dtype, else 1.
    """
    counts = {
        "--steps": steps,
        "--batch": batch,
        "--microbatches": microbatches,
        "--sequence": sequence,
        "--ranks": ranks,
    }
    sizes = {"batch": batch, "microbatches": microbatches, "sequence_length": sequence, "seed": seed}
    sharding = {"pieces": pieces, "prefetch": prefetch, "accumulate": accumulate}
    _check_options(
        run_file, model, layout, ranks, dtype, counts, all_layouts=all_layouts, has_batch=batch is not None
    )
    trial = make_trial(
        run_file,
        model,
        overrides or (),
        layout="dp1" if all_layouts else layout,
        sizes={name: value for name, value in sizes.items() if value is not None},
        sharding={name: value for name, value in sharding.items() if value is not None},
        recompute=recompute,
    )
    trial = replace(trial, steps=steps, dtype=dtype)
    if all_layouts:
        _sweep(trial, ranks, shrink=shrink, microbatches=microbatches, as_json=as_json)
        return
    report = run_trial(trial.shrunk() if shrink else trial)
    if report is None:  # another rank of this job reports
        return
    from fourfold.reporting import json_text

    typer.echo(json_text(report.to_json()) if as_json else table(report))
    raise typer.Exit(0 if report.passes else 1)


def run_trial(trial: "Trial") -> "Verification | None":
    """Check the trial, run it on its ranks, and return the outcome; None on ranks but the first."""
    reports = run_trials([trial], trial.layout.world_size)
    return None if reports is None else reports[0]


def run_trials(
    trials: "Sequence[Trial]", world_size: int, *, aloud: bool = False
) -> "list[Verification] | None":
    """Check trials of so many ranks, run them one after the other, and return the outcomes.

    None on ranks but the first. With ``aloud`` rank 0 prints a line for each as it ends.
    """
    from fourfold.doctor import device_type
    from fourfold.errors import UserError
    from fourfold.launch import check_local_ranks, joined_job, launch

    job = joined_job()
    problems = [
        problem for trial in trials for problem in trial.problems(world_size=job.world_size if job else None)
    ]
    if problems:
        raise UserError(*dict.fromkeys(problems))
    if job is None:
        device_type(world_size)
        check_local_ranks(world_size)
    reports: list[Verification] | None = launch(world_size, verify_on_rank, (tuple(trials), aloud))
    return reports


def verify_on_rank(rank: "Rank", trials: "Sequence[Trial]", aloud: bool) -> "list[Verification]":
    """Run the trials on one of their ranks. Those with the same steps share the oracle."""
    from fourfold.doctor import chosen_here, device_type
    from fourfold.layer.schedule_file import contents
    from fourfold.verify import oracle_of, verify_trial

    job = rank.job
    device = device_type(job.local_world_size)
    chosen = [
        chosen_here(
            replace(trial.trained or trial, layout=trial.layout),
            device,
            local_rank=job.local_rank,
            local_world_size=job.local_world_size,
        )
        for trial in trials
    ]
    what: dict[str, object] = {
        "what to verify": trials,
        "layout, with its cp": ", ".join(str(choice.layout) for choice in chosen),
        **contents(trial.layout.schedule for trial in trials),
    }
    rank.connect(device_type=device, agree_on=what)
    trials = [replace(trial, layout=choice.layout) for trial, choice in zip(trials, chosen, strict=True)]
    reports = []
    oracle, asked = None, None
    for trial, choice in zip(trials, chosen, strict=True):
        steps = (trial.spec, trial.batch, trial.steps, trial.seed, trial.sequence_length)
        if oracle is None or steps != asked:
            oracle, asked = oracle_of(trial), steps
        report = replace(verify_trial(trial, oracle, device_type=device), why_cp=choice.why)
        if aloud and rank.is_first:
            typer.echo(line(report))
            if not report.passes:
                typer.echo(f"    {report.where}\n    {trial.command()}")
        reports.append(report)
    return reports


def _sweep(
    trial: "Trial", ranks: int | None, *, shrink: bool, microbatches: int | None, as_json: bool
) -> None:
    """Run the trial on every layout, and print the table."""
    from fourfold.launch import joined_job
    from fourfold.reporting import json_text

    job = joined_job()
    world_size = ranks or (job.world_size if job else 0)
    trial = replace(trial.shrunk() if shrink else trial, microbatches=microbatches or MICROBATCHES_OF_ALL)
    trials = list(trial.on_every_layout(world_size))
    if not as_json and (job is None or job.rank == 0):
        typer.echo(
            f"{len(trials)} layouts of {world_size} ranks, {trial.steps} steps of SGD in {trial.dtype}\n"
            f"sequences of {trial.sequence_length} tokens: tp without :allreduce cuts the residual stream by "
            "tokens where it divides them\n"
        )
        typer.echo(HEADING)
    reports = run_trials(trials, world_size, aloud=not as_json)
    if reports is None:
        return
    if as_json:
        for report in reports:
            typer.echo(json_text(report.to_json()))
    else:
        typer.echo(f"\n{summary(trials, reports)}")
    raise typer.Exit(0 if all(report.passes for report in reports) else 1)


def _check_options(
    run_file: Path | None,
    model: str | None,
    layout: str | None,
    ranks: int | None,
    dtype: str,
    counts: Mapping[str, int | None],
    *,
    all_layouts: bool,
    has_batch: bool,
) -> None:
    """Raise UserError with every problem of the options that are wrong whatever the trial."""
    from fourfold.errors import UserError, choices, nearest
    from fourfold.launch import joined_job
    from fourfold.trial import DTYPES

    problems = []
    if (run_file is None) == (model is None):
        problems.append(
            "give a run file or --model, one of them: e.g. fourfold verify --model tiny --layout dp2"
        )
    elif model is not None and layout is None and not all_layouts:
        problems.append("--model needs --layout: e.g. --layout dp2, or --all --ranks 4 for every layout")
    if all_layouts and layout is not None:
        problems.append("--all goes through every layout: leave out --layout")
    if all_layouts and has_batch:
        problems.append("--all takes as many sequences as all layouts divide: leave out --batch")
    if all_layouts and ranks is None and joined_job() is None:
        problems.append("--all needs --ranks: e.g. --all --ranks 4")
    if ranks is not None and not all_layouts:
        problems.append("--ranks goes with --all; a layout says itself how many ranks it has")
    if dtype not in DTYPES:
        problems.append(f"--dtype {dtype} does not exist.{nearest(dtype, DTYPES)} Use {choices(DTYPES)}")
    problems += [
        f"{name} {value} is too small: use 1 or more"
        for name, value in counts.items()
        if value is not None and value < 1
    ]
    if problems:
        raise UserError(*problems)


def make_trial(
    run_file: Path | None,
    model: str | None,
    overrides: Sequence[str] = (),
    *,
    layout: str | None,
    sizes: Mapping[str, Any],
    sharding: Mapping[str, object],
    recompute: str | None = None,
) -> "Trial":
    """Return what is to be verified. Raises UserError with every problem at once.

    Args:
        run_file: gives what is not given here; or ``model`` does: a preset or the path of a config.json.
        model: see ``run_file``.
        overrides: ``section.key=value``; with ``model`` of its section alone.
        layout: in place of the run file's.
        sizes: fields of `Trial` by name.
        sharding: keys of the run file's section.
        recompute: in place of the run file's.
    """
    from fourfold.errors import UserError
    from fourfold.specs import Layout, ShardingSection
    from fourfold.specs.recompute_name import RecomputeName
    from fourfold.trial import Trial

    problems: list[str] = []
    try:
        cut = ShardingSection.model_validate(sharding)
    except UserError as error:
        problems += [f"--{message}" for message in error.messages]
    try:
        policy = RecomputeName.parse(recompute or "none")
    except UserError as error:
        problems += [f"--{message}" for message in error.messages]
    if problems:
        raise UserError(*problems)
    if run_file is None:
        assert model is not None
        assert layout is not None
        spec, parsed = _model(model, overrides), Layout.parse(layout)
        given = {"batch": sizes.get("batch"), "microbatches": sizes.get("microbatches")}
        trial = replace(Trial.of(spec, parsed, **given), sharding=cut, recompute=policy)
        return replace(trial, **sizes)
    from fourfold.data.tokenizers import load_tokenizer
    from fourfold.outline import Step

    run = loaded_run(run_file, overrides, layout=layout)
    spec = run.model.spec(load_tokenizer(run.data.tokenizer).vocab_size)
    trial = Trial(
        spec=spec,
        layout=run.layout,
        batch=run.training.batch,
        microbatches=run.training.microbatches,
        sequence_length=run.data.sequence_length,
        seed=run.seed,
        sharding=ShardingSection.model_validate({**run.resolved_sharding.model_dump(), **sharding}),
        recompute=policy if recompute else run.training.recompute,
        trained=Step.of_run(run, spec),
    )
    return replace(trial, **sizes)


def _model(name: str, overrides: Sequence[str]) -> "ModelSpec":
    """A preset or a config.json, with sizes put in place of its own."""
    from fourfold.errors import UserError
    from fourfold.specs import ModelSpec
    from fourfold.specs.model import is_path
    from fourfold.specs.run_file import override_
    from fourfold.specs.sections import ModelSection

    values: dict[str, dict[str, object]] = {"model": {}}
    for text in overrides:
        override_(values, text)
    if others := [key for key in values if key != "model"]:
        raise UserError(
            f"--set {others[0]}...: with --model only what the model is can be set, as model.KEY=VALUE"
        )
    section = ModelSection.model_validate({**values["model"], "config" if is_path(name) else "preset": name})
    return section.spec() if section.overrides else ModelSpec.named(name)
