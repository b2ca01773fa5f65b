"""What goes on from a checkpoint is the run that saved it, to the last bit."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fourfold.checkpoint import Saving, load_newest_, save
from fourfold.cli.checkpoints import what_must_stay
from fourfold.specs import Layout
from fourfold.training import Trainer
from tests.checkpoint.trainers import run_spec, trainer_of
from tests.ranks import RankPool


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


TIED = "model.embed_tokens.weight"


def tied_around_a_checkpoint(layout: str, folder: str) -> tuple[list[Tensor], list[Tensor]]:
    """A rank's copy of a tied weight after each of 5 clipped steps, saved after 3; and resumed, after two."""
    run = run_spec(layout, dtype="float64", steps=5)
    run = run.model_copy(update={"optimizer": run.optimizer.model_copy(update={"clip_norm": 0.5})})

    def copies(trainer: Trainer, steps: range) -> list[Tensor]:
        found = []
        for step in steps:
            trainer.step(step)
            assert trainer.update.norm > 0.5
            named = [pair for unit in trainer.parallel.units for pair in unit.named(unit.whole(unit.master))]
            found += [weight.clone() for name, weight in named if name == TIED]
        return found

    trainer = trainer_of(run)
    undisturbed = copies(trainer, range(3))
    save(trainer.parallel, trainer.update, Saving(Path(folder), {}, {}), step=3)
    undisturbed += copies(trainer, range(3, 5))
    resumed = trainer_of(run)
    assert load_newest_(resumed.parallel, resumed.update, Path(folder), run={}) == 3
    return undisturbed, copies(resumed, range(3, 5))


@pytest.mark.parametrize(("layout", "holders"), [("pp2,fsdp2:zero1", [0, 1, 2, 3]), ("pp2:zbv", [0])])
def test_a_tied_embedding_is_resumed_as_one(
    layout: str, holders: list[int], ranks: RankPool, tmp_path: Path
) -> None:
    """On both ends of a pipeline, or in a V on one rank: the same bits after each step, resumed or not."""
    # PP-08
    results = ranks(Layout.parse(layout).world_size, tied_around_a_checkpoint, layout, str(tmp_path))
    first, _ = results[0]
    assert [rank for rank, (undisturbed, _) in enumerate(results) if undisturbed] == holders
    for rank in holders:
        undisturbed, resumed = results[rank]
        assert len(undisturbed) == 5
        for found, expected in zip([*undisturbed, *resumed], [*first, *first[3:]], strict=True):
            assert torch.equal(found, expected)
    assert not torch.equal(first[3], first[4])


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
