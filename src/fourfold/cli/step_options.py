"""The options of commands that say what a step would take, and the step that they describe."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fourfold.errors import UserError, choices, nearest

if TYPE_CHECKING:
    from fourfold.outline import Step
    from fourfold.specs import RunSpec

RunFile = Annotated[Path | None, typer.Argument(metavar="RUN.toml", help="A run file.")]
ModelName = Annotated[str | None, typer.Option(help="A preset, or the path of a config.json.")]
SequenceLength = Annotated[int | None, typer.Option(help="Tokens of a sequence.")]
Batch = Annotated[int | None, typer.Option(help="Sequences of a step, over all ranks.")]
LayoutText = Annotated[str | None, typer.Option(help="The layout, e.g. pp16,fsdp128,tp8.")]
Microbatches = Annotated[
    int | None,
    typer.Option(
        help="Pieces of a rank's share of a batch. With --model by default 1 sequence each, or those of a "
        "schedule's file."
    ),
]
Dtype = Annotated[str | None, typer.Option(help="Of computation. With --model by default bfloat16.")]
Recompute = Annotated[
    str | None, typer.Option(help="Forwards that run again: none, full, every:2, budget:20...")
]


@dataclass(frozen=True)
class Given:
    """The options as they were given, in place of a run file's keys; None where one was not."""

    sequence: int | None
    batch: int | None
    layout: str | None
    microbatches: int | None
    dtype: str | None
    recompute: str | None


def step_asked_for(
    run_file: Path | None,
    model: str | None,
    given: Given,
    *,
    device: str,
    others: Sequence[str] = (),
) -> "Step":
    """Return the step that the options describe. Raises `UserError` with all problems, and the ``others``."""
    from fourfold.outline import Step

    numbers = {"sequence": given.sequence, "batch": given.batch, "microbatches": given.microbatches}
    problems = [
        f"--{name} {value} is too small: use 1 or more"
        for name, value in numbers.items()
        if value is not None and value < 1
    ]
    if device not in ("cuda", "cpu"):
        problems.append(f"--device {device} does not exist: use cuda or cpu")
    problems += others
    if (run_file is None) == (model is None):
        raise UserError(
            "give a run file or --model, one of them: e.g. --model llama3-8b "
            "--sequence 8192 --batch 512 --layout fsdp64",
            *problems,
        )
    if model is not None:
        return _step_of_model(model, given, problems)
    assert run_file is not None
    values = {
        "data.sequence_length": given.sequence,
        "training.batch": given.batch,
        "training.microbatches": given.microbatches,
        "training.dtype": given.dtype,
        "training.recompute": given.recompute,
    }
    overrides = [f"{key}={value}" for key, value in values.items() if value is not None]
    if problems:
        raise UserError(*problems)
    run = loaded_run(run_file, overrides, layout=given.layout)
    vocabulary = None
    if not run.model.config and "vocab_size" not in run.model.overrides:
        from fourfold.data.tokenizers import load_tokenizer

        vocabulary = load_tokenizer(run.data.tokenizer).vocab_size
    run.check(vocab_size=vocabulary)
    return Step.of_run(run, run.model.spec(vocabulary))


def loaded_run(
    run_file: Path, overrides: Sequence[str] = (), layout: str | None = None, init: str | None = None
) -> "RunSpec":
    """Read a run file as `RunSpec.load` does; what nobody gave, a schedule's file says: microbatches."""
    from fourfold.layer.schedules import microbatches_of
    from fourfold.specs import RunSpec

    run = RunSpec.load(run_file, overrides, layout, init)
    if "microbatches" in run.training.model_fields_set:
        return run
    count = microbatches_of(run.layout, otherwise=run.training.microbatches)
    return run.model_copy(update={"training": run.training.model_copy(update={"microbatches": count})})


def _step_of_model(model: str, given: Given, problems: list[str]) -> "Step":
    from fourfold.layer.schedules import microbatches_of
    from fourfold.outline import ITEMSIZES, Step
    from fourfold.specs import Layout, ModelSpec
    from fourfold.specs.recompute_name import RecomputeName

    missing = [f"--{name}" for name in ("sequence", "batch", "layout") if getattr(given, name) is None]
    if missing:
        problems.append(
            f"--model needs {', '.join(missing)}: e.g. --sequence 8192 --batch 512 --layout fsdp64"
        )
    dtype = given.dtype or "bfloat16"
    if dtype not in ITEMSIZES:
        problems.append(
            f"--dtype {dtype} does not exist.{nearest(dtype, ITEMSIZES)} Use {choices(ITEMSIZES)}"
        )
    spec = parsed = None
    policy = RecomputeName("none")
    try:
        spec = ModelSpec.named(model)
    except UserError as error:
        problems += [f"--model: {message}" for message in error.messages]
    try:
        parsed = Layout.parse(given.layout or "dp1")
    except UserError as error:
        problems += [f"--layout: {message}" for message in error.messages]
    try:
        policy = RecomputeName.parse(given.recompute or "none")
    except UserError as error:
        problems += [f"--{message}" for message in error.messages]
    if problems or spec is None or parsed is None:
        raise UserError(*problems)
    assert given.batch is not None
    assert given.sequence is not None
    one_sequence_each = max(1, given.batch // parsed.size("dp", "fsdp"))
    return Step(
        spec,
        parsed,
        batch=given.batch,
        sequence_length=given.sequence,
        microbatches=given.microbatches or microbatches_of(parsed, otherwise=one_sequence_each),
        dtype=dtype,
        recompute=policy,
    )
