"""``fourfold import``: whether a Hugging Face folder is whole, and a run file that begins with it."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

LONGEST_SEQUENCE = 2048
"""Of the run file that is written, where the model takes so many tokens."""


def import_(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A model as Hugging Face writes it.")],
    run_file: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN.toml", help="A run file to write that begins with it.", show_default=False
        ),
    ] = None,
) -> None:
    """Check the weights of a Hugging Face folder.

    Every weight of it; and write a run file that begins with its model. Nothing is converted: the ranks of
    `fourfold train RUN.toml` (or `--init DIR`) read from the folder.
    """
    from fourfold.checkpoint.hugging_face import CONFIG
    from fourfold.checkpoint.initial_weights import read_all
    from fourfold.cli.waiting import waiting
    from fourfold.data import load_tokenizer
    from fourfold.data.tokenizers import TOKENIZER
    from fourfold.errors import UserError
    from fourfold.run_folder import writing
    from fourfold.specs import ModelSpec

    if not (folder / CONFIG).exists():
        raise UserError(
            f"{folder} is no folder of a Hugging Face model, with {CONFIG} and weights; to fetch one of the "
            f"Hub: hf download {folder} --local-dir FOLDER"
        )
    if run_file is not None and run_file.exists():
        raise UserError(f"{run_file} is there already: give a new name")
    spec = ModelSpec.from_config(folder)
    tokenizer = load_tokenizer(folder / TOKENIZER)
    if tokenizer.vocab_size > spec.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} ids, the model takes {spec.vocab_size}"
        )
    with waiting() as wait:
        read = read_all(
            folder,
            spec,
            tell=lambda line: typer.echo(line, err=True),
            progress=partial(wait.bytes, "reading"),
        )
    typer.echo(
        f"{folder}: {spec.num_parameters:,} parameters in {read / 1e6:,.1f} MB, all there and finite; "
        f"a tokenizer of {tokenizer.vocab_size:,} ids"
    )
    if run_file is not None:
        length = min(LONGEST_SEQUENCE, spec.max_position_embeddings)
        with writing(run_file):
            run_file.write_text(_run_file(folder, length))
        typer.echo(f"{run_file}: begins with it; set data.source, then: fourfold train {run_file}")


def _run_file(folder: Path, sequence_length: int) -> str:
    """Return a run file with what is most often changed."""
    return f"""[model]
init = {json.dumps(str(folder))}

[data]
source = "python-stdlib"  # or paths of text, JSONL or Parquet files
sequence_length = {sequence_length}

[training]
steps = 1000
batch = 8
dtype = "bfloat16"

[optimizer]
learning_rate = 1e-5
warmup_steps = 100
"""
