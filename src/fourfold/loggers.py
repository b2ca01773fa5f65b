"""Services that get a run's metrics besides the run folder: TensorBoard, Weights & Biases."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from fourfold.errors import RunStopped, UserError
from fourfold.specs import RunSpec


class Logger(Protocol):
    """Where metrics go besides the run folder."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Take the metrics of a step."""

    def close(self) -> None:
        """Take no more."""


def check_loggers(run: RunSpec) -> None:
    """Raise UserError for each logger that the run asks for and that is not installed."""
    wanted = {"tensorboard": run.logging.tensorboard, "wandb": bool(run.logging.wandb)}
    problems = [
        f"logging.{name} needs the package {name}, which is not installed: pip install 'fourfold[{name}]'"
        for name, on in wanted.items()
        if on and importlib.util.find_spec(name) is None
    ]
    if problems:
        raise UserError(*problems)


class _TensorBoard:
    """TensorBoard event files in the run folder."""

    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            if name != "step":
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """A run of a Weights & Biases project."""

    def __init__(self, folder: Path, run: RunSpec):
        import wandb

        with _asked_for("logging.wandb"):
            self._run = wandb.init(
                project=run.logging.wandb,
                name=folder.name,
                dir=str(folder),
                config=run.model_dump(mode="json"),
            )

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log({name: value for name, value in values.items() if name != "step"}, step=step)

    def close(self) -> None:
        self._run.finish()


@contextmanager
def _asked_for(setting: str) -> Iterator[None]:
    """Turn whatever a foreign service says at its start into a message that names the setting."""
    try:
        yield
    except Exception as error:
        raise RunStopped(f"{setting} could not be started: {error}") from error


def started_loggers(folder: Path, run: RunSpec) -> list[Logger]:
    """Return the loggers that the run asks for, started."""
    makers: list[tuple[bool, Callable[[], Logger]]] = [
        (run.logging.tensorboard, lambda: _TensorBoard(folder)),
        (bool(run.logging.wandb), lambda: _WeightsAndBiases(folder, run)),
    ]
    return [make() for wanted, make in makers if wanted]
