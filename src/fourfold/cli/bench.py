"""``fourfold bench``: measure this machine for the planner."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fourfold.cli.output_file import output_option
from fourfold.errors import UserError, choices, nearest

if TYPE_CHECKING:
    from fourfold.planner.machine import Machine


def bench(
    model: Annotated[
        str, typer.Option(help="Whose shapes: a preset, or the path of a config.json.")
    ] = "tiny",
    sequence: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 512,
    rows: Annotated[str, typer.Option(help="Sequences of a microbatch on a rank, e.g. 1,4.")] = "1,4",
    dtype: Annotated[str | None, typer.Option(help="By default bfloat16 on a GPU, else float32.")] = None,
    ranks: Annotated[int | None, typer.Option(help="By default one for each GPU, or 2.")] = None,
    as_json: Annotated[Path | None, output_option("Write the calibration here.", "--json")] = None,
) -> None:
    """Measure this machine for the planner.

    Products, attention and blocks of a model, and collectives.
    """
    import torch

    from fourfold.bench.compute import Shapes
    from fourfold.bench.measure import calibration, measure
    from fourfold.launch import check_local_ranks, joined_job, launch
    from fourfold.outline import ITEMSIZES
    from fourfold.run_folder import writing
    from fourfold.specs import ModelSpec

    gpus = torch.cuda.device_count()
    job = joined_job()
    count = job.world_size if job is not None else ranks or gpus or 2
    kind = dtype or ("bfloat16" if gpus else "float32")
    problems = [
        f"--{name} {value} is too small: use 1 or more"
        for name, value in (("sequence", sequence), ("ranks", count))
        if value < 1
    ]
    if kind not in ITEMSIZES:
        problems.append(f"--dtype {kind} does not exist.{nearest(kind, ITEMSIZES)} Use {choices(ITEMSIZES)}")
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in rows.split(",")]
    if min(numbers) < 1:
        problems.append(f"--rows {rows}: write numbers of 1 or more, e.g. 1,4")
    if as_json is not None and as_json.suffix != ".json":
        problems.append(f"--json {as_json}: the file's name must end in .json")
    if problems:
        raise UserError(*problems)
    check_local_ranks(count)
    shapes = Shapes.of(ModelSpec.named(model), dtype=kind, sequence=sequence, ranks=count, rows=numbers)
    machine: Machine | None = launch(count, measure, (shapes,))
    if machine is None:
        return
    typer.echo(text(machine))
    if as_json is not None:
        with writing(as_json):
            as_json.write_text(json.dumps(calibration(machine), indent=1) + "\n")
        typer.echo(f"calibration: {as_json}")


def text(machine: "Machine") -> str:
    """What was measured, in lines."""
    dtype = next(iter(machine.peak_flops))
    rate = machine.peak_flops[dtype] * machine.product_efficiency[dtype]
    lines = [
        f"{machine.name}: {dtype} products {rate / 1e9:,.1f} GFLOP/s on a rank, "
        f"memory {machine.memory_bytes_per_second / 1e9:,.1f} GB/s, "
        f"{machine.launch_seconds * 1e6:.1f} us to start a kernel"
    ]
    if machine.ranks_per_device > 1:
        lines.append(f"{machine.ranks_per_device:g} ranks share a core: each computes that much slower")
    return "\n".join([*lines, "", *collectives(machine)])


def collectives(machine: "Machine") -> list[str]:
    """A line for each op, number of ranks and size: time, and bandwidths as nccl-tests has them."""
    from fourfold.traffic import Event, sent_bytes

    if not machine.collectives:
        return []
    lines = [f"{'op':<16}{'ranks':>6}{'bytes':>15}{'time us':>12}{'algbw GB/s':>12}{'busbw GB/s':>12}"]
    for row in machine.collectives:
        algorithm = row.bytes / row.seconds
        factor = sent_bytes(Event(row.op, "tp", row.bytes, ""), row.ranks) / row.bytes
        lines.append(
            f"{row.op:<16}{row.ranks:>6}{row.bytes:>15,}{row.seconds * 1e6:>12,.1f}"
            f"{algorithm / 1e9:>12.3f}{algorithm * factor / 1e9:>12.3f}"
        )
    return lines
