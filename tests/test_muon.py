"""Muon through the trainer: whole matrices on every layout, AdamW beside it, nothing sent for it."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold.collectives import record
from fourfold.data import SyntheticDataset
from fourfold.errors import UserError
from fourfold.initialize import initialize_, whole
from fourfold.learning_rate import learning_rate
from fourfold.mesh import Mesh
from fourfold.models import IGNORE, Decoder, Microbatch
from fourfold.optimizer import Update, optimizers
from fourfold.specs import Layout, ModelSpec, RunSpec
from fourfold.traffic import Event
from fourfold.training import Trainer
from tests.ranks import RankPool

TINY = ModelSpec.preset("tiny").replace(
    {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
)
STEPS, ROWS, LENGTH = 3, 12, 16
RATE = 1e-2
FLOAT64 = {"dtype": "float64"}

LAYOUTS = [
    ("fsdp2", "auto"), ("fsdp2", "matrices"), ("fsdp3", "auto"), ("fsdp2:zero1", "matrices"),
    ("fsdp4:zero2", "auto"), ("dp2", "auto"), ("dp2", "matrices"), ("dp2,fsdp2", "auto"),
]  # fmt: skip


def run_spec(layout: str, **sections: dict[str, Any]) -> RunSpec:
    values: dict[str, Any] = {
        "layout": layout,
        "model": {
            "preset": "tiny",
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        "data": {"sequence_length": LENGTH},
        "training": {"steps": STEPS, "batch": ROWS},
        "sharding": {},
        "optimizer": {"name": "muon", "learning_rate": RATE, "warmup_steps": 2, "clip_norm": 0.1},
    }
    for name, section in sections.items():
        values[name] = {**values[name], **section}
    return RunSpec.model_validate(values)


@dataclass(frozen=True)
class LabelsInRow0(SyntheticDataset):
    """Only the first row of a batch has labels: whoever else is in it adds exactly nothing."""

    def rows(self, step: int, batch: int, rows: range) -> Microbatch:
        """Return rows of which all but the first of the batch are ignored."""
        found = super().rows(step, batch, rows)
        labels_BS = found.labels_BS.clone()
        labels_BS[[row > 0 for row in rows]] = IGNORE
        return replace(found, labels_BS=labels_BS)


@dataclass(frozen=True)
class NoLabels(SyntheticDataset):
    """No label counts, so every gradient is 0."""

    def rows(self, step: int, batch: int, rows: range) -> Microbatch:
        """Return rows without labels."""
        found = super().rows(step, batch, rows)
        return replace(found, labels_BS=torch.full_like(found.labels_BS, IGNORE))


Kind = type[SyntheticDataset]


def trained(
    layout: str,
    sections: dict[str, dict[str, Any]],
    kind: Kind = SyntheticDataset,
    start: float | None = None,
) -> tuple[dict[str, Tensor], list[float]]:
    """The whole weights after all steps, and the rates of the steps. All weights start at ``start``."""
    run = run_spec(layout, **sections)
    trainer = Trainer(run, TINY, Mesh(run.layout), data=kind(TINY.vocab_size, LENGTH, seed=4))
    if start is not None:
        trainer.parallel.load_(
            {name: torch.full(shape, start) for name, shape in TINY.parameter_shapes().items()}
        )
    reports = [trainer.step(step) for step in range(run.training.steps)]
    weights = {name: master.clone() for name, master in trainer.parallel.named_masters()}
    return weights, [report.learning_rate for report in reports]


def in_plain_pytorch(run: RunSpec) -> dict[str, Tensor]:
    """The oracle: one process, one row at a time, autograd's gradients, torch's Muon and AdamW."""
    data = SyntheticDataset(TINY.vocab_size, LENGTH, seed=4)
    model, spec = Decoder(TINY).double(), run.optimizer
    parameters = dict(model.named_parameters())
    initialize_(whole(parameters), model, seed=run.seed, std=TINY.initializer_range)
    blocks = {name for name, p in parameters.items() if ".layers." in name and p.ndim == 2}
    others = [name for name in parameters if name not in blocks]
    muon = torch.optim.Muon(
        [parameters[name] for name in sorted(blocks)],
        weight_decay=spec.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(
        [
            {"params": [parameters[name] for name in others if decayed == (parameters[name].ndim == 2)],
             "weight_decay": spec.weight_decay if decayed else 0.0}
            for decayed in (True, False)
        ],
        betas=spec.betas,
        eps=spec.eps,
    )  # fmt: skip
    for step in range(STEPS):
        model.zero_grad()
        for row in range(ROWS):
            loss_sum = model.loss_sum(data.rows(step, ROWS, range(row, row + 1)))
            (loss_sum / data.valid_tokens(step, ROWS)).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        # Not clip_grad_norm_: it adds 1e-6 to the norm, and what Muon makes of that is not small.
        scale = spec.clip_norm / float(torch.nn.utils.get_total_norm(gradients))
        assert scale < 1
        torch._foreach_mul_(gradients, scale)
        for optimizer in (muon, adamw):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step + 1, spec=spec, total_steps=STEPS)
            optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return in_plain_pytorch(run_spec("dp1", training=FLOAT64))


@pytest.mark.parametrize(("layout", "pieces"), [("dp1", "auto"), *LAYOUTS])
def test_every_layout_gives_the_weights_of_plain_pytorch(
    ranks: RankPool, layout: str, pieces: str, expected: dict[str, Tensor]
) -> None:
    """3 steps with clipping, in float64.

    Gradients are summed in another order. Muon rounds them to bfloat16 and lifts small singular values, with
    them rounding noise: of float32, 3 % of a matrix's change. What differs in the last bits of float64 is
    rounded to the same. The same gradients give the same bits, in the next test.
    """
    initial = Decoder(TINY).double()
    start = dict(initial.named_parameters())
    initialize_(whole(start), initial, seed=0, std=TINY.initializer_range)
    for weights, _ in ranks(
        Layout.parse(layout).world_size,
        trained,
        layout,
        {"sharding": {"pieces": pieces}, "training": FLOAT64},
    ):
        assert set(weights) == set(expected)
        for name, weight in expected.items():
            change = weight - start[name].detach()
            assert float(change.abs().max()) > 0.5 * RATE, name
            assert float((weights[name] - weight).norm()) < 1e-12 * float(change.norm()), name


@pytest.mark.parametrize(("layout", "pieces"), LAYOUTS)
def test_the_same_gradients_give_the_same_bits(ranks: RankPool, layout: str, pieces: str) -> None:
    """Only the row of rank 0 has labels, so sums over ranks are exact. No clipping: the norm is a sum."""
    world_size = Layout.parse(layout).world_size
    sections: dict[str, dict[str, Any]] = {
        "training": {"batch": world_size, "microbatches": 1},
        "sharding": {"pieces": pieces},
        "optimizer": {"clip_norm": 0.0},
    }
    alone = {**sections, "training": {"batch": world_size, "microbatches": world_size}}
    alone_weights, _ = trained("dp1", alone, LabelsInRow0)
    for weights, _ in ranks(world_size, trained, layout, sections, LabelsInRow0):
        for name, weight in alone_weights.items():
            assert torch.equal(weights[name], weight), name


def test_embedding_head_and_norms_are_adamws(ranks: RankPool) -> None:
    """One step of either on the same gradients: only the matrices of blocks come out differently."""
    sections: dict[str, dict[str, Any]] = {"training": {"steps": 1}, "sharding": {"pieces": "matrices"}}
    both = [
        ranks(2, trained, "fsdp2", {**sections, "optimizer": {"name": name, "warmup_steps": 0}})[0][0]
        for name in ("muon", "adamw")
    ]
    differ = {name for name, weight in both[0].items() if not torch.equal(weight, both[1][name])}
    assert differ == {name for name in both[0] if ".layers." in name and both[0][name].ndim == 2}
    assert len(differ) == 14


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "fsdp3"])
def test_the_schedule_reaches_both_optimizers(ranks: RankPool, layout: str) -> None:
    """Without gradients only decay is left: a step scales matrices by 1 - rate x decay, norms not at all."""
    for weights, rates in ranks(
        Layout.parse(layout).world_size, trained, layout, {"optimizer": {"weight_decay": 0.5}}, NoLabels, 1.0
    ):
        assert rates == pytest.approx(
            [RATE / 2, RATE, RATE / 10]
        )  # warm-up over 2 steps, then the last of a cosine
        left = 1.0
        for rate in rates:
            left *= 1 - 0.5 * rate
        for name, weight in weights.items():
            expected = left if weight.ndim == 2 else 1.0
            torch.testing.assert_close(weight, torch.full_like(weight, expected), msg=name)


def parts_owned(name: str, pieces: str) -> dict[str, bool]:
    """For what this rank owns of the matrices of a single block, whether it is whole."""
    run = run_spec("fsdp4", optimizer={"name": name}, sharding={"pieces": pieces})
    spec = TINY.replace({"num_hidden_layers": 1})
    trainer = Trainer(run, spec, Mesh(run.layout), data=SyntheticDataset(TINY.vocab_size, LENGTH, seed=4))
    matrices = trainer.parallel.block_matrices
    return {o.name: o.is_whole for unit in trainer.parallel.units for o in unit.owned if o.name in matrices}


def test_auto_leaves_matrices_whole_for_muon(ranks: RankPool) -> None:
    """A block does not balance over 4 ranks, so AdamW's matrices are cut by rows, and Muon's are not."""
    muon = ranks(4, parts_owned, "muon", "auto")
    assert sum(len(owned) for owned in muon) == 7
    assert all(all(owned.values()) for owned in muon)
    assert muon == ranks(4, parts_owned, "muon", "blocks")
    assert not all(all(owned.values()) for owned in ranks(4, parts_owned, "adamw", "auto"))


@pytest.mark.parametrize("pieces", ["rows", "flat"])
def test_pieces_that_cut_matrices_are_refused_before_anything_starts(pieces: str) -> None:
    sharding = {"pieces": pieces}
    for layout in ("fsdp4", "dp2,fsdp4", "fsdp4:zero1"):
        with pytest.raises(UserError) as caught:
            run_spec(layout, sharding=sharding)
        [message] = caught.value.messages
        assert f"sharding.pieces='{pieces}' cuts matrices over fsdp=4 (Batch axis)" in message
        assert "use sharding.pieces='blocks' or 'auto', or optimizer.name='adamw'" in message
    for fine in (
        run_spec("dp4", sharding=sharding),
        run_spec("fsdp4", sharding=sharding, optimizer={"name": "adamw"}),
        run_spec("fsdp4", sharding={"pieces": "matrices"}),
    ):
        fine.check(world_size=4)


def events_of_updates(layout: str) -> tuple[list[Event], list[Event], int]:
    """What the optimizers alone send, what a whole update sends, and how many matrices are this rank's."""
    run = run_spec(layout)
    trainer = Trainer(run, TINY, Mesh(run.layout), data=SyntheticDataset(TINY.vocab_size, LENGTH, seed=4))
    trainer.step(0)
    both = optimizers(trainer.parallel, run.optimizer)
    with record() as by_optimizers:
        for optimizer in both:
            optimizer.step()
    update = Update(trainer.parallel, both, clip_norm=1.0)
    with record() as by_update:
        update(torch.zeros((), dtype=torch.float64))
    matrices = [
        len(group["params"])
        for optimizer in both
        if isinstance(optimizer, torch.optim.Muon)
        for group in optimizer.param_groups
    ]
    return list(by_optimizers), list(by_update), sum(matrices)


def test_the_update_sends_the_norm_and_nothing_else(ranks: RankPool) -> None:
    for layout in ("fsdp3", "dp2"):
        results = ranks(Layout.parse(layout).world_size, events_of_updates, layout)
        norm = [Event("all_reduce", "fsdp", 8, "float64")] if layout == "fsdp3" else []
        assert [(alone, whole_update) for alone, whole_update, _ in results] == [([], norm)] * len(results)
        matrices = [count for _, _, count in results]
        assert all(matrices)
        assert sum(matrices) == (14 if layout == "fsdp3" else 14 * 2)  # each has one owner, or one a replica
