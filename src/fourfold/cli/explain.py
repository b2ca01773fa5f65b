"""``fourfold explain``: what a training step would take, before anything runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fourfold.errors import UserError, choices, nearest

if TYPE_CHECKING:
    from fourfold.explain import Explanation
    from fourfold.outline import Step

_WIDTH, _LINES = 118, 24
"""Characters of a line, and lines, of the drawn program."""


def explain(
    run_file: Annotated[Path | None, typer.Argument(metavar="[RUN.toml]", help="A run file.")] = None,
    model: Annotated[str | None, typer.Option(help="A preset, or the path of a config.json.")] = None,
    sequence: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences of a step, over all ranks.")] = None,
    layout: Annotated[str | None, typer.Option(help="The layout, e.g. pp16,fsdp128,tp8.")] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(help="Pieces of a rank's share of a batch. With --model by default 1 sequence each."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of computation. With --model by default bfloat16.")
    ] = None,
    recompute: Annotated[
        str | None, typer.Option(help="Forwards that run again: none, full, every:2, budget:20...")
    ] = None,
    device: Annotated[str, typer.Option(help="Whose collectives: cuda (NCCL) or cpu (gloo).")] = "cuda",
    picture: Annotated[Path | None, typer.Option(help="Draw memory and step into this PNG or SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Predict memory, FLOPs, messages and bubble of a step, for any number of ranks. Nothing runs."""
    from fourfold.explain import explain as predict

    numbers = {"sequence": sequence, "batch": batch, "microbatches": microbatches}
    problems = [
        f"--{name} {value} is too small: use 1 or more"
        for name, value in numbers.items()
        if value is not None and value < 1
    ]
    if device not in ("cuda", "cpu"):
        problems.append(f"--device {device} does not exist: use cuda or cpu")
    if picture is not None and picture.suffix not in (".png", ".svg"):
        problems.append(f"--picture {picture}: the file's name must end in .png or .svg")
    given = {"layout": layout, "dtype": dtype, "recompute": recompute, **numbers}
    step = step_asked_for(run_file, model, given, problems)
    found = predict(step, device_type=device)
    typer.echo(json.dumps(found.to_json()) if as_json else text(found, model or str(run_file)))
    if picture is not None:
        from fourfold.explain_picture import draw

        draw(found, picture, name=model or str(run_file))


def step_asked_for(
    run_file: Path | None, model: str | None, given: dict[str, str | int | None], problems: list[str]
) -> "Step":
    """The step that the options of `explain` or `rehearse` describe. Raises `UserError` with all problems."""
    from fourfold.outline import Step
    from fourfold.specs import RunSpec

    if (run_file is None) == (model is None):
        raise UserError(
            "give a run file or --model, one of them: e.g. --model llama3-8b "
            "--sequence 8192 --batch 512 --layout fsdp64",
            *problems,
        )
    if model is not None:
        return _step_of_model(model, given, problems)
    assert run_file is not None
    keys = {
        "sequence": "data.sequence_length",
        "batch": "training.batch",
        "microbatches": "training.microbatches",
        "dtype": "training.dtype",
        "recompute": "training.recompute",
    }
    overrides = [f"{key}={given[name]}" for name, key in keys.items() if given[name] is not None]
    if problems:
        raise UserError(*problems)
    run = RunSpec.load(run_file, overrides, layout=_text(given["layout"]))
    vocabulary = None
    if not run.model.config and "vocab_size" not in run.model.overrides:
        from fourfold.data.tokenizers import load_tokenizer

        vocabulary = load_tokenizer(run.data.tokenizer).vocab_size
    run.check(vocab_size=vocabulary)
    return Step.of_run(run, run.model.spec(vocabulary))


def _step_of_model(model: str, given: dict[str, str | int | None], problems: list[str]) -> "Step":
    from fourfold.outline import ITEMSIZES, Step
    from fourfold.specs import Layout, ModelSpec
    from fourfold.specs.recompute_name import RecomputeName

    missing = [f"--{name}" for name in ("sequence", "batch", "layout") if given[name] is None]
    if missing:
        problems.append(
            f"--model needs {', '.join(missing)}: e.g. --sequence 8192 --batch 512 --layout fsdp64"
        )
    dtype = given["dtype"] or "bfloat16"
    if dtype not in ITEMSIZES:
        problems.append(
            f"--dtype {dtype} does not exist.{nearest(str(dtype), ITEMSIZES)} Use {choices(ITEMSIZES)}"
        )
    spec = parsed = None
    policy = RecomputeName("none")
    is_path = "/" in model or model.endswith(".json")
    try:
        spec = ModelSpec.from_config(model) if is_path else ModelSpec.preset(model)
    except UserError as error:
        problems += [f"--model: {message}" for message in error.messages]
    try:
        parsed = Layout.parse(_text(given["layout"]) or "dp1")
    except UserError as error:
        problems += [f"--layout: {message}" for message in error.messages]
    try:
        policy = RecomputeName.parse(_text(given["recompute"]) or "none")
    except UserError as error:
        problems += [f"--{message}" for message in error.messages]
    if problems or spec is None or parsed is None:
        raise UserError(*problems)
    batch, sequence, pieces = (given[name] for name in ("batch", "sequence", "microbatches"))
    assert isinstance(batch, int)
    assert isinstance(sequence, int)
    share = max(1, batch // parsed.size("dp", "fsdp"))
    return Step(
        spec,
        parsed,
        batch=batch,
        sequence_length=sequence,
        microbatches=int(pieces) if pieces is not None else share,
        dtype=str(dtype),
        recompute=policy,
    )


def _text(value: str | int | None) -> str | None:
    return None if value is None else str(value)


def text(found: "Explanation", name: str) -> str:
    """An explanation as tables."""
    return "\n\n".join(
        [title(found.step, name), _memory(found), _flops(found), _traffic(found), _drawn(found)]
    )


def title(step: "Step", name: str) -> str:
    """What the step is, in two lines."""
    ranks = step.layout.world_size
    return (
        f"{name}: {step.spec.num_parameters:,} parameters on {ranks:,} {'ranks' if ranks > 1 else 'rank'}, "
        f"{step.layout}\n"
        f"a step of {step.batch:,} sequences of {step.sequence_length:,} tokens: on each rank "
        f"{step.microbatches} x {step.rows}, {step.dtype}, recompute {step.recompute}, {step.optimizer}"
    )


def _memory(found: "Explanation") -> str:
    from fourfold.memory import Category

    rows = [["pipeline rank", "blocks", *(category.value for category in Category), "peak", "in flight"]]
    for rank, held in enumerate(found.memory):
        rows.append(
            [
                str(rank),
                ", ".join(found.blocks(rank)),
                *(size(held.at_peak[category]) for category in Category),
                size(held.peak),
                f"{found.in_flight[rank]:.4g}",
            ]
        )
    return (
        "what a rank holds when it holds most, in GiB; in flight: microbatches between forward and backward\n"
        + table(rows, left=2)
    )


def _flops(found: "Explanation") -> str:
    step, model, executed = found.step, found.model_flops, found.executed_flops
    tokens = step.batch * step.sequence_length
    data, inside = step.layout.size("dp", "fsdp"), step.layout.size("cp", "tp")
    each = [of_rank.executed / inside for of_rank in found.flops]
    parts = {
        "recomputed": sum(of_rank.recomputed for of_rank in found.flops) * data,
        "attention's backward again": sum(of_rank.attention_again for of_rank in found.flops) * data,
        "padding": sum(of_rank.padding for of_rank in found.flops) * data,
    }
    others = ", ".join(f"{part} {flops / model:.2%}" for part, flops in parts.items() if flops)
    return (
        f"FLOPs of a step: the model's {model:.6g} ({model / tokens / 1e9:.6g} GFLOP a token), "
        f"executed {executed:.6g}{f': {others} more' if others else ''}\n"
        f"a rank executes {min(each):.4g} to {max(each):.4g}\n"
        f"bubble {found.timeline.bubble:.1%}, if an action takes as long as its FLOPs and a message no time; "
        "MFU and HFU need a time, and none is known"
    )


def _traffic(found: "Explanation") -> str:
    totals = [sum(row.sent_bytes for row in rows) for rows in found.traffic]
    rank = totals.index(max(totals))
    rows = [["op", "axis", "calls", "messages", "sent"]]
    rows += [
        [row.op, row.axis, f"{row.calls:,}", size(row.message_bytes), size(row.sent_bytes)]
        for row in found.traffic[rank]
    ]
    where = f", on pipeline rank {rank}, where it is most" if found.step.layout.pp > 1 else ""
    return f"what a rank sends and receives in a step, in GiB{where}\n" + (
        table(rows, left=2) if len(rows) > 1 else "nothing"
    )


def _drawn(found: "Explanation") -> str:
    """The schedule, or without pipeline the program: as far as a screen holds it."""
    from fourfold.program import draw

    order = found.outline.order
    if len(order.ranks) == 1:
        what = "the program of a rank"
        lines = draw.listing(found.outline.program, width=_WIDTH - 2).splitlines()[1:]
    else:
        what = (
            f"the schedule, {order.num_segments} stages: a column is a forward's time, a backward takes two"
        )
        lines = draw.grid(order).splitlines()
    if len(lines) > _LINES or max(map(len, lines)) > _WIDTH:
        return f"{what.partition(':')[0]}, is too long for here: --picture draws it"
    return "\n".join([what, *lines])


def table(rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Columns side by side, the first ``left`` of them aligned to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            f"{cell:<{width}}" if column < left else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def size(nbytes: float) -> str:
    """Bytes in GiB, with so many digits that a small number is not 0."""
    return f"{nbytes / 2**30:.2f}" if nbytes >= 2**30 / 10 or not nbytes else f"{nbytes / 2**30:.2g}"
