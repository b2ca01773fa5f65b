"""What goes on from a checkpoint is the run that saved it, to the last bit."""

from pathlib import Path

import torch

from fourfold.checkpoint import Saving, load_newest_, save
from fourfold.cli.checkpoints import what_must_stay
from tests.checkpoint.trainers import run_spec, trainer_of


def test_float32_masters_of_a_bfloat16_model_come_back(tmp_path: Path):
    """CK-06, seen in NVIDIA/apex#42: masters made of the rounded weights; steps too small for bfloat16."""
    run = run_spec("dp1", dtype="bfloat16", steps=1000)
    small = run.optimizer.model_copy(update={"learning_rate": 1e-5})
    run = run.model_copy(update={"optimizer": small})
    undisturbed = trainer_of(run)
    for step in range(8):
        undisturbed.step(step)
    masters = [unit.master.clone() for unit in undisturbed.parallel.units]
    save(undisturbed.parallel, undisturbed.update, Saving(tmp_path, {}, {}), step=8)
    losses = [undisturbed.step(step).loss for step in range(8, 11)]

    resumed = trainer_of(run)
    assert load_newest_(resumed.parallel, resumed.update, tmp_path, run={}) == 8
    assert resumed.update.updates == 8
    for unit, master in zip(resumed.parallel.units, masters, strict=True):
        assert unit.master.dtype is torch.float32
        assert torch.equal(unit.master, master)
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters)
    assert [resumed.step(step).loss for step in range(8, 11)] == losses


def test_what_must_stay_and_what_may_change():
    """The keys of a run that tell it from another one; everything else may change with --resume."""
    stays = {
        "seed",
        "model.hidden_size",
        "model.rope_theta",
        "data.sequence_length",
        "data.held_out",
        "training.batch",
        "training.dtype",
        "optimizer.name",
        "the content of data.tokenizer",
        "the training part of the corpus",
        "the held-out part of the corpus",
    }
    changes = {
        "layout",
        "training.steps",
        "training.microbatches",
        "training.recompute",
        "optimizer.learning_rate",
        "sharding.pieces",
        "evaluation.every",
        "checkpoint.every",
        "the content of the schedule in layout",
    }
    assert what_must_stay(dict.fromkeys(stays | changes, 1)).keys() == stays
