"""The run file: reading it with overrides on top, and writing it."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fourfold.errors import UserError, nearest


def read_run_file(
    path: Path, overrides: Sequence[str] = (), layout: str | None = None, init: str | None = None
) -> dict[str, Any]:
    """Return the content of a run file with ``init``, the overrides and the layout put on top.

    The folder of the run is ``runs/<name of the file>`` where the file does not say, and the tokenizer that
    of the folder that the weights come from. Raises ``UserError``.
    """
    values = _load(path)
    values.setdefault("folder", f"runs/{path.stem}")
    problems: list[str] = []
    if init is not None:
        values["model"] = {"init": init}
        if isinstance(values.get("data"), dict):
            values["data"].pop("tokenizer", None)
    for text in overrides:
        try:
            override_(values, text)
        except UserError as error:
            problems += error.messages
    if message := _take_tokenizer_(values):
        problems.append(message)
    if problems:
        raise UserError(*problems)
    if layout is not None:
        values["layout"] = layout
    return values


def _take_tokenizer_(values: dict[str, Any]) -> str | None:
    """Let the tokenizer be that of ``model.init``, unless another is given; return what prevents that."""
    model, data = values.get("model"), values.setdefault("data", {})
    init = model.get("init") if isinstance(model, dict) else None
    if not isinstance(init, str):
        return None
    if not Path(init).is_dir():
        return (
            f"model.init={init} is no folder: give one that holds a Hugging Face model; to fetch one of the "
            f"Hub: hf download {init} --local-dir FOLDER"
        )
    if not isinstance(data, dict) or "tokenizer" in data:
        return None
    path = Path(init) / "tokenizer.json"
    if not path.exists():
        return (
            f"data.tokenizer is missing, and {path} does not exist: give the tokenizer that the model was "
            "trained with"
        )
    data["tokenizer"] = str(path)
    return None


def _load(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise UserError(f"{path} is a folder: give a run file")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = nearest(str(path), (str(file) for file in path.parent.glob("*.toml")))
        raise UserError(f"run file {path} does not exist.{hint}") from None
    except OSError as error:
        raise UserError(f"run file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # bad TOML, with its line, or bad UTF-8
        raise UserError(f"run file {path} is not valid TOML: {error}") from None


def override_(values: dict[str, Any], text: str) -> None:
    """Put ``section.key=value`` into the content of a run file, in place."""
    name, equals, value = text.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        raise UserError(f"override '{text}' is not section.key=value: write e.g. training.steps=100")
    table = values
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise UserError(f"override '{text}': {part} is a key, not a section")
    table[parts[-1]] = _value(value.strip())


def _value(text: str) -> Any:
    """Read a TOML value; what is none is a string."""
    try:
        items = tomllib.loads(f"value = [{text}]")["value"]
    except tomllib.TOMLDecodeError:
        return text
    # `a, b` and dates are no single value that a run file could hold.
    one = len(items) == 1 and isinstance(items[0], (bool, int, float, str, list, dict))
    return items[0] if one else text


def toml(values: Mapping[str, Any]) -> str:
    """Write top-level keys, then one table for each mapping. None has no place in TOML."""
    lines = [f"{key} = {literal(value)}" for key, value in values.items() if not isinstance(value, Mapping)]
    for section, table in values.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{section}]", *(f"{key} = {literal(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def literal(value: Any) -> str:
    """Write one value; tables inside a section are written inline."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for the one control character that JSON leaves alone.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {literal(item)}" for key, item in value.items()) + "}"
    return "[" + ", ".join(literal(item) for item in value) + "]"
