"""``fourfold plan``: which layout, how fast, does it fit, before a device is rented."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fourfold.cli.output_file import output_option
from fourfold.cli.tables import table
from fourfold.errors import UserError, choices

if TYPE_CHECKING:
    from fourfold.planner.plans import Found, Plan, Question


def plan(
    model: Annotated[str, typer.Option(help="A preset, or the path of a config.json.")],
    gpus: Annotated[str, typer.Option(help="How many of which device, e.g. 64xH100-80GB.")],
    sequence: Annotated[int, typer.Option(help="Tokens of a sequence.")],
    batch: Annotated[int, typer.Option(help="Sequences of a step, over all devices.")],
    nodes_of: Annotated[int | None, typer.Option(help="Devices of a node; by default as usual.")] = None,
    network: Annotated[
        float | None, typer.Option(help="GB/s between nodes for each device; by default as usual.")
    ] = None,
    calibration: Annotated[Path | None, typer.Option(help="What fourfold bench measured.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of computation; by default the quickest that the device has.")
    ] = None,
    tokens: Annotated[
        float | None, typer.Option(help="Tokens to train on: days and GPU-hours, e.g. 15e12.")
    ] = None,
    days: Annotated[
        float | None, typer.Option(help="With --tokens: the fewest devices that are done by then.")
    ] = None,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="What one more knob would give: float8, memory, network.")
    ] = False,
    limits: Annotated[
        bool, typer.Option("--limits", help="The longest sequence and the deepest model that fit.")
    ] = False,
    top: Annotated[int, typer.Option(help="How many plans are shown.")] = 5,
    out: Annotated[Path | None, output_option("Write the first plan as a run file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find the fastest layouts on a cluster.

    By prediction: nothing runs.
    """
    from fourfold.planner.search import Search

    problems = _out_of_range({"top": top, "tokens": tokens, "days": days})
    if days is not None and tokens is None:
        problems.append("--days needs --tokens: how many tokens are to be done by then, e.g. --tokens 1e12")
    asked = question(
        model,
        gpus,
        sequence,
        batch,
        nodes_of=nodes_of,
        network=network,
        calibration=calibration,
        dtype=dtype,
        others=problems,
    )
    found = Search(asked).run()
    answers = _answers(found, asked, tokens=tokens, days=days, what_if=what_if, limits=limits)
    if as_json:
        typer.echo(json.dumps(_json(found, asked, model, top) | {"answers": answers}))
    else:
        typer.echo("\n".join([text(found, asked, model, top), *answers.values()]))
    if out is not None:
        from fourfold.planner.report import run_of
        from fourfold.run_folder import writing

        with writing(out):
            out.write_text(run_of(found.plans[0], model).to_toml(), encoding="utf-8")
        typer.echo(f"wrote {out}: its steps, learning rate and data are yours to set", err=as_json)


def question(
    model: str,
    gpus: str,
    sequence: int,
    batch: int,
    *,
    nodes_of: int | None,
    network: float | None,
    calibration: Path | None,
    dtype: str | None,
    others: Sequence[str] = (),
) -> "Question":
    """What is asked, from the options. Raises `UserError` with every problem at once, and the ``others``."""
    from fourfold.outline import ITEMSIZES
    from fourfold.planner.catalogue import dtypes_of, machine
    from fourfold.planner.plans import Question
    from fourfold.specs import ModelSpec

    numbers = {"sequence": sequence, "batch": batch, "nodes-of": nodes_of, "network": network}
    problems = [*_out_of_range(numbers), *others]
    if dtype is not None and dtype not in ITEMSIZES:
        problems.append(f"--dtype {dtype} does not exist: use {choices(ITEMSIZES)}")
    spec = devices = None
    try:
        spec = ModelSpec.named(model)
    except UserError as error:
        problems += [f"--model: {message}" for message in error.messages]
    match = re.fullmatch(r"(\d+)x(.+)", gpus)
    if match is None or int(match[1]) < 1:
        problems.append(f"--gpus {gpus} is not how many of which device: write e.g. 64xH100-80GB")
    else:
        try:
            devices = machine(
                match[2],
                nodes_of=nodes_of,
                network_bytes_per_second=None if network is None else network * 1e9,
            )
        except UserError as error:
            problems += [f"--gpus: {message}" for message in error.messages]
        else:
            has = dtypes_of(match[2])
            if dtype == "bfloat16" and dtype not in has:
                problems.append(f"--dtype {dtype}: {devices.name} has no units for it: use --dtype {has[0]}")
            dtype = dtype or has[0]
    if problems or spec is None or devices is None or match is None or dtype is None:
        raise UserError(*problems)
    if calibration is not None:
        devices = devices.calibrated(calibration)
    return Question(spec, devices, int(match[1]), sequence, batch, dtype)


def _out_of_range(numbers: Mapping[str, float | None]) -> list[str]:
    """A message for each option that is given and is no number above 0."""
    found = []
    for name, value in numbers.items():
        if value is not None and not 0 < value < inf:
            what = "is too small" if value <= 0 else "is not finite"
            found.append(f"--{name} {value:g} {what}: use more than 0")
    return found


def text(found: "Found", asked: "Question", model: str, top: int) -> str:
    """What was found, for people."""
    from fourfold.planner.plans import TIE
    from fourfold.planner.report import ERROR, difference

    best = found.plans[0]
    tokens = asked.batch * asked.sequence_length
    lines = [
        f"{model}: {asked.spec.num_parameters:,} parameters on {asked.ranks:,} x {asked.machine.name}, "
        f"{tokens:,} tokens a step ({asked.batch:,} x {asked.sequence_length:,}), {asked.dtype}",
        f"times by {asked.machine.source}: a step is right within {ERROR:.0%} on average",
        "",
        table(_rows(found.plans[:top], asked), left=3),
        "",
    ]
    ties = [plan for plan in found.plans[1:top] if plan.time.total <= best.time.total * (1 + TIE)]
    if ties:
        lines.append(
            f"{len(ties)} of those below are within {TIE:.0%} of the first, which a prediction cannot tell "
            "apart: the first is the simplest"
        )
    lines += [f"{_named(plan)}: {difference(plan, best)}" for plan in found.plans[1:top]]
    beside = {"by hand": found.by_hand, "best without a pipeline": found.without_pipeline}
    for name, other in beside.items():
        lines.append(
            f"{name}: none is possible"
            if other is None
            else f"{name}: {_named(other)}: {difference(other, best)}"
        )
    lines += ["", _memory(best, asked), "", _counts(found)]
    return "\n".join(lines)


def _named(plan: "Plan") -> str:
    return f"{plan.layout}, {plan.step.microbatches} x {plan.step.rows}, recompute {plan.step.recompute}"


def _rows(plans: list["Plan"], asked: "Question") -> list[list[str]]:
    from fourfold.planner.report import ERROR, parts, utilization

    rows = [
        [
            "layout",
            "microbatches",
            "recompute",
            "step s",
            "tokens/s/GPU",
            "MFU",
            "HFU",
            "GB",
            "where the time goes",
        ]
    ]
    for plan in plans:
        used, seconds = utilization(plan, asked), plan.time.total
        shares = sorted(parts(plan.time).items(), key=lambda one: -one[1])
        rows.append(
            [
                str(plan.layout),
                f"{plan.step.microbatches} x {plan.step.rows}",
                str(plan.step.recompute),
                f"{seconds * (1 - ERROR):.3g} to {seconds * (1 + ERROR):.3g}",
                f"{plan.tokens_per_second:,.0f}",
                f"{used['mfu']:.1%}",
                f"{used['hfu']:.1%}",
                f"{plan.memory.reserved / 1e9:.1f}",
                ", ".join(f"{name} {share:.0%}" for name, share in shares[:4] if share >= 0.005),
            ]
        )
    return rows


def _memory(best: "Plan", asked: "Question") -> str:
    held = best.memory
    named = {category.name: getattr(held, category.name) for category in fields(held)}
    parts = [f"{name} {nbytes / 1e9:.1f}" for name, nbytes in named.items() if nbytes >= 5e7]
    where = f" on pipeline rank {best.worst_rank}, where it is most" if best.step.layout.pp > 1 else ""
    return (
        f"memory of the first in GB{where}: {', '.join(parts) or 'below 0.05 each'}; "
        f"{held.reserved / 1e9:.1f} reserved of "
        f"{asked.machine.memory_bytes / 1e9:.1f}"
    )


def _counts(found: "Found") -> str:
    dropped = ", ".join(f"{count:,} {why}" for why, count in found.dropped.most_common() if count)
    return f"{found.tried:,} layouts looked at; dropped: {dropped or 'none'}"


def _answers(
    found: "Found",
    asked: "Question",
    *,
    tokens: float | None,
    days: float | None,
    what_if: bool,
    limits: bool,
) -> dict[str, str]:
    """What was asked beside the best layout, a sentence each."""
    from fourfold.planner import questions
    from fourfold.planner.search import Search

    answers = {}
    best = found.plans[0]
    if tokens is not None:
        spent = questions.cost(best, tokens)
        answers["tokens"] = (
            f"{tokens:.4g} tokens: {spent.steps:,} steps, {spent.days:,.1f} days, "
            f"{spent.device_hours:,.0f} GPU-hours"
        )
    if tokens is not None and days is not None:
        enough = questions.fewest_devices(asked, tokens, days)
        answers["days"] = (
            f"no number of devices that this batch can be cut for is done in {days:g} days"
            if enough is None
            else f"done in {days:g} days, of the numbers that double a node's: "
            f"{enough.plan.step.layout.world_size:,} devices ({enough.plan.layout}, {enough.days:,.1f} days)"
        )
    if what_if:
        for name, other in questions.knobs(asked):
            try:
                plan = Search(other).run().quickest
            except UserError:
                answers[name] = f"with {name}: no layout fits"
                continue
            gain = found.quickest.time.total / plan.time.total - 1
            answers[name] = f"with {name}: {gain:+.1%} tokens a second ({plan.layout})"
    if limits:
        longest, deepest = questions.longest_sequence(asked), questions.deepest_model(asked)
        ended = "no longer one is looked at: " if longest == questions.end_of_lengths(asked) else ""
        answers["longest"] = (
            f"the longest sequence that fits: {longest:,} tokens "
            f"({ended}powers of two, {asked.batch * asked.sequence_length:,} tokens a step)"
        )
        beyond = deepest == questions.DEEPEST * asked.spec.num_hidden_layers
        answers["deepest"] = f"the most layers of this width that fit: {deepest:,}" + (
            " (no deeper one is looked at)" if beyond else ""
        )
    return answers


def _json(found: "Found", asked: "Question", model: str, top: int) -> dict[str, object]:
    from fourfold.planner.report import to_json

    return {
        "model": model,
        "parameters": asked.spec.num_parameters,
        "device": asked.machine.name,
        "devices": asked.ranks,
        "source": asked.machine.source,
        "peak_flops": asked.machine.peak_flops[asked.dtype],
        "sequence_length": asked.sequence_length,
        "batch": asked.batch,
        "plans": [to_json(plan, asked) for plan in found.plans[:top]],
        "without_pipeline": found.without_pipeline and to_json(found.without_pipeline, asked),
        "by_hand": found.by_hand and to_json(found.by_hand, asked),
        "tried": found.tried,
        "dropped": dict(found.dropped),
    }
