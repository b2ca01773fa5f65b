"""The checkpoints of a run, as the ranks of ``fourfold train`` keep them."""

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from socket import gethostname

from fourfold.checkpoint import Saver, Saving, load_newest_
from fourfold.checkpoint.folders import CHECKPOINTS
from fourfold.checkpoint.ranks import messages_of_all, texts_of_all
from fourfold.checkpoint.saving import STILL_SECONDS
from fourfold.errors import RunPaused, RunStopped, UserError
from fourfold.mesh import Mesh
from fourfold.run_folder import writing
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
    "the training part of the corpus",
    "the held-out part of the corpus",
)
"""How the keys begin in which a run that goes on must be the one that saved. All others may change."""
SEEN_SECONDS = 1.0
"""So long a file system may take to show one machine what another one has written."""


def what_must_stay(values: Mapping[str, object]) -> dict[str, object]:
    """Return those of the values that must be alike in a run that goes on."""
    return {
        key: value for key, value in values.items() if key.startswith(MUST_STAY) and "schedule" not in key
    }


def shared_folder(folder: Path | None, mesh: Mesh) -> Path:
    """Return, on all ranks, the run folder that rank 0 has made. All call it; ``folder`` counts on rank 0.

    A relative path stays one on ranks that are where rank 0 is, and is its absolute path on the others.
    Raises UserError on all ranks where one does not see in it what rank 0 writes now, and says which.
    """
    token = f".seen-{secrets.token_hex(8)}"
    if mesh.rank == 0:
        assert folder is not None
        with writing(folder / token):
            (folder / token).touch()
    texts = [str(folder or ""), os.path.abspath(folder or ""), token]
    path, absolute, token = texts_of_all("\0".join(texts), mesh)[0].split("\0")
    seen = _seen([Path(path), Path(absolute)], token)
    problem = f"rank {mesh.rank} on {gethostname()} does not see {absolute}: the ranks must share it"
    advice = "set folder to a path on a file system that all machines have"
    problems = messages_of_all([f"{problem}: {advice}"] if seen is None else [], mesh)
    if mesh.rank == 0:
        (Path(absolute) / token).unlink(missing_ok=True)
    if seen is None or problems:
        raise UserError(*problems)
    return seen


def _seen(places: Sequence[Path], token: str) -> Path | None:
    """Return the first of the places with this file, None where it does not come to be in any."""
    deadline = time.monotonic() + SEEN_SECONDS
    while True:
        for place in places:
            if os.path.exists(place / token):  # whatever keeps this rank from it
                return place
        if time.monotonic() > deadline:
            return None
        time.sleep(SEEN_SECONDS / 10)


class Checkpoints:
    """Saves a run and lets it go on; on all ranks.

    Args:
        run: its settings.
        folder: of the run, which all ranks share.
        mesh: the ranks.
        must_stay: what must be alike in a run that goes on.
        files: what lies beside the tensors.
        resume: whether to go on from the newest checkpoint in the folder, where there is one.
        tell: prints a line, on rank 0.
        progress: shows how far what training waits for is, on rank 0: ``"saving"`` or ``"loading"``, bytes
            done, bytes in all, seconds so far.
        timeout_seconds: how long no rank may write a byte while all wait for a save.

    Attributes:
        start: finished steps of the checkpoint that the run went on from.
    """

    def __init__(
        self,
        run: RunSpec,
        folder: Path,
        mesh: Mesh,
        *,
        must_stay: Mapping[str, object],
        files: Mapping[str, bytes],
        resume: bool,
        tell: Callable[[str], None] = lambda _: None,
        progress: Callable[[str, int, int, float], None] = lambda *_: None,
        timeout_seconds: float = STILL_SECONDS,
    ):
        self._run = run
        self._resume = resume
        self._tell = tell
        self._saving = Saving(
            folder / CHECKPOINTS,
            must_stay,
            files,
            keep=run.checkpoint.keep,
            keep_every=run.checkpoint.keep_every,
        )
        self._progress = progress
        self._saver = Saver(
            self._saving, mesh, tell, partial(progress, "saving"), timeout_seconds=timeout_seconds
        )
        self.start = 0

    def resume_(self, trainer: Trainer) -> int:
        """Load the newest good checkpoint, if the run is to go on; return its step, 0 where there is none."""
        if self._resume:
            saving = self._saving
            self.start = load_newest_(
                trainer.parallel,
                trainer.update,
                saving.checkpoints,
                run=saving.run,
                tell=self._tell,
                progress=partial(self._progress, "loading"),
            )
        return self.start

    @property
    def folder(self) -> Path:
        """The folder of the run, on all ranks."""
        return self._saving.checkpoints.parent

    def after_step(self, trainer: Trainer, step: int) -> None:
        """Begin to save if it is time; at the end of the run, which can be asked for, wait for it.

        Raises on all ranks: RunPaused where the end was asked for, RunStopped where the last checkpoint could
        not be written.
        """
        saver, every, is_last = self._saver, self._run.checkpoint.every, step == self._run.training.steps
        is_asked = trainer.is_asked_to_end and not is_last
        is_end = is_asked or is_last
        saver.after_step()
        if is_end or (every and step % every == 0):
            # At the end nothing changes any more: no memory for a copy is needed.
            saver.begin(trainer.parallel, trainer.update, step, copy=not is_end)
        if is_end:
            saver.finish()
            failed = saver.failures.pop(step, None)
            for earlier in saver.failures.values():
                self._tell(f"there was {earlier}")
            if failed is not None:
                raise RunStopped(failed)
        if is_asked:
            raise RunPaused(self._paused(step))

    def _paused(self, step: int) -> str:
        """Say that the run was asked to end, and how it goes on."""
        run, folder = self._run, self.folder
        place = "" if folder == Path(run.folder) else f" and --set folder={folder}"
        return (
            f"asked to end, saved after step {step} of {run.training.steps} in {folder}: to go on give the "
            f"same command with --resume{place}"
        )

    def settle(self) -> None:
        """Wait for what is being saved, before the run stops. All ranks call it."""
        self._saver.finish()
