"""``fourfold schedule``: the timeline of a pipeline schedule."""

from pathlib import Path
from typing import Annotated

import typer


def schedule(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A schedule, e.g. gpipe or 1f1b.")],
    stages: Annotated[int, typer.Option(help="Pipeline stages.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Microbatches of a step.")] = 8,
    picture: Annotated[Path | None, typer.Option(help="Draw it into this PNG file, too.")] = None,
) -> None:
    """Print the timeline of a pipeline schedule: a row a rank, a column a unit of time."""
    from fourfold.layer.schedules import schedule as named_schedule
    from fourfold.program import clock, draw
    from fourfold.run_folder import writing

    program = named_schedule(name, stages=stages, microbatches=microbatches)
    typer.echo(draw.grid(program))
    typer.echo("\n" + draw.summary(program))
    if picture is not None:
        title = f"{name}, {stages} stages, {microbatches} microbatches: simulated"
        with writing(picture):
            draw.picture(clock(program), picture, title=title, unit="forwards")
        typer.echo(f"picture: {picture}")
