"""The oracle catches what goes wrong: each fault is put into real ranks, and must be found and named."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold.assembly import parallelize
from fourfold.batch.units import Unit
from fourfold.channel.tensor_parallel import TensorParallel
from fourfold.collectives import Pending
from fourfold.data import Dataset, SyntheticDataset
from fourfold.mesh import Mesh
from fourfold.models import IGNORE, Decoder, Microbatch
from fourfold.oracle import Oracle
from fourfold.parallel_model import ParallelModel
from fourfold.program import Action, Kind
from fourfold.sequence import ops
from fourfold.specs import Layout, ModelSpec
from fourfold.verify import Verification, verify
from tests.ranks import RankPool

TINY = ModelSpec.preset("tiny")
DATA = SyntheticDataset(TINY.vocab_size, sequence_length=24, seed=3)
PARAMETERS = set(TINY.parameter_shapes())
UNIT = 1
HIT = "model.layers.1.mlp.up_proj.weight"

Update = Callable[[Tensor], None]
Fault = Callable[[pytest.MonkeyPatch], Dataset]

step_without_fault = ParallelModel.step
reduce_without_fault = Unit.reduce


def in_unit(layout: str) -> set[str]:
    """The parameters of the unit that a fault strikes, on this rank."""
    with torch.device("meta"):
        model = Decoder(TINY)
    return {slot.name for slot in parallelize(model, mesh=Mesh(Layout.parse(layout))).units[UNIT].slots}


def found(layout: str, fault: Fault, steps: int, options: dict[str, Any]) -> Verification:
    """Run `verify` on this rank with the fault in place. The rank lives on: it is taken out again."""
    with pytest.MonkeyPatch.context() as patch:
        data = fault(patch)
        oracle = Oracle(TINY, data, batch=options.pop("batch", 6), steps=steps, seed=0)
        return verify(oracle, Mesh(Layout.parse(layout)), **options)


def outcome(
    ranks: RankPool, fault: Fault, steps: int = 1, layout: str = "dp2", **options: Any
) -> Verification:
    results = ranks(Layout.parse(layout).world_size, found, layout, fault, steps, options)
    assert all(result == results[0] for result in results), "ranks disagree about the outcome"
    return results[0]


def failing(verification: Verification) -> dict[str, Any]:
    """What is outside its tolerance."""
    return {
        "loss": not verification.loss.passes,
        "norm": not verification.norm.passes,
        "gradients": {difference.name for difference in verification.gradients if not difference.passes},
        "weights": {difference.name for difference in verification.weights if not difference.passes},
        "tokens": not verification.tokens_agree,
    }


def none_in_place(patch: pytest.MonkeyPatch) -> Dataset:
    return DATA


def test_without_a_fault_nothing_fails(ranks: RankPool) -> None:
    """So what the other tests find is what they put in; and every parameter is compared, by name."""
    verification = outcome(ranks, none_in_place, steps=2)
    assert verification.passes
    assert failing(verification) == {
        "loss": False, "norm": False, "gradients": set(), "weights": set(), "tokens": False,
    }  # fmt: skip
    for differences in (verification.gradients, verification.weights):
        assert {difference.name for difference in differences} == PARAMETERS
        assert len(differences) == len(PARAMETERS)


def without_one_reduction(patch: pytest.MonkeyPatch) -> Dataset:
    def step(
        self: ParallelModel, batches: Sequence[Microbatch], *, valid_tokens: int, update: Update
    ) -> Tensor:
        actions = [a for a in self.program.ranks[0] if a != Action(Kind.REDUCE, UNIT)]
        return self.executor.step(actions, batches, valid_tokens=valid_tokens, update=update)

    patch.setattr(ParallelModel, "step", step)
    return DATA


def test_a_skipped_reduction(ranks: RankPool) -> None:
    """Every rank keeps its own gradient of one unit: exactly that unit's parameters are named."""
    verification = outcome(ranks, without_one_reduction)
    [struck, _] = ranks(2, in_unit, "dp2")
    assert 5 < len(struck) < len(PARAMETERS)
    assert not verification.passes
    assert failing(verification) == {
        "loss": False, "norm": True, "gradients": struck, "weights": struck, "tokens": False,
    }  # fmt: skip
    assert verification.to_json()["gradient_worst"] in struck


def mean_over_ranks(patch: pytest.MonkeyPatch) -> Dataset:
    def reduce(self: Unit) -> Pending:
        self.gradient /= 2
        return reduce_without_fault(self)

    patch.setattr(Unit, "reduce", reduce)
    return DATA


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "fsdp2:zero1"])
def test_a_mean_over_ranks(ranks: RankPool, layout: str) -> None:
    """All gradients, and the norm, are half of what they should be; an optimizer like Adam would hide it."""
    verification = outcome(ranks, mean_over_ranks, layout=layout)
    assert not verification.passes
    assert failing(verification) == {
        "loss": False, "norm": True, "gradients": PARAMETERS, "weights": PARAMETERS, "tokens": False,
    }  # fmt: skip
    assert verification.norm.error == pytest.approx(0.5)
    assert [difference.error for difference in verification.gradients] == pytest.approx(
        [0.5] * len(PARAMETERS)
    )


def local_token_count(patch: pytest.MonkeyPatch) -> Dataset:
    def step(
        self: ParallelModel, batches: Sequence[Microbatch], *, valid_tokens: int, update: Update
    ) -> Tensor:
        local = sum(int((batch.labels_BS != IGNORE).sum()) for batch in batches)
        return step_without_fault(self, batches, valid_tokens=local, update=update)

    patch.setattr(ParallelModel, "step", step)
    return DATA


def test_a_division_by_the_local_token_count(ranks: RankPool) -> None:
    """Each rank divides by its own labels, and they differ: gradients have neither sum nor scale."""
    verification = outcome(ranks, local_token_count)
    assert len(set(verification.valid_tokens)) == 2
    assert not verification.passes
    assert failing(verification) == {
        "loss": False, "norm": True, "gradients": PARAMETERS, "weights": PARAMETERS, "tokens": False,
    }  # fmt: skip


def rows_of_a_rank_left_out(patch: pytest.MonkeyPatch) -> Dataset:
    def step(
        self: ParallelModel, batches: Sequence[Microbatch], *, valid_tokens: int, update: Update
    ) -> Tensor:
        if self.mesh.rank == 1:
            batches = [replace(b, labels_BS=torch.full_like(b.labels_BS, IGNORE)) for b in batches]
        return step_without_fault(self, batches, valid_tokens=valid_tokens, update=update)

    patch.setattr(ParallelModel, "step", step)
    return DATA


def test_the_rows_of_one_rank_left_out(ranks: RankPool) -> None:
    verification = outcome(ranks, rows_of_a_rank_left_out)
    assert not verification.passes
    assert failing(verification) == {
        "loss": True, "norm": True, "gradients": PARAMETERS, "weights": PARAMETERS, "tokens": False,
    }  # fmt: skip
    of_both, of_rank_0 = sum(verification.valid_tokens), verification.valid_tokens[0]
    assert verification.loss.error == pytest.approx(1 - of_rank_0 / of_both, abs=0.05)


@dataclass(frozen=True)
class TheSameRowsForAll(SyntheticDataset):
    """Every rank is given the rows of rank 0."""

    def rows(self, step: int, batch: int, rows: range) -> Microbatch:
        """Return the first rows, unless all or single rows are asked for, as the reference does."""
        shifted = range(len(rows)) if 1 < len(rows) < batch else rows
        return super().rows(step, batch, shifted)


def rows_taken_twice(patch: pytest.MonkeyPatch) -> Dataset:
    return TheSameRowsForAll(TINY.vocab_size, 24, seed=3)


def test_rows_taken_twice(ranks: RankPool) -> None:
    """All ranks compute on the first rank's rows: the count of labels does not fit, nor anything else."""
    verification = outcome(ranks, rows_taken_twice)
    assert not verification.passes
    assert failing(verification) == {
        "loss": True, "norm": True, "gradients": PARAMETERS, "weights": PARAMETERS, "tokens": True,
    }  # fmt: skip


def change_gradient(change: Callable[[Tensor], Tensor], patch: pytest.MonkeyPatch) -> Dataset:
    def step(
        self: ParallelModel, batches: Sequence[Microbatch], *, valid_tokens: int, update: Update
    ) -> Tensor:
        def changed(loss_sum: Tensor) -> None:
            gradient = dict(self.named_gradients())[HIT]
            gradient.copy_(change(gradient))
            update(loss_sum)

        return step_without_fault(self, batches, valid_tokens=valid_tokens, update=changed)

    patch.setattr(ParallelModel, "step", step)
    return DATA


def slightly_larger(gradient: Tensor) -> Tensor:
    return gradient * (1 + 1e-8)


def one_element_not_a_number(gradient: Tensor) -> Tensor:
    gradient[3, 1] = torch.nan
    return gradient


def test_a_gradient_larger_by_one_in_a_hundred_million(ranks: RankPool) -> None:
    verification = outcome(ranks, partial(change_gradient, slightly_larger))
    assert not verification.passes
    assert failing(verification)["gradients"] == {HIT}
    assert verification.to_json()["gradient_worst"] == HIT
    assert verification.gradients[0].error == pytest.approx(1e-8, rel=1e-3)
    assert verification.loss.passes


def test_a_gradient_with_one_element_that_is_not_a_number(ranks: RankPool) -> None:
    verification = outcome(ranks, partial(change_gradient, one_element_not_a_number))
    assert not verification.passes
    assert failing(verification) == {
        "loss": False, "norm": True, "gradients": {HIT}, "weights": {HIT}, "tokens": False,
    }  # fmt: skip
    assert verification.gradients[0].error == float("inf")


def drift_on_one_rank(patch: pytest.MonkeyPatch) -> Dataset:
    def step(
        self: ParallelModel, batches: Sequence[Microbatch], *, valid_tokens: int, update: Update
    ) -> Tensor:
        def drifting(loss_sum: Tensor) -> None:
            update(loss_sum)
            if self.mesh.rank == 1:
                dict(self.named_masters())[HIT][3, 1] += 1e-6

        return step_without_fault(self, batches, valid_tokens=valid_tokens, update=drifting)

    patch.setattr(ParallelModel, "step", step)
    return DATA


def test_a_weight_that_drifts_on_one_rank(ranks: RankPool) -> None:
    """One element on rank 1 after the update, by 1e-6. Every rank learns of it, not rank 1 alone."""
    verification = outcome(ranks, drift_on_one_rank)
    assert not verification.passes
    assert failing(verification) == {
        "loss": False, "norm": False, "gradients": set(), "weights": {HIT}, "tokens": False,
    }  # fmt: skip
    later = outcome(ranks, drift_on_one_rank, steps=3)
    assert not later.norm.passes
    assert later.weights[0].name == HIT


@dataclass(frozen=True)
class OneTokenTooMany(SyntheticDataset):
    """Says that one more label counts than is there."""

    def valid_tokens(self, step: int, batch: int) -> int:
        """Return the wrong number."""
        return super().valid_tokens(step, batch) + 1


def one_token_too_many(patch: pytest.MonkeyPatch) -> Dataset:
    return OneTokenTooMany(TINY.vocab_size, 24, seed=3)


def test_a_wrong_count_of_valid_tokens(ranks: RankPool) -> None:
    """The reference divides by the same wrong count, so nothing differs: the count itself must be checked."""
    verification = outcome(ranks, one_token_too_many)
    assert not verification.passes
    assert verification.to_json()["pass"] is False
    assert failing(verification) == {
        "loss": False, "norm": False, "gradients": set(), "weights": set(), "tokens": True,
    }  # fmt: skip


def test_a_mean_over_ranks_in_low_precision(ranks: RankPool) -> None:
    """The tolerance of bfloat16 is wide, not blind."""
    for dtype in ("float32", "bfloat16"):
        verification = outcome(ranks, mean_over_ranks, dtype=dtype)
        assert not verification.passes
        assert not verification.norm.passes
        assert not any(difference.passes for difference in verification.gradients)


def without(skipped: Callable[[Action, int], bool], patch: pytest.MonkeyPatch) -> Dataset:
    """Leave actions of one unit out, given the action and how many steps went before."""
    steps = 0

    def step(
        self: ParallelModel, batches: Sequence[Microbatch], *, valid_tokens: int, update: Update
    ) -> Tensor:
        nonlocal steps
        actions = [a for a in self.program.ranks[0] if a.place != UNIT or not skipped(a, steps)]
        steps += 1
        return self.executor.step(actions, batches, valid_tokens=valid_tokens, update=update)

    patch.setattr(ParallelModel, "step", step)
    return DATA


def over_replicas(action: Action, _: int) -> bool:
    return action.kind is Kind.ALL_REDUCE


def later_gathers(action: Action, steps: int) -> bool:
    return action.kind is Kind.GATHER and steps > 0


def test_replicas_that_are_not_summed(ranks: RankPool) -> None:
    """Each replica of a unit's pieces takes a way of its own, and every rank of both learns of it."""
    # FS-08
    verification = outcome(ranks, partial(without, over_replicas), layout="dp2,fsdp2", batch=12)
    struck = ranks(4, in_unit, "dp2,fsdp2")[0]
    assert failing(verification) == {
        "loss": False, "norm": True, "gradients": struck, "weights": struck, "tokens": False,
    }  # fmt: skip


def test_weights_of_the_step_before(ranks: RankPool) -> None:
    """ZeRO-1 without one unit's gather from the second step on: weights there are, but stale."""
    # FS-10
    assert outcome(ranks, partial(without, later_gathers), layout="fsdp2:zero1", steps=1).passes
    verification = outcome(ranks, partial(without, later_gathers), layout="fsdp2:zero1", steps=2)
    assert not verification.passes
    assert not verification.loss.passes


def sums_that_tp_rank_1_halves(patch: pytest.MonkeyPatch) -> Dataset:
    """Behind the second layer's MLP, so that no later sum spreads it in that layer."""
    leave = TensorParallel.leave
    calls = [0]
    of_a_step = 1 + 2 * TINY.num_hidden_layers  # the embedding, then attention and MLP of each layer

    def halved(self: TensorParallel, partial_BSC: Tensor) -> Tensor:
        out = leave(self, partial_BSC)
        calls[0] += 1
        return out / 2 if self.axis.rank == 1 and calls[0] % of_a_step == 5 else out

    patch.setattr(TensorParallel, "leave", halved)
    return DATA


def test_where_a_forward_goes_wrong(ranks: RankPool) -> None:
    verification = outcome(ranks, sums_that_tp_rank_1_halves, layout="dp2,tp2:allreduce", batch=2)
    assert verification.where.startswith("first difference: forward of layer.1 on ranks 1, 3, relative error")
    assert verification.where.endswith("what communicates there: tp (Channel axis)")


def gradients_that_the_ring_loses(patch: pytest.MonkeyPatch) -> Dataset:
    backward = ops.ring_backward

    def lossy(*args: Any, **kwargs: Any) -> Any:
        dq, dk, dv = backward(*args, **kwargs)
        return dq, dk * 0, dv

    patch.setattr(ops, "ring_backward", lossy)
    return DATA


def test_where_a_backward_goes_wrong(ranks: RankPool) -> None:
    """The last layer's backward is the first that attends; what its own output is given is still right."""
    verification = outcome(ranks, gradients_that_the_ring_loses, layout="cp2:ring")
    assert verification.where.startswith("first difference: backward of layer.3 on ranks 0, 1")
    assert verification.where.endswith("what communicates there: cp (Sequence axis)")


def test_where_sums_go_wrong(ranks: RankPool) -> None:
    verification = outcome(ranks, without_one_reduction)
    assert verification.where == (
        "first difference: sums of the weight gradients on ranks 0, 1; what communicates there: "
        "dp (Batch axis)"
    )
