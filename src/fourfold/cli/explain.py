"""``fourfold explain``: what a training step would take, before anything runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fourfold.cli.output_file import output_option
from fourfold.cli.step_options import (
    Batch,
    Dtype,
    Given,
    LayoutText,
    Microbatches,
    ModelName,
    Recompute,
    RunFile,
    SequenceLength,
    step_asked_for,
)
from fourfold.cli.tables import size, table, title, traffic
from fourfold.errors import UserError

if TYPE_CHECKING:
    from fourfold.explain import Explanation

_WIDTH, _LINES = 118, 24
"""Characters of a line, and lines, of the drawn program."""


def explain(
    run_file: RunFile = None,
    model: ModelName = None,
    sequence: SequenceLength = None,
    batch: Batch = None,
    layout: LayoutText = None,
    microbatches: Microbatches = None,
    dtype: Dtype = None,
    recompute: Recompute = None,
    device: Annotated[str, typer.Option(help="Whose collectives: cuda (NCCL) or cpu (gloo).")] = "cuda",
    picture: Annotated[Path | None, output_option("Draw memory and step into this PNG or SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Predict what a training step takes.

    Memory, FLOPs, messages and bubble, for any number of ranks. Nothing runs.
    """
    from fourfold.explain import explain as predict
    from fourfold.planner.context import chosen

    problems = []
    if picture is not None and picture.suffix not in (".png", ".svg"):
        problems.append(f"--picture {picture}: the file's name must end in .png or .svg")
    given = Given(sequence, batch, layout, microbatches, dtype, recompute)
    asked = step_asked_for(run_file, model, given, device=device, others=problems)
    if broken := asked.problems():
        raise UserError(*broken)
    choice = chosen(asked)
    found = predict(replace(asked, layout=choice.layout), device_type=device)
    typer.echo(json.dumps(found.to_json()) if as_json else text(found, model or str(run_file), choice.why))
    if picture is not None:
        from fourfold.explain_picture import draw

        draw(found, picture, name=model or str(run_file))


def text(found: "Explanation", name: str, why_cp: str = "") -> str:
    """An explanation as tables; ``why_cp`` says why the option of cp is this one."""
    return "\n\n".join(
        [title(found.step, name, why_cp), _memory(found), _flops(found), _traffic(found), _drawn(found)]
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
        "attention counts the pairs of query and key that see each other; the model's with all pairs: "
        f"{found.model_flops_square:.6g}\n"
        f"a rank executes {min(each):.4g} to {max(each):.4g}\n"
        f"bubble {found.timeline.bubble:.1%}, if an action takes as long as its FLOPs and a message no time; "
        "MFU and HFU need a time, and none is known"
    )


def _traffic(found: "Explanation") -> str:
    totals = [sum(row.sent_bytes for row in rows) for rows in found.traffic]
    rank = totals.index(max(totals))
    where = f", on pipeline rank {rank}, where it is most" if found.step.layout.pp > 1 else ""
    return f"what a rank sends and receives in a step, in GiB{where}\n{traffic(found.traffic[rank])}"


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
