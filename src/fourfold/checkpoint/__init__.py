"""Checkpoints: weights and moments by name and place, on disk whole and nowhere else.

``save`` and ``load_newest_`` are called on every rank; ``load_checkpoint`` gives the model to one process.
"""

from fourfold.checkpoint.hugging_face import save_checkpoint
from fourfold.checkpoint.loading import load_newest_
from fourfold.checkpoint.model import Checkpoint, about_files, load_checkpoint
from fourfold.checkpoint.saving import Saving, save

__all__ = [
    "Checkpoint",
    "Saving",
    "about_files",
    "load_checkpoint",
    "load_newest_",
    "save",
    "save_checkpoint",
]
