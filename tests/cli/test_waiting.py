"""How far a command is shows on a terminal, and elsewhere in a line now and then."""

from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import fourfold.cli.waiting as waiting_module
from fourfold import reporting
from fourfold.checkpoint import Saving, about_files, save
from fourfold.cli import app
from fourfold.cli.waiting import waiting
from fourfold.data import ByteTokenizer
from fourfold.models import Decoder
from fourfold.sampling import generate
from fourfold.specs import ModelSpec
from tests.checkpoint.trainers import SPEC, run_spec, trainer_of


def console_of(*, terminal: bool) -> Console:
    return Console(file=StringIO(), force_terminal=terminal, width=120)


def shown(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_what_takes_long_is_shown_on_a_terminal():
    console = console_of(terminal=True)
    with waiting(console) as wait:
        wait.bytes("exporting", 10**9, 4 * 10**9, 1.9)
        assert "exporting" not in shown(console), "not long"
        wait.bytes("exporting", 10**9, 4 * 10**9, 2.0)
        wait.bytes("exporting", 2 * 10**9, 4 * 10**9, 2.0)
    assert "exporting: 1.00 of 4.00 GB  0.50 GB/s  0:06 left" in shown(console)
    assert "2.00 of" not in shown(console), "not too often"
    console = console_of(terminal=True)
    with waiting(console) as wait:
        wait.tokens("generating", 50, 1050, 10.0)
    assert "generating: 50 of 1,050 tokens  5.0 tokens/s  3:20 left" in shown(console)
    assert shown(console).rindex("\x1b[2K") > shown(console).rindex("generating"), "nothing is left of it"


def test_without_a_terminal_there_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch):
    console, now = console_of(terminal=False), 100.0
    monkeypatch.setattr(reporting.time, "monotonic", lambda: now)
    with waiting(console) as wait:
        for second in range(26):
            now = 100.0 + second
            wait.bytes("exporting", 10**8 * second, 4 * 10**9, float(second))
    assert shown(console) == (
        "exporting: 1.00 of 4.00 GB  0.10 GB/s  0:30 left\nexporting: 2.00 of 4.00 GB  0.10 GB/s  0:20 left\n"
    )


def test_each_token_is_told():
    torch.manual_seed(0)
    told: list[tuple[int, int, float]] = []
    model = Decoder(ModelSpec.preset("tiny"))
    generate(model, [1], tokens=3, on_token=lambda *how: told.append(how))
    assert [how[:2] for how in told] == [(1, 3), (2, 3), (3, 3)]
    assert 0 < told[0][2] <= told[1][2] <= told[2][2]


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (["export"], ["exporting: "]),
        (["sample", "--prompt", "a", "--tokens", "2"], ["loading: ", "of 2 tokens"]),
    ],
)
def test_commands_show_how_far_they_are(
    words: list[str], seen: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    console = console_of(terminal=True)
    monkeypatch.setattr(waiting_module, "Console", lambda **_: console)
    monkeypatch.setattr(reporting, "LONG_SECONDS", 0.0)
    spec = SPEC.replace({"vocab_size": 257})
    trainer = trainer_of(run_spec("dp1"), spec)
    saving = Saving(tmp_path / "checkpoints", {}, about_files(spec, ByteTokenizer()))
    save(trainer.parallel, trainer.update, saving, step=1)
    result = CliRunner().invoke(app, [words[0], str(tmp_path), *words[1:]], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    for text in seen:
        assert text in shown(console)
