"""A folder to run commands in."""

from pathlib import Path

import pytest

from tests.commands import RUN


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run file and a corpus, as the current one."""
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "corpus.txt").write_text("def main(): return 1\n" * 40)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FOURFOLD_CACHE", str(tmp_path / "cache"))
    return tmp_path
