"""``fourfold simulate``: when everything of a step would happen, on devices that are not there."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from fourfold.cli.tables import table, title
from fourfold.errors import UserError, choices

if TYPE_CHECKING:
    from fourfold.outline import Step
    from fourfold.planner.machine import Machine
    from fourfold.planner.simulated import Simulation


def simulate(
    run_file: RunFile = None,
    model: ModelName = None,
    sequence: SequenceLength = None,
    batch: Batch = None,
    layout: LayoutText = None,
    microbatches: Microbatches = None,
    dtype: Dtype = None,
    recompute: Recompute = None,
    gpu: Annotated[str | None, typer.Option(help="Which device, e.g. H100-80GB.")] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="What fourfold bench measured; alone, or over --gpu's constants.")
    ] = None,
    slow: Annotated[
        list[str] | None, typer.Option(help="A slow pipeline rank: 1:1.2 computes 1.2 times as long.")
    ] = None,
    link: Annotated[list[str] | None, typer.Option(help="A slow axis: fsdp:2 sends twice as long.")] = None,
    trace: Annotated[Path | None, output_option("Write a trace for ui.perfetto.dev, .json.")] = None,
    measured: Annotated[
        Path | None, typer.Option(help="The program.json of a run of this layout, for the trace.")
    ] = None,
    picture: Annotated[Path | None, output_option("Draw the step into this PNG or SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Simulate a step on devices not at hand.

    Shows its time, what every pipeline rank waits for, a trace.
    """
    from fourfold.outline import outline
    from fourfold.planner.context import chosen
    from fourfold.planner.simulation_loads import Knobs, simulate_step
    from fourfold.specs import AXES

    problems: list[str] = []
    for name, path, suffixes in (("trace", trace, [".json"]), ("picture", picture, [".png", ".svg"])):
        if path is not None and path.suffix not in suffixes:
            problems.append(f"--{name} {path}: the file's name must end in {choices(suffixes)}")
    if measured is not None and trace is None:
        problems.append("--measured is for the trace: give --trace as well")
    factors = _factors("slow", slow or [], problems)
    links = _factors("link", link or [], problems)
    problems += [f"--link {axis}: axes are {', '.join(AXES)}" for axis in links if axis not in AXES]
    problems += [f"--slow {rank}: write a pipeline rank" for rank in factors if not rank.isdecimal()]
    given = Given(sequence, batch, layout, microbatches, dtype, recompute)
    asked = step_asked_for(run_file, model, given, device="cuda", others=problems)
    if broken := asked.problems():
        raise UserError(*broken)
    ranks = [int(rank) for rank in factors]
    if ranks and max(ranks) >= asked.layout.pp:
        raise UserError(f"--slow {max(ranks)}: the layout has pipeline ranks 0 to {asked.layout.pp - 1}")
    machine = machine_of(gpu, calibration, asked.dtype)
    choice = chosen(asked, machine=machine)
    step = replace(asked, layout=choice.layout)
    knobs = Knobs(dict(zip(ranks, factors.values(), strict=True)), links)
    found = simulate_step(outline(step), machine, knobs=knobs)
    typer.echo(
        json.dumps(_numbers(step, machine, found))
        if as_json
        else text(step, machine, found, model or str(run_file), choice.why)
    )
    _write(found, trace, measured, picture, model or str(run_file), quiet=as_json)


def machine_of(gpu: str | None, calibration: Path | None, dtype: str) -> "Machine":
    """The machine of the options. Raises `UserError` where they do not say which, or it lacks the dtype."""
    from fourfold.planner.catalogue import SHORT_NAMES, machine
    from fourfold.planner.machine import Machine

    if gpu is None and calibration is None:
        raise UserError(
            "on what? Give --gpu, e.g. H100-80GB, or --calibration with what fourfold bench wrote"
        )
    if gpu is not None:
        found = machine(gpu)
        found = found if calibration is None else found.calibrated(calibration)
    else:
        assert calibration is not None
        try:
            found = Machine.from_json(json.loads(calibration.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"calibration {calibration} does not describe a whole machine ({error}): use what fourfold "
                f"bench wrote, or give --gpu as well, one of {', '.join(SHORT_NAMES)}"
            ) from None
    if dtype not in found.peak_flops:
        raise UserError(f"{found.name} has no rate for {dtype}: use --dtype {choices(found.peak_flops)}")
    return found


def _factors(name: str, texts: list[str], problems: list[str]) -> dict[str, float]:
    """``1:1.2`` as {"1": 1.2}."""
    found = {}
    for given in texts:
        what, _, factor = given.partition(":")
        try:
            found[what] = float(factor)
        except ValueError:
            found[what] = 0.0
        if found[what] <= 0:
            problems.append(f"--{name} {given}: write what and how many times as long, e.g. 1:1.2")
    return found


def text(step: "Step", machine: "Machine", found: "Simulation", name: str, why_cp: str = "") -> str:
    """The step's time, and where it goes on each pipeline rank; ``why_cp`` as of `title`."""
    tokens = step.batch * step.sequence_length
    ranks = step.layout.world_size
    lines = [
        f"{title(step, name, why_cp)}\non {machine.name} ({machine.source})",
        f"a step takes {found.seconds:.4g} s: {tokens / found.seconds:,.0f} tokens/s, "
        f"{tokens / found.seconds / ranks:,.0f} on each rank; MFU {mfu(step, machine, found):.1%} of the "
        f"peak of {machine.peak_flops[step.dtype] / 1e12:,.4g} TFLOP/s",
    ]
    parts = dict.fromkeys(part for rank in found.parts for part in rank)
    rows = [["pipeline rank", *(f"{part} ms" for part in parts)]]
    rows += [
        [str(rank), *(f"{of_rank.get(part, 0.0) * 1e3:,.2f}" for part in parts)]
        for rank, of_rank in enumerate(found.parts)
    ]
    return "\n\n".join([*lines, "where the step goes\n" + table(rows, left=1)])


def mfu(step: "Step", machine: "Machine", found: "Simulation") -> float:
    """The share of all ranks' peak that the model's own FLOPs are."""
    from fourfold.flops import model_flops

    flops = model_flops(step.spec, batch=step.batch, sequence_length=step.sequence_length)
    devices = step.layout.world_size / machine.ranks_per_device
    return flops / (found.seconds * devices * machine.peak_flops[step.dtype])


def _numbers(step: "Step", machine: "Machine", found: "Simulation") -> dict[str, Any]:
    return {
        "layout": str(step.layout),
        "machine": machine.name,
        "source": machine.source,
        "step_seconds": found.seconds,
        "tokens_per_second": step.batch * step.sequence_length / found.seconds,
        "mfu": mfu(step, machine, found),
        "pipeline_ranks": [dict(parts) for parts in found.parts],
    }


def _write(
    found: "Simulation",
    trace: Path | None,
    measured: Path | None,
    picture: Path | None,
    name: str,
    *,
    quiet: bool,
) -> None:
    from fourfold.planner.simulation_trace import write_simulation
    from fourfold.program import draw
    from fourfold.run_folder import writing

    if trace is not None:
        with writing(trace):
            write_simulation(found, trace, measured=measured)
    if picture is not None:
        with writing(picture):
            draw.picture(found.timeline, picture, title=f"{name}, simulated")
    for kind, path in (("trace", trace), ("picture", picture)):
        if path is not None and not quiet:
            typer.echo(f"{kind}: {path}")
