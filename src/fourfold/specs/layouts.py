"""Every layout of so many ranks."""

from collections.abc import Iterator, Mapping
from itertools import product

from fourfold.specs.layout import AXES, TP_OPTIONS, Layout
from fourfold.specs.model import ModelSpec
from fourfold.specs.placement import PLACEMENTS
from fourfold.specs.schedule_name import written_names
from fourfold.specs.spec import divisors


def every_layout(
    world_size: int, model: ModelSpec, *, batch: int, microbatches: int, sequence_length: int
) -> Iterator[Layout]:
    """Go through every layout of ``world_size`` ranks that fits: all degrees, and of each all options.

    Options that mean the same as another one are left out: attention over ranks by their number of Ulysses'
    ranks, pipelines by each schedule's first form.
    """
    for degrees in every_degrees(world_size):
        axes = [axis for axis in AXES if degrees[axis] > 1]
        for chosen in product(*(options_of(axis, degrees[axis]) for axis in axes)):
            options = {axis: option for axis, option in zip(axes, chosen, strict=True) if option is not None}
            layout = Layout(**degrees, options=options)
            if not layout.problems(
                model,
                batch=batch,
                microbatches=microbatches,
                sequence_length=sequence_length,
                world_size=world_size,
            ):
                yield layout


def every_degrees(world_size: int) -> Iterator[Mapping[str, int]]:
    """Go through every way to write ``world_size`` as a product of one degree for each axis."""

    def rest(axes: tuple[str, ...], left: int) -> Iterator[dict[str, int]]:
        if len(axes) == 1:
            yield {axes[0]: left}
            return
        for degree in divisors(left):
            for others in rest(axes[1:], left // degree):
                yield {axes[0]: degree, **others}

    return rest(AXES, world_size)


def options_of(axis: str, degree: int) -> list[str | None]:
    """Every option of an axis of this degree, None for the default where none names it."""
    if axis == "pp":
        return list(written_names())
    if axis == "fsdp":
        return list(PLACEMENTS)
    if axis == "cp":
        return ["ring", *(f"ulysses{size}" for size in divisors(degree) if size > 1)]
    return [None, *TP_OPTIONS] if axis == "tp" else [None]
