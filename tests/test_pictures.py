"""The pictures of a run: they are drawn, of a good size, from the numbers given."""

import math
import struct
from pathlib import Path

import numpy as np
import pytest

from fourfold.data import TokenFile, TokenWriter
from fourfold.errors import RunStopped
from fourfold.pictures import _smooth, draw_loss, draw_throughput, draw_time, unigram_entropy


def size_of(picture: Path) -> tuple[int, int]:
    header = picture.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", header[16:])


@pytest.mark.parametrize("steps", [1, 3, 400])
def test_pictures_of_short_and_long_runs(steps: int, tmp_path: Path):
    losses = [4.0 / (1 + step) for step in range(steps)]
    draw_loss(tmp_path / "loss.png", losses, evaluations=[(steps, 0.5)], unigram=3.0, title="a run")
    draw_throughput(
        tmp_path / "throughput.png", [1e4 + step for step in range(steps)], mfu=0.4, origin="test peak"
    )
    assert size_of(tmp_path / "loss.png") == size_of(tmp_path / "throughput.png") == (1200, 675)


@pytest.mark.parametrize("ranks", [1, 3, 40])
def test_a_bar_for_each_rank_and_sixteen_at_most(ranks: int, tmp_path: Path):
    parts = {"compute": 0.5, "exposed dp": 0.25, "exposed tp": 0.125, "bubble": 0.0, "other": 0.1}
    draw_time(tmp_path / "time.png", [parts] * (ranks - 1) + [{"compute": 1.0}], title="a run")
    assert size_of(tmp_path / "time.png") == (1200, 675)


@pytest.mark.parametrize("losses", [[math.nan], [5.0] * 300 + [math.nan], [5.0, math.inf]])
def test_a_loss_that_is_not_finite_is_left_out(losses: list[float], tmp_path: Path):
    draw_loss(tmp_path / "loss.png", losses, evaluations=[(1, 5.0), (2, math.nan)], unigram=3.0)
    assert size_of(tmp_path / "loss.png") == (1200, 675)
    draw_loss(tmp_path / "loss.png", losses, evaluations=[(1, math.nan)])
    assert size_of(tmp_path / "loss.png") == (1200, 675)


def test_smoothing_keeps_a_line_a_line():
    line = np.arange(10.0)
    assert _smooth(line, 5).tolist() == pytest.approx(line.tolist())
    assert _smooth(np.array([0.0, 3.0, 0.0]), 3).tolist() == pytest.approx([0.0, 1.0, 0.0])


def test_a_picture_that_cannot_be_written(tmp_path: Path):
    with pytest.raises(RunStopped, match=r"cannot write .*nowhere/loss.png: No such file or directory"):
        draw_loss(tmp_path / "nowhere" / "loss.png", [1.0])


def test_unigram_entropy(tmp_path: Path):
    with TokenWriter(tmp_path / "t.tokens", vocab_size=9, end_of_text=8, source="test") as writer:
        writer.append([np.array([0, 0, 1]), np.array([2, 1, 0])])
    # Eight tokens: three 0, two 1, one 2, two ends of text.
    expected = -sum(p * math.log(p) for p in (3 / 8, 2 / 8, 1 / 8, 2 / 8))
    assert unigram_entropy(TokenFile(tmp_path / "t.tokens")) == pytest.approx(expected, rel=1e-12)
