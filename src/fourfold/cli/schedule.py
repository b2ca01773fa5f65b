"""``fourfold schedule``: pipeline schedules, drawn, compared, written to files."""

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fourfold.cli.output_file import output_option
from fourfold.errors import UserError, choices

if TYPE_CHECKING:
    from fourfold.program import Program
    from fourfold.program.clock import Times
    from fourfold.specs.schedule_name import ScheduleName

_STAGES, _MICROBATCHES = 4, 8
"""Of a schedule by name, where nothing else is asked for; a file says its own."""

_LONGEST = 1e9
"""Of --times: a step of more would not be a number in the end."""

_MOST_RANKS, _MOST_FORWARDS = 1024, 2**18
"""Of a schedule to show: more would take minutes."""

_MEASURED = ".json"
"""What --times ends in where it is a run's program.json."""

_SUFFIXES = {"picture": (".png", ".svg"), "trace": (".json",), "save": (".csv", ".json")}


Name = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME", help="A schedule, e.g. 1f1b, interleaved2, zbv or auto; or the path of a file."
    ),
]
Stages = Annotated[
    int | None, typer.Option(help=f"Pipeline ranks, the pp of a layout; {_STAGES} if not given.")
]
Microbatches = Annotated[
    int | None, typer.Option(help=f"Microbatches of a step; {_MICROBATCHES} if not given.")
]
Layers = Annotated[
    int | None, typer.Option(help="Layers of the model: no schedule cuts it into more stages.")
]
TimesText = Annotated[
    str,
    typer.Option(
        metavar="F,I,W,SEND",
        help="Times of a microbatch on one rank's layers: forward, input gradient, weight gradient; and of a "
        "message. Or the program.json of a run: its medians in ms, a whole backward as half I and half W, "
        "messages 0.",
    ),
]
Cap = Annotated[int | None, typer.Option(help="The most microbatches whose activations a rank may hold.")]


@dataclass(frozen=True)
class _Sizes:
    """The numbers that were asked for, by their options; None where one was not given."""

    stages: int | None
    microbatches: int | None
    layers: int | None
    cap: int | None

    @property
    def ranks(self) -> int:
        """Pipeline ranks of a schedule by name."""
        return self.stages or _STAGES

    @property
    def count(self) -> int:
        """Microbatches of a schedule by name."""
        return self.microbatches or _MICROBATCHES


def schedule(
    name: Name = None,
    stages: Stages = None,
    microbatches: Microbatches = None,
    layers: Layers = None,
    times: TimesText = "1,1,1,0",
    cap: Cap = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Print a table of all schedules.")] = False,
    picture: Annotated[Path | None, output_option("Draw it into this PNG or SVG file.")] = None,
    trace: Annotated[
        Path | None, output_option("Write it into this JSON file, to be opened in ui.perfetto.dev.")
    ] = None,
    save: Annotated[Path | None, output_option("Write the schedule into this CSV or JSON file.")] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Show each stage's forward run again before its backward.")
    ] = False,
) -> None:
    """Print the timeline of a pipeline schedule.

    A row is a rank, a column a unit of time.
    """
    files = {
        option: path
        for option, path in (("picture", picture), ("trace", trace), ("save", save))
        if path is not None
    }
    sizes = _Sizes(stages, microbatches, layers, cap)
    parsed, durations = _asked(name, times, sizes, files, compare=compare)
    program = None if parsed is None else _schedule(parsed, durations, sizes)
    if program is not None and not compare:  # the table marks what holds more
        _check_cap(str(parsed), program, durations, sizes)
    if times.endswith(_MEASURED) and not as_json:
        typer.echo(
            f"medians of {times}, in ms: F {durations.forward:.4g}, I {durations.input_gradient:.4g}, "
            f"W {durations.weight_gradient:.4g}\n"
        )
    if compare:
        rows = _all_schedules(program, durations, sizes)
        if program is not None:
            rows[str(parsed)] = program
        shown = {title: _shown(found, recompute=recompute) for title, found in rows.items()}
        _print_comparison(shown, durations, cap, as_json=as_json)
    if parsed is None or program is None:
        return
    drawn = _shown(program, recompute=recompute)
    if not compare:
        _print_schedule(parsed, drawn, durations, as_json=as_json)
    for option, path in files.items():  # a file of a schedule holds no R
        written = program if option == "save" else drawn
        _write_files(parsed, written, durations, {option: path}, quiet=as_json)


def _asked(
    name: str | None, times: str, sizes: _Sizes, files: Mapping[str, Path], *, compare: bool
) -> tuple["ScheduleName | None", "Times"]:
    """The name, ``auto`` within the cap, and the times; raises `UserError` with all that is wrong."""
    from fourfold.program.clock import Times
    from fourfold.specs.schedule_name import ScheduleName, written_names

    problems: list[str] = []
    parsed = None
    if name is not None:
        try:
            parsed = ScheduleName.parse(name)
        except UserError as error:
            problems += error.messages
    elif not compare or files:
        problems.append(f"which schedule? Use {choices(written_names())}, or a file; --compare shows all")
    if parsed is not None and parsed.name == "auto" and sizes.cap is not None:
        parsed = ScheduleName("auto", min(sizes.cap, parsed.number or sizes.cap))
    problems += [
        f"--{option} {value} is too small: use 1 or more"
        for option, value in asdict(sizes).items()
        if value is not None and value < 1
    ]
    if sizes.ranks > _MOST_RANKS or sizes.ranks * sizes.count > _MOST_FORWARDS:
        problems.append(
            f"{sizes.ranks} pipeline ranks and {sizes.count} microbatches are too many to draw: use "
            f"--stages of at most {_MOST_RANKS}, and at most {_MOST_FORWARDS} of both multiplied"
        )
    durations = Times()
    try:
        durations = _times(times)
    except UserError as error:
        problems += error.messages
    problems += [
        f"--{option} {path}: the file's name must end in {choices(_SUFFIXES[option])}"
        for option, path in files.items()
        if path.suffix not in _SUFFIXES[option]
    ]
    if problems:
        raise UserError(*problems)
    return parsed, durations


def _times(text: str) -> "Times":
    """The times that were given, or that a run took."""
    from fourfold.program.clock import Times
    from fourfold.program.trace import measured_times

    if text.endswith(_MEASURED):
        return measured_times(Path(text))
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if (
        len(numbers) not in (3, 4)
        or not all(0 <= number <= _LONGEST for number in numbers)
        or not sum(numbers[:3])
    ):
        raise UserError(
            f"--times {text}: write F,I,W or F,I,W,SEND, e.g. 1,1.2,0.8,0.1: numbers from 0 to "
            f"{_LONGEST:g}, F, I and W not all 0; or the path of a run's program.json"
        )
    return Times(*numbers)


def _schedule(name: "ScheduleName", times: "Times", sizes: _Sizes) -> "Program":
    """The schedule that was asked for."""
    from fourfold.layer.schedule_file import read_schedule
    from fourfold.layer.schedules import check_stages
    from fourfold.layer.schedules import schedule as named_schedule

    if name.is_file:
        program = read_schedule(name.name, ranks=sizes.stages, microbatches=sizes.microbatches)
        check_stages(program, name, sizes.layers)
        return program
    return named_schedule(
        name, ranks=sizes.ranks, microbatches=sizes.count, times=times, most_stages=sizes.layers
    )


def _check_cap(name: str, program: "Program", times: "Times", sizes: _Sizes) -> None:
    """Raise `UserError` where a schedule holds more than the cap."""
    from fourfold.program.check import activations_beyond
    from fourfold.program.clock import peak_activations

    most = max(peak_activations(program))
    if sizes.cap is not None and most > sizes.cap:
        others = _all_schedules(program, times, sizes)
        keep = [other for other, found in others.items() if max(peak_activations(found)) <= sizes.cap]
        raise UserError(
            f"schedule {name} holds {most:.4g} microbatches at once where --cap {sizes.cap} are allowed: "
            f"use {choices(keep)} ({activations_beyond(program, sizes.cap)[0]})"
        )


def _shown(schedule: "Program", *, recompute: bool) -> "Program":
    """The schedule as it is, or with activation checkpointing, each stage a block."""
    from fourfold.program.liveness import Block
    from fourfold.recompute.insertion import with_recomputation
    from fourfold.specs.recompute_name import RecomputeName

    if not recompute:
        return schedule
    count = schedule.num_segments
    stages = [range(stage, stage + 1) for stage in range(count)]
    return with_recomputation(schedule, RecomputeName("full"), [Block()] * count, stages=stages)


def _all_schedules(beside: "Program | None", times: "Times", sizes: _Sizes) -> dict[str, "Program"]:
    """Every schedule that the layers fill by its name, ``auto`` within the cap.

    For as many ranks and microbatches as the one that they stand ``beside``, or as were asked for.
    """
    from fourfold.layer.schedules import named_schedules
    from fourfold.layer.schedules import schedule as named_schedule
    from fourfold.specs.schedule_name import ScheduleName

    ranks = len(beside.ranks) if beside else sizes.ranks
    count = beside.microbatches if beside else sizes.count
    named = named_schedules(ranks=ranks, microbatches=count, depth=sizes.cap)
    most, auto = sizes.layers, ScheduleName("auto", sizes.cap)
    fitting = {name: found for name, found in named.items() if most is None or found.num_segments <= most}
    best = named_schedule(auto, ranks=ranks, microbatches=count, times=times, most_stages=most)
    return {**fitting, str(auto): best}


def _numbers(program: "Program", times: "Times") -> dict[str, Any]:
    """What ``--json`` prints of a schedule."""
    from fourfold.layer.transfers import with_transfers
    from fourfold.program import clock
    from fourfold.program.clock import peak_activations

    timeline = clock(with_transfers(program), times.of(program))
    return {
        "bubble_fraction": timeline.bubble,
        "peak_activations": peak_activations(program),
        "makespan": timeline.seconds,
    }


def _print_comparison(
    rows: Mapping[str, "Program"], times: "Times", cap: int | None, *, as_json: bool
) -> None:
    """A table, the quickest first."""
    found = sorted(
        ((name, program.num_segments, _numbers(program, times)) for name, program in rows.items()),
        key=lambda row: (row[2]["makespan"], max(row[2]["peak_activations"])),
    )
    if as_json:
        typer.echo(json.dumps({name: numbers for name, _, numbers in found}))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("schedule", "makespan", "bubble", "most activations held", "stages"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    over = False
    for name, stages, numbers in found:
        most = max(numbers["peak_activations"])
        breaks = cap is not None and most > cap
        over |= breaks
        table.add_row(
            name,
            f"{numbers['makespan']:.6g}",
            f"{numbers['bubble_fraction']:.1%}",
            f"{most:.4g}{' !' if breaks else ''}",
            str(stages),
            style="dim" if breaks else None,
        )
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    if over:
        typer.echo(f"! more than the {cap} microbatches that are allowed")


def _print_schedule(name: "ScheduleName", program: "Program", times: "Times", *, as_json: bool) -> None:
    from fourfold.layer.transfers import with_transfers
    from fourfold.program import draw

    if as_json:
        typer.echo(json.dumps(_numbers(program, times)))
        return
    program = with_transfers(program)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    typer.echo(draw.grid(program, times, width=width))
    typer.echo(
        f"\n{name}: {program.num_segments} stages on {len(program.ranks)} ranks, "
        f"{program.microbatches} microbatches"
    )
    typer.echo(draw.summary(program, times))


def _write_files(
    name: "ScheduleName", program: "Program", times: "Times", files: Mapping[str, Path], *, quiet: bool
) -> None:
    from fourfold.layer.schedule_file import write_schedule
    from fourfold.layer.transfers import with_transfers
    from fourfold.program import clock, draw
    from fourfold.program.trace import write_trace
    from fourfold.run_folder import writing

    timeline = clock(with_transfers(program), times.of(program)) if files else None
    for option, path in files.items():
        assert timeline is not None
        with writing(path):
            if option == "picture":
                title = f"{name}, {len(program.ranks)} ranks, {program.microbatches} microbatches: simulated"
                unit = "forwards" if times.forward == 1 else "the unit of --times"
                draw.picture(timeline, path, title=title, names=draw.on_row, unit=unit, shaded=True)
            elif option == "trace":
                write_trace(timeline, path, microseconds=1000.0)
            else:
                write_schedule(program, path)
        if not quiet:
            typer.echo(f"{'schedule' if option == 'save' else option}: {path}")
