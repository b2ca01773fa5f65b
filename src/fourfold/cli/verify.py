"""``fourfold verify``: the same steps on one process and on a layout, compared."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fourfold.launch import Rank
    from fourfold.specs import Layout, ModelSpec, ShardingSection
    from fourfold.verify import Verification

DTYPES = ("float64", "float32", "bfloat16")
SHOWN = 5


@dataclass(frozen=True)
class Trial:
    """What is verified: a model on a layout, the shape of its batches, how often and in what precision."""

    model: "ModelSpec"
    layout: "Layout"
    batch: int
    microbatches: int
    sequence_length: int
    steps: int
    dtype: str
    seed: int = 0
    sharding: "ShardingSection | None" = None
    recompute: str = "none"


def verify(
    run_file: Annotated[
        Path | None, typer.Argument(metavar="[RUN.toml]", help="A run file; the data is made up.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A preset, or the path of a config.json.")] = None,
    layout: Annotated[str | None, typer.Option(help="The layout on trial, e.g. dp4.")] = None,
    batch: Annotated[
        int | None, typer.Option(help="Sequences of a step. Default: one a rank and microbatch, 3 at least.")
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(help="Pieces of a rank's share of a batch. Default: 1, or 2*pp."),
    ] = None,
    steps: Annotated[int, typer.Option(help="SGD steps to compare.")] = 3,
    dtype: Annotated[str, typer.Option(help="float64, float32 or bfloat16.")] = "float64",
    sequence: Annotated[int | None, typer.Option(help="Tokens of a sequence. Default: 64.")] = None,
    pieces: Annotated[
        str | None, typer.Option(help="What a rank of fsdp owns: auto, blocks, matrices, rows or flat.")
    ] = None,
    prefetch: Annotated[int | None, typer.Option(help="Segments gathered ahead of their use.")] = None,
    accumulate: Annotated[
        str | None, typer.Option(help="Over microbatches: pieces (small) or whole (fast).")
    ] = None,
    recompute: Annotated[
        str | None, typer.Option(help="Forwards that run again: none, full, every:2, sqrt, slots:3, min...")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check that a layout computes what one process computes: loss, gradients, norm, weights, token counts.

    Ends with status 0 if all errors are within the tolerance of the dtype, else 1.
    """
    sharding = {"pieces": pieces, "prefetch": prefetch, "accumulate": accumulate}
    given: dict[str, object] = {name: value for name, value in sharding.items() if value is not None}
    trial = _trial(run_file, model, layout, batch, microbatches, steps, dtype, sequence, given, recompute)
    report = run_trial(trial)
    if report is None:  # another rank of this job reports
        return
    from fourfold.reporting import json_text

    typer.echo(json_text(report.to_json()) if as_json else table(report))
    raise typer.Exit(0 if report.passes else 1)


def run_trial(trial: Trial) -> "Verification | None":
    """Check the trial, run it on its ranks, and return the outcome; None on ranks but the first."""
    from fourfold.doctor import device_type
    from fourfold.launch import check_local_ranks, joined_job, launch
    from fourfold.layer.schedules import schedule_of

    job = joined_job()
    trial.layout.validate(
        trial.model,
        batch=trial.batch,
        microbatches=trial.microbatches,
        sequence_length=trial.sequence_length,
        world_size=job.world_size if job else None,
    )
    schedule_of(trial.layout, microbatches=trial.microbatches, layers=trial.model.num_hidden_layers)
    if job is None:
        device_type(trial.layout.world_size)
        check_local_ranks(trial.layout.world_size)
    report: Verification | None = launch(trial.layout.world_size, verify_on_rank, (trial,))
    return report


def verify_on_rank(rank: "Rank", trial: Trial) -> "Verification":
    """Run the trial on one of its ranks."""
    from fourfold.data import SyntheticDataset
    from fourfold.doctor import device_type
    from fourfold.mesh import Mesh
    from fourfold.parallel_model import DEFAULT_SHARDING
    from fourfold.specs.recompute_name import RecomputeName
    from fourfold.verify import verify

    device = device_type(rank.job.local_world_size)
    rank.connect(device_type=device, agree_on={"what to verify": trial})
    data = SyntheticDataset(trial.model.vocab_size, trial.sequence_length, trial.seed)
    return verify(
        trial.model,
        Mesh(trial.layout, device),
        data,
        batch=trial.batch,
        microbatches=trial.microbatches,
        steps=trial.steps,
        dtype=trial.dtype,
        seed=trial.seed,
        sharding=trial.sharding or DEFAULT_SHARDING,
        recompute=RecomputeName.parse(trial.recompute),
    )


def _trial(
    run_file: Path | None,
    model: str | None,
    layout: str | None,
    batch: int | None,
    microbatches: int | None,
    steps: int,
    dtype: str,
    sequence: int | None,
    sharding: dict[str, object],
    recompute: str | None = None,
) -> Trial:
    """Return what is to be verified. Raises UserError with every problem of the options at once."""
    from fourfold.errors import UserError, choices, nearest
    from fourfold.specs import Layout, ModelSpec, RunSpec, ShardingSection
    from fourfold.specs.recompute_name import RecomputeName

    problems = []
    if (run_file is None) == (model is None):
        problems.append(
            "give a run file or --model, one of them: e.g. fourfold verify --model tiny --layout dp2"
        )
    elif model is not None and layout is None:
        problems.append("--model needs --layout: e.g. --layout dp2")
    if dtype not in DTYPES:
        problems.append(f"--dtype {dtype} does not exist.{nearest(dtype, DTYPES)} Use {choices(DTYPES)}")
    counts = {"--steps": steps, "--batch": batch, "--microbatches": microbatches, "--sequence": sequence}
    problems += [
        f"{name} {value} is too small: use 1 or more"
        for name, value in counts.items()
        if value is not None and value < 1
    ]
    try:
        ShardingSection.model_validate(sharding)
    except UserError as error:
        problems += [f"--{message}" for message in error.messages]
    try:
        RecomputeName.parse(recompute or "none")
    except UserError as error:
        problems += [f"--{message}" for message in error.messages]
    if problems:
        raise UserError(*problems)
    if run_file is not None:
        from fourfold.data.tokenizers import load_tokenizer

        run = RunSpec.load(run_file, layout=layout)
        return Trial(
            model=run.model.spec(load_tokenizer(run.data.tokenizer).vocab_size),
            layout=run.layout,
            batch=batch or run.training.batch,
            microbatches=microbatches or run.training.microbatches,
            sequence_length=sequence or run.data.sequence_length,
            steps=steps,
            dtype=dtype,
            sharding=ShardingSection.model_validate(run.resolved_sharding.model_dump() | sharding),
            seed=run.seed,
            recompute=recompute or str(run.training.recompute),
        )
    assert model is not None
    assert layout is not None
    spec = (
        ModelSpec.from_config(model) if "/" in model or model.endswith(".json") else ModelSpec.preset(model)
    )
    parsed = Layout.parse(layout)
    pieces = microbatches or (1 if parsed.pp == 1 else 2 * parsed.pp)
    share = parsed.size("dp", "fsdp") * pieces
    return Trial(
        model=spec,
        layout=parsed,
        # Of SyntheticDataset's rows every third has no label. So few rows leave some microbatches, and
        # without accumulation whole ranks, with nothing that counts: a loss averaged anywhere would show.
        batch=batch or share * math.ceil(3 / share),
        microbatches=pieces,
        sequence_length=sequence or 64,
        steps=steps,
        dtype=dtype,
        sharding=ShardingSection.model_validate(sharding),
        recompute=recompute or "none",
    )


def table(report: "Verification") -> str:
    """Return the outcome as a table, the worst parameter first."""
    lines = [f"{report.layout} against one process, {report.steps} steps of SGD in {report.dtype}", ""]
    rows = [("loss", report.loss), ("gradient norm", report.norm)]
    rows += [(f"gradient of {found.name}", found) for found in report.gradients[:SHOWN]]
    rows += [(f"weights of {found.name}", found) for found in report.weights[:SHOWN]]
    width = max(len(name) for name, _ in rows)
    lines.append(f"{'':{width}}  relative error  tolerance")
    lines += [
        f"{name:{width}}  {found.error:14.2e}  {found.tolerance:9.1e}  {'ok' if found.passes else 'WRONG'}"
        for name, found in rows
    ]
    others = len(report.gradients) - SHOWN
    if others > 0:
        lines.append(f"and gradients and weights of {others} more parameters, each closer")
    counted = "agree with the dataset" if report.tokens_agree else "DO NOT agree with the dataset"
    lines.append(f"valid tokens by rank: {', '.join(map(str, report.valid_tokens))}, {counted}")
    lines += ["", "pass" if report.passes else "FAIL"]
    return "\n".join(lines)
