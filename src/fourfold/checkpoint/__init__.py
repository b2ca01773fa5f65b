"""Checkpoints: weights and moments by name and place, on disk whole and nowhere else.

``save`` and ``load_newest_`` are called on every rank; ``load_checkpoint`` gives the model to one process,
``export_model`` to Hugging Face's transformers, from which ``read_hugging_face_`` takes one.
"""

from fourfold.checkpoint.export import export_model
from fourfold.checkpoint.initial_weights import check_hugging_face, read_hugging_face_
from fourfold.checkpoint.loading import load_newest_
from fourfold.checkpoint.model import Checkpoint, about_files, load_checkpoint
from fourfold.checkpoint.saving import Saver, save
from fourfold.checkpoint.writing import Saving

__all__ = [
    "Checkpoint",
    "Saver",
    "Saving",
    "about_files",
    "check_hugging_face",
    "export_model",
    "load_checkpoint",
    "load_newest_",
    "read_hugging_face_",
    "save",
]
