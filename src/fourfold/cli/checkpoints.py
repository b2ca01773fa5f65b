"""The checkpoints of a run, as the ranks of ``fourfold train`` keep them."""

from collections.abc import Callable, Mapping
from pathlib import Path

from fourfold.checkpoint import Saving, load_newest_, save
from fourfold.checkpoint.folders import CHECKPOINTS
from fourfold.checkpoint.ranks import texts_of_all
from fourfold.mesh import Mesh
from fourfold.specs import RunSpec
from fourfold.training import Trainer

MUST_STAY = (
    "seed",
    "model.",
    "data.",
    "training.batch",
    "training.dtype",
    "optimizer.name",
    "the content of ",
)
"""How the keys begin in which a run that goes on must be the one that saved. All others may change."""


def what_must_stay(values: Mapping[str, object]) -> dict[str, object]:
    """Return those of the values that must be alike in a run that goes on."""
    return {
        key: value for key, value in values.items() if key.startswith(MUST_STAY) and "schedule" not in key
    }


class Checkpoints:
    """Saves a run and lets it go on; on all ranks.

    Args:
        run: its settings.
        folder: of the run, on rank 0; None elsewhere.
        mesh: the ranks.
        must_stay: what must be alike in a run that goes on.
        files: what lies beside the tensors.
        resume: whether to go on from the newest checkpoint in the folder, where there is one.
        tell: prints a line, on rank 0.

    Attributes:
        start: finished steps of the checkpoint that the run went on from.
    """

    def __init__(
        self,
        run: RunSpec,
        folder: Path | None,
        mesh: Mesh,
        *,
        must_stay: Mapping[str, object],
        files: Mapping[str, bytes],
        resume: bool,
        tell: Callable[[str], None] = lambda _: None,
    ):
        self._run = run
        self._resume = resume
        self._tell = tell
        self._saving = Saving(
            Path(texts_of_all(str(folder or ""), mesh)[0]) / CHECKPOINTS,
            must_stay,
            files,
            keep=run.checkpoint.keep,
            keep_every=run.checkpoint.keep_every,
        )
        self.start = 0

    def resume_(self, trainer: Trainer) -> int:
        """Load the newest good checkpoint, if the run is to go on; return its step, 0 where there is none."""
        if self._resume:
            saving = self._saving
            self.start = load_newest_(
                trainer.parallel, trainer.update, saving.checkpoints, run=saving.run, tell=self._tell
            )
        return self.start

    def after_step(self, trainer: Trainer, step: int) -> None:
        """Save, if it is time."""
        every = self._run.checkpoint.every
        if step == self._run.training.steps or (every and step % every == 0):
            save(trainer.parallel, trainer.update, self._saving, step=step)
