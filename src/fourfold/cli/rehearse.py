"""``fourfold rehearse``: one rank's training step, run without the other ranks and without data."""

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
    from fourfold.outline import Step
    from fourfold.rank_memory import RankMemory
    from fourfold.rehearsal.run import Recorded


def rehearse(
    run_file: RunFile = None,
    model: ModelName = None,
    sequence: SequenceLength = None,
    batch: Batch = None,
    layout: LayoutText = None,
    rank: Annotated[int, typer.Option(help="Which rank of the layout.")] = 0,
    microbatches: Microbatches = None,
    dtype: Dtype = None,
    recompute: Recompute = None,
    device: Annotated[str, typer.Option(help="Whose kernels and collectives: cuda or cpu.")] = "cuda",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run one rank of a step without the others.

    The real code of any layout, on tensors without data; what it takes is counted.
    """
    given = Given(sequence, batch, layout, microbatches, dtype, recompute)
    asked = step_asked_for(run_file, model, given, device=device)
    if broken := asked.problems():
        raise UserError(*broken)

    from fourfold.planner.context import chosen

    choice = chosen(asked)
    step = replace(asked, layout=choice.layout)
    if not 0 <= rank < step.layout.world_size:
        raise UserError(f"--rank {rank} is not in {step.layout}: use 0 to {step.layout.world_size - 1}")

    from fourfold.explain import memory_of_rank

    predicted = memory_of_rank(step, rank, device_type=device)

    from fourfold.rehearsal.run import rehearse as run

    found = run(step, rank=rank, device_type=device)
    if as_json:
        typer.echo(json.dumps(to_json(step, found, predicted)))
    else:
        typer.echo(text(step, found, predicted, model or str(run_file), choice.why))


def to_json(step: "Step", found: "Recorded", predicted: "RankMemory") -> dict[str, Any]:
    """All of it as numbers and texts; bytes and FLOPs are whole."""
    from dataclasses import asdict

    from fourfold.explain import summed_up

    return {
        "layout": str(step.layout),
        "rank": found.rank,
        "coordinates": dict(step.layout.coordinates(found.rank)),
        "peak_bytes": found.held.peak,
        "memory_at_peak_bytes": {c.value: n for c, n in found.held.at_peak.items()},
        "memory_between_steps_bytes": {c.value: n for c, n in found.held.rest.items()},
        "predicted_peak_bytes": predicted.peak,
        "predicted_at_peak_bytes": {c.value: n for c, n in predicted.at_peak.items()},
        "flops": found.flops,
        "traffic": [asdict(row) for row in summed_up(found.events, step)],
    }


def text(step: "Step", found: "Recorded", predicted: "RankMemory", name: str, why_cp: str = "") -> str:
    """A rehearsal as tables; ``why_cp`` says why the option of cp is this one."""
    from fourfold.explain import summed_up
    from fourfold.memory import Category
    from fourfold.specs import AXES

    coordinates = step.layout.coordinates(found.rank)
    at = ", ".join(f"{axis} {coordinates[axis]}" for axis in AXES if step.layout.size(axis) > 1)
    place = f" ({at})" if at else ""
    memory = [["memory in GiB", "between steps", "at the peak", "predicted"]]
    memory += [
        [
            category.value,
            size(found.held.rest[category]),
            size(found.held.at_peak[category]),
            size(predicted.at_peak[category]),
        ]
        for category in Category
    ]
    peak = found.held.peak
    memory.append(["all", size(sum(found.held.rest.values())), size(peak), size(predicted.peak)])
    return "\n\n".join(
        [
            f"{title(step, name, why_cp)}\nrehearsed: rank {found.rank:,}{place}",
            f"{table(memory, left=1)}\nthe peak is {peak / predicted.peak - 1:+.2%} off the prediction",
            f"FLOPs of a step on this rank: {found.flops:.6g}",
            f"what it sends and receives in a step, in GiB\n{traffic(summed_up(found.events, step))}",
        ]
    )
