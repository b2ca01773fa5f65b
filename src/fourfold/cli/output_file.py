"""An option that names a file to be written: what keeps it from that is told before anything is computed."""

import os
from pathlib import Path
from typing import Any

import typer

from fourfold.errors import UserError


def output_option(explained: str, *names: str) -> Any:
    """Such an option, with its line of help; its parameter is a path or None."""
    return typer.Option(*names, help=explained, callback=_checked)


def _checked(param: typer.CallbackParam, value: Path | None) -> Path | None:
    """The value of the option. Raises UserError where no such file can be written."""
    if value is None:
        return None
    folder = value.absolute().parent
    problem = None
    if value.is_dir():
        problem = "it is a folder: name a file in it"
    elif not folder.is_dir():
        problem = f"there is no folder {folder}: make it, or name a file elsewhere"
    elif not os.access(value if value.exists() else folder, os.W_OK):
        problem = "you may not write there: name a file elsewhere"
    if problem is not None:
        raise UserError(f"{param.opts[0]} {value}: {problem}")
    return value
