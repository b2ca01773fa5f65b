"""The README's commands, run as written, in a fresh folder."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a clone, with a token cache of its own."""
    path = tmp_path_factory.mktemp("clone")
    for name in ("examples", "Makefile", "pyproject.toml", "constraints.txt"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, path / name)
    return path


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "FOURFOLD_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_the_readme_has_the_commands_of_every_kind() -> None:
    words = {tuple(command.split()[:2]) for command in COMMANDS}
    assert words == {
        ("make", "quickstart"),
        ("make", "test"),
        ("fourfold", "train"),
        ("fourfold", "verify"),
        ("fourfold", "schedule"),
        ("fourfold", "explain"),
        ("fourfold", "sample"),
        ("fourfold", "export"),
        ("fourfold", "prepare"),
        ("fourfold", "doctor"),
    }


@pytest.mark.alone  # one after another, in one process
@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("fourfold ")])
def test_a_command_runs_as_written(folder: Path, command: str) -> None:
    """In the order of the README: `sample` reads the run that `train` made."""
    done = run(["bash", "-c", command], folder)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert done.stdout.strip()


@pytest.mark.parametrize("target", [line.split()[1] for line in COMMANDS if line.startswith("make ")])
def test_a_make_target_is_what_the_readme_says(folder: Path, target: str) -> None:
    """The whole suite and the minute of training are not run inside a test; what they would run is."""
    done = run(["make", "--dry-run", "--always-make", target], folder)
    assert done.returncode == 0, done.stderr
    last = [line for line in done.stdout.splitlines() if not line.startswith("make")][-1]
    assert (
        last
        == {
            "quickstart": ".venv/bin/fourfold train examples/quickstart.toml",
            "test": ".venv/bin/python -m pytest -m alone",
        }[target]
    )


def test_the_python_example_runs(folder: Path) -> None:
    [code] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    checks = "\nassert 4 < loss < 5, loss\nassert gradients"
    done = run([sys.executable, "-W", "error", "-c", code + checks], folder)
    assert done.returncode == 0, done.stderr


def test_pictures_and_links_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), target
