"""``fourfold prepare``: tokenize a corpus ahead of a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fourfold.data import Prepared, Tokenizer
    from fourfold.data.prepare import Progress
    from fourfold.specs import DataSection


def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN.toml | SOURCE...",
            help="A run file, or python-stdlib, or text, JSONL or Parquet files or folders.",
        ),
    ],
    tokenizer: Annotated[
        str | None, typer.Option(help="bytes, or the path of a tokenizer.json. Default: bytes.")
    ] = None,
    held_out: Annotated[
        float | None, typer.Option(help="Fraction kept apart for evaluation. Default: 0.02.")
    ] = None,
    field: Annotated[
        str | None, typer.Option(help="The JSONL field or Parquet column with the text. Default: text.")
    ] = None,
) -> None:
    """Tokenize a corpus ahead of a run.

    It goes into the cache, where `fourfold train` finds it.
    """
    from fourfold.data import load_tokenizer
    from fourfold.pictures import unigram_entropy
    from fourfold.specs import DataSection, RunSpec

    if len(sources) == 1 and sources[0].endswith(".toml"):
        data = RunSpec.load(sources[0]).data
    else:
        data = DataSection(source=tuple(sources))
    asked = {"tokenizer": tokenizer, "held_out": held_out, "field": field}
    data = DataSection.model_validate(
        {**data.model_dump(), **{name: value for name, value in asked.items() if value is not None}}
    )
    loaded = load_tokenizer(data.tokenizer)
    prepared = prepare_with_bar(data, loaded)
    for part, tokens in (("training", prepared.train), ("held out", prepared.held_out)):
        typer.echo(
            f"{part}: {tokens.num_tokens:,} tokens in {tokens.num_documents:,} documents, {tokens.path}"
        )
    typer.echo(
        f"vocabulary: {loaded.vocab_size:,}, unigram entropy {unigram_entropy(prepared.train):.3f} nats"
    )


def prepare_with_bar(data: "DataSection", tokenizer: "Tokenizer") -> "Prepared":
    """Prepare a corpus with a progress bar on stderr; nothing is shown where it is in the cache already."""
    from fourfold.data import prepare as prepare_corpus

    with _bar() as report:
        return prepare_corpus(data.source, tokenizer, data.held_out, field=data.field, progress=report)


@contextmanager
def _bar() -> Iterator["Progress"]:
    """Yield what shows the bytes tokenized so far. On no terminal there is one line at the start."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("tokenizing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=console, disable=not console.is_terminal)
    task: list[int] = []

    def report(done_bytes: int, total_bytes: int) -> None:
        if not task:
            task.append(int(progress.add_task("", total=total_bytes)))
            progress.start()
            if not console.is_terminal:
                console.print(f"tokenizing {total_bytes / 1e6:,.1f} MB")
        progress.update(task[0], completed=done_bytes)  # type: ignore[arg-type]

    try:
        yield report
    finally:
        progress.stop()
