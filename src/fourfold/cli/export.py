"""``fourfold export``: a trained model as a folder that Hugging Face's transformers loads."""

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer


class Dtype(StrEnum):
    """What weights are written in."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def export(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or a checkpoint.")],
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Where to write; else RUN/model.", show_default=False)
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights.")] = Dtype.float32,
) -> None:
    """Write a run's model as Hugging Face does.

    It is that of the newest good checkpoint, as config.json, safetensors and the tokenizer. Memory does not
    grow with the model.
    """
    import torch

    from fourfold.checkpoint import export_model
    from fourfold.cli.waiting import waiting
    from fourfold.errors import UserError

    if not run_folder.is_dir():
        raise UserError(f"{run_folder} is no folder: give that of a run, or of one of its checkpoints")
    target = folder if folder is not None else run_folder / "model"
    with waiting() as wait:
        done = export_model(
            run_folder,
            target,
            dtype=getattr(torch, dtype.value),
            tell=lambda line: typer.echo(line, err=True),
            progress=partial(wait.bytes, "exporting"),
        )
    files = "1 file" if done.files == 1 else f"{done.files} files"
    typer.echo(
        f"{target}: the model after step {done.step}, from {done.checkpoint}; "
        f"{done.weight_bytes / 1e6:,.1f} MB of weights in {dtype.value}, {files}"
    )
