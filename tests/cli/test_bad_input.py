"""Hundreds of run files and layouts with something wrong: each gives messages and exit status 2, no more."""

import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fourfold.cli import app
from fourfold.errors import UserError
from fourfold.specs import Layout, RunSpec
from fourfold.specs.run import SECTION_KEYS
from fourfold.specs.run_file import literal

GOOD: dict[str, dict[str, Any]] = {
    "": {"layout": "dp2", "seed": 3},
    "model": {"preset": "tiny", "num_hidden_layers": 4},
    "data": {"source": "corpus.txt", "sequence_length": 16},
    "training": {"steps": 3, "batch": 8, "microbatches": 2, "dtype": "float32", "recompute": "none"},
    "sharding": {"pieces": "auto", "prefetch": 1},
    "optimizer": {"learning_rate": 1e-3, "betas": [0.9, 0.95], "warmup_steps": 1},
    "evaluation": {"every": 0, "batches": 2},
    "sample": {"tokens": 0},
    "logging": {"wandb": ""},
}
ODD_VALUES: list[Any] = [
    -1, 0, 3, 2**70, 1.5, -0.0, 1e308, True, "", "x", "1", "dp2", [], [1], [[]], {}, {"a": 1},
    "\x00", "ü" * 300,
]  # fmt: skip
UNQUOTED = ["nan", "inf", "-inf", "1_0", "0x10", "1979-05-27", "yes", "'", '"', "[", "1,2", "="]
LAYOUT_WORDS = [
    "dp", "pp", "fsdp", "cp", "tp", "zero", "DP", "", "2", "3", "0", "-1", "1e3", "x", ":", ",", " ",
    "zero1", "ulysses", "ulysses3", "ring", "1f1b", "zbv", "interleaved", "allreduce", "9" * 30, "٣",
]  # fmt: skip


def text_of(sections: dict[str, dict[str, Any]]) -> str:
    lines = []
    for section, table in sections.items():
        lines += [f"[{section}]"] if section else []
        lines += [f"{key} = {value}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def broken_run_file(seed: int) -> str:
    """The good run file with one to three changes; it may be good still."""
    draw = random.Random(seed)
    sections = {name: {key: literal(value) for key, value in table.items()} for name, table in GOOD.items()}
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        section = draw.choice(list(sections))
        keys = list(SECTION_KEYS.get(section, ("layout", "seed", "folder")))
        key = draw.choice([*keys, *sections[section], "steps", "nonsense", f"{keys[0]}s"])
        kind = draw.randrange(5)
        if kind == 0:
            sections[section].pop(key, None)
        elif kind == 1:
            sections[section][key] = draw.choice(UNQUOTED)
        elif kind == 2:
            sections[f"{section}s" if section else "odd"] = {key: "1"}
        else:
            sections[section][key] = literal(draw.choice(ODD_VALUES))
    text = text_of(sections)
    if draw.random() < 0.1:
        text = text[: draw.randrange(len(text))]
    return text


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "corpus.txt").write_text("def main(): return 1\n" * 400)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FOURFOLD_CACHE", str(tmp_path / "cache"))
    return tmp_path


def refusal(*arguments: str) -> str:
    """What a command says that must end with status 2: messages of one line, each once, no traceback."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, (arguments, result.output, result.exception)
    assert result.stdout == ""
    messages = result.stderr.splitlines()
    assert messages, arguments
    assert all(message.startswith("error: ") for message in messages), result.stderr
    assert len(set(messages)) == len(messages), result.stderr
    return result.stderr


def test_the_good_run_file_is_good(folder: Path) -> None:
    sections = {name: {key: literal(v) for key, v in table.items()} for name, table in GOOD.items()}
    (folder / "run.toml").write_text(text_of(sections))
    RunSpec.load("run.toml").check()


def test_run_files_with_something_wrong(folder: Path) -> None:
    """Each of 400 is refused by the command, or means what it says: it is written out and read back."""
    path = folder / "run.toml"
    refused = 0
    for seed in range(400):
        path.write_text(broken_run_file(seed))
        try:
            run = RunSpec.load(path)
            run.check()
        except UserError:
            refused += 1
            refusal("train", "run.toml")
            assert [file.name for file in folder.iterdir() if file.name == "runs"] == []
        else:
            again = folder / "again.toml"
            again.write_text(run.to_toml())
            assert RunSpec.load(again) == run, seed
    assert refused > 250, "too few of them are wrong to say much"


def test_layouts_with_something_wrong() -> None:
    draw = random.Random(0)
    refused = 0
    for _ in range(600):
        text = "".join(draw.choice(LAYOUT_WORDS) for _ in range(draw.randint(1, 6)))
        try:
            layout = Layout.parse(text)
        except UserError:
            refused += 1
            if refused % 4 == 0:  # the command adds nothing of its own
                refusal("verify", "--model", "tiny", f"--layout={text}")
        else:
            assert Layout.parse(str(layout)) == layout
    assert refused > 300
