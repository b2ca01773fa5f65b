"""``fourfold sample``: text from a trained model."""

import unicodedata
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fourfold.data import Tokenizer
    from fourfold.models import Decoder, Microbatch
    from fourfold.specs import SampleSection


def sample(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="The folder of a finished run.")],
    prompt: Annotated[str | None, typer.Option(help="How the text starts.")] = None,
    tokens: Annotated[int | None, typer.Option(help="How many tokens to generate.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 takes the likeliest token.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest tokens, 0 from all.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
) -> None:
    """Generate text with the model of a finished run. What is not given is as in its run file."""
    from fourfold.checkpoint import load_checkpoint
    from fourfold.cli.waiting import waiting
    from fourfold.errors import UserError
    from fourfold.run_folder import RUN_FILE
    from fourfold.specs import RunSpec, SampleSection

    if not run_folder.is_dir():
        raise UserError(f"run folder {run_folder} does not exist: give the folder of a finished run")
    with waiting() as wait:
        checkpoint = load_checkpoint(
            run_folder, lambda line: typer.echo(line, err=True), partial(wait.bytes, "loading")
        )
    run_file = run_folder / RUN_FILE
    settings = RunSpec.load(run_file).sample if run_file.exists() else SampleSection()
    asked = {"prompt": prompt, "tokens": tokens, "temperature": temperature, "top_k": top_k}
    settings = SampleSection.model_validate(
        {**settings.model_dump(), **{name: value for name, value in asked.items() if value is not None}}
    )
    with waiting() as wait:
        on_token = partial(wait.tokens, "generating")
        text = sample_text(checkpoint.model, checkpoint.tokenizer, settings, seed=seed, on_token=on_token)
    typer.echo(text)


def sample_text(
    model: "Decoder",
    tokenizer: "Tokenizer",
    settings: "SampleSection",
    *,
    seed: int,
    last_logits: "Callable[[Microbatch], Tensor] | None" = None,
    on_token: "Callable[[int, int, float], None]" = lambda *_: None,
) -> str:
    """Return the prompt with what the model writes after it.

    Without a prompt the text follows the end of another, as documents do in training. Control characters,
    which a terminal would obey, are shown as U+FFFD. ``last_logits`` and ``on_token`` are as in
    `fourfold.sampling.generate`.
    """
    from fourfold.sampling import generate

    prompt_ids = [int(token) for token in tokenizer.encode(settings.prompt)] or [tokenizer.end_of_text]
    generated = generate(
        model,
        prompt_ids,
        tokens=settings.tokens,
        temperature=settings.temperature,
        top_k=settings.top_k or None,
        seed=seed,
        stop=tokenizer.end_of_text,
        last_logits=last_logits,
        on_token=on_token,
    )
    text = tokenizer.decode([*prompt_ids, *generated])
    return "".join("\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)
