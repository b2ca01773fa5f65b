"""The command line: one file a command. Nothing heavy is imported before a command runs."""

import errno
import os
import signal
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from fourfold.cli import (
    bench,
    doctor,
    explain,
    export,
    import_,
    plan,
    prepare,
    rehearse,
    sample,
    schedule,
    simulate,
    train,
    verify,
)
from fourfold.errors import OutputClosed, RunPaused, RunStopped, UserError

OUTPUT_CLOSED = 128 + signal.SIGPIPE
"""The exit status of a command whose output nobody reads any more."""


class Commands(TyperGroup):
    """The group of all commands: it turns what a command raises into a message and an exit status.

    2 for a mistake of the user, 1 for a run that could not go on, 75 for one that was asked to end and saved
    (EX_TEMPFAIL: the same command with --resume goes on), 130 for Ctrl-C, 141 where nobody reads the output
    any more. Anything else is our mistake and shows its traceback.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except UserError as error:
            _say(*error.messages)
            raise typer.Exit(2) from None
        except RunPaused as paused:
            if not os.environ.get("RANK", "0").strip("0"):  # one of the ranks of a joined job
                typer.echo(str(paused), err=True)
            raise typer.Exit(os.EX_TEMPFAIL) from None
        except (OutputClosed, BrokenPipeError):
            _discard_output()
            raise typer.Exit(OUTPUT_CLOSED) from None
        except RunStopped as error:
            if sys.stderr.isatty():
                typer.echo(err=True)  # the live line ends where it stood
            _say(str(error))
            raise typer.Exit(1) from None
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            _say(f"cannot write {error.filename or 'a file'}: {error.strerror}")
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=Commands,
    name="fourfold",
    help="Train one transformer on many GPUs, split along its four axes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (
    train.train,
    verify.verify,
    explain.explain,
    plan.plan,
    simulate.simulate,
    rehearse.rehearse,
    sample.sample,
    import_.import_,
    export.export,
    prepare.prepare,
    schedule.schedule,
    doctor.doctor,
    bench.bench,
):
    app.command(command.__name__.rstrip("_"))(command)


@app.callback(invoke_without_command=True)
def _options(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    """Handle what stands before a command."""
    if version:
        import fourfold

        typer.echo(fourfold.__version__)
        raise typer.Exit()


def _discard_output() -> None:
    """Send what is still to be written nowhere: Python writes what it holds back when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(nowhere, output)


def _say(*messages: str) -> None:
    """Print messages of an error on stderr, in a joined job with the rank that says so."""
    from fourfold.launch import joined_job

    try:
        job = joined_job()
    except UserError:
        job = None
    rank = f"rank {job.rank}" if job is not None else ""
    for message in messages:
        speaker = f"{rank}: " if rank and not message.startswith(f"{rank} ") else ""
        typer.echo(f"{speaker}error: {message}", err=True)


def main() -> None:
    """Run the command line and end the process.

    A process that took part in a process group ends at once: gloo's threads now and then abort an orderly
    interpreter exit.
    """
    # Torch reads this when it is loaded. Its warnings of lost connections come with C++ stack traces.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # And this: so an allocator of GPU memory wastes a few percent, as the planner says, and not up to twenty.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    try:
        app(prog_name="fourfold")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1 if end.code else 0
        if "torch" not in sys.modules:
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
