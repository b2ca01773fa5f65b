"""Recomputation as it runs: the same bits, as many forwards as planned, and as little memory."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.assembly import parallelize
from fourfold.batch.rank_units import rank_units_
from fourfold.batch.unit_specs import unit_specs
from fourfold.build import UnitUse, build
from fourfold.data import SyntheticDataset
from fourfold.execute import Executor
from fourfold.initialize import initialize_
from fourfold.layer.schedules import gpipe, one_forward_one_backward
from fourfold.mesh import Mesh
from fourfold.models import Decoder, Microbatch, Piece
from fourfold.parallel_model import ParallelModel
from fourfold.program import Kind, Program
from fourfold.program.liveness import Block, peak_bytes
from fourfold.recompute.plan import forwards, plan
from fourfold.segment import Segment
from fourfold.specs import Layout, ModelSpec
from fourfold.specs.recompute_name import RecomputeName
from fourfold.training import initialized, rank_batches
from fourfold.weight_gradients import WeightGradients
from tests.memory import counting_kept_bytes
from tests.programs import REPLICAS
from tests.ranks import RankPool

POLICIES = [
    "full", "every:2", "sqrt", "slots:2", "min", "budget:0.0006", "selective", "selective:attention"
]  # fmt: skip
MICROBATCHES, BATCH, LENGTH = 3, 12, 16
TINY = ModelSpec.preset("tiny")


def model_on(mesh: Mesh, policy: str, dtype: str = "float32") -> ParallelModel:
    return initialized(
        TINY,
        mesh,
        microbatches=MICROBATCHES,
        dtype=dtype,
        seed=0,
        sequence_length=LENGTH,
        batch=BATCH,
        recompute=RecomputeName.parse(policy),
    )


Hook = Callable[[nn.Module, object, Tensor], Tensor]
"""A forward hook of a layer: gives what comes in place of the output."""


def noisy(layer: nn.Module, _: object, output: Tensor) -> Tensor:
    """Dropout, and a scale that grows with each forward and is kept in a buffer."""
    seen = layer.seen
    assert isinstance(seen, Tensor)
    out = F.dropout(output, 0.5, training=True) * (1 + seen / 8)
    seen.add_(1)
    return out


def positive(_: nn.Module, __: object, output: Tensor) -> Tensor:
    """Keeps for its backward which of the output is positive."""
    return F.relu(output)


def own_noise(_: nn.Module, __: object, output: Tensor) -> Tensor:
    """Keeps the random numbers that it drew, where the output is negative."""
    return F.rrelu(output, 0.1, 0.9, training=True)


def steps(layout: str, policy: str, *, hook: Hook | None, seed: int = 7) -> tuple[list[Tensor], bool]:
    """Two steps: losses, whole gradients, the random state and the buffers at the end; whether any R ran."""
    mesh = Mesh(Layout.parse(layout))
    parallel = model_on(mesh, policy)
    layers = list(parallel.model.model.layers)
    for layer in layers if hook else ():
        assert hook is not None
        layer.register_buffer("seen", torch.zeros((), dtype=torch.float32))
        layer.register_forward_hook(hook)
    torch.manual_seed(seed)
    data = SyntheticDataset(TINY.vocab_size, LENGTH, 3)
    found: list[Tensor] = []

    def update(_: Tensor) -> None:
        found.extend(g.clone() for _, g in sorted(parallel.named_gradients(), key=lambda pair: pair[0]))

    for step in range(2):
        batches = rank_batches(data, mesh, step=step, batch=BATCH, microbatches=MICROBATCHES)
        found.append(parallel.step(batches, valid_tokens=data.valid_tokens(step, BATCH), update=update))
    found.append(torch.get_rng_state())
    found.extend(buffer for layer in layers for buffer in layer.buffers())
    actions = parallel.program.ranks[mesh.pp.rank]
    return found, any(action.kind is Kind.RECOMPUTE for action in actions)


def differing(layout: str, hook: Hook | None, policies: list[str]) -> list[str]:
    """The policies that do not give the bits of none."""
    expected, again = steps(layout, "none", hook=hook)
    assert not again
    wrong = []
    for policy in policies:
        found, again = steps(layout, policy, hook=hook)
        same = len(found) == len(expected) and all(map(torch.equal, found, expected))
        if not (same and again):
            wrong.append(policy)
    return wrong


@pytest.mark.parametrize("hook", [None, noisy, positive, own_noise])
def test_one_rank_gets_the_same_bits(hook: Hook | None) -> None:
    """Loss, gradients, the random state afterwards, and buffers, which count each forward once."""
    # AC-01, AC-05
    assert differing("dp1", hook, POLICIES) == []


@pytest.mark.parametrize(
    ("layout", "hook", "policies"),
    [
        ("dp2", noisy, ["full", "min", "selective"]),
        ("fsdp2", noisy, ["full", "min", "selective", "every:2", "budget:0.0003"]),
        ("pp2:1f1b", noisy, ["full", "min", "selective"]),
        ("pp2:gpipe", noisy, ["full", "min", "selective"]),
        ("pp2:zb-h1", noisy, [policy for policy in POLICIES if "budget" not in policy]),
        ("tp2", noisy, ["full", "min", "selective", "slots:2"]),
        ("tp2", positive, ["selective", "selective:gather+sum"]),
        ("cp2", noisy, ["full", "min", "selective", "selective:attention"]),
    ],
)
def test_ranks_get_the_same_bits(ranks: RankPool, layout: str, hook: Hook, policies: list[str]) -> None:
    assert ranks(2, differing, layout, hook, policies) == [[], []]


def test_dropout_would_show() -> None:
    """What the tests above hold is not trivial: other random numbers give another loss and gradients."""
    first, _ = steps("dp1", "full", hook=noisy)
    second, _ = steps("dp1", "full", hook=noisy, seed=8)
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])


def test_frozen_first_layers_change_nothing() -> None:
    """With the embedding and the first layer frozen, the others have the same gradients as without R."""
    # AC-03
    results = []
    for policy in ("none", "full", "min"):
        with torch.device("meta"):
            model = Decoder(TINY)
        for frozen in (model.model.embed_tokens, model.model.layers[0]):
            frozen.requires_grad_(False)
        parallel = parallelize(model, mesh=Mesh(Layout()), recompute=RecomputeName.parse(policy))
        initialize_(parallel.weights.masters(), model, seed=0, std=0.02)
        parallel.publish_()
        batch = SyntheticDataset(TINY.vocab_size, LENGTH, 3).rows(0, 2, range(2))
        parallel.step([batch], valid_tokens=9, update=lambda _: None)
        results.append(dict(parallel.named_gradients()))
    assert results[0]
    for other in results[1:]:
        assert sorted(other) == sorted(results[0])
        assert all(torch.equal(other[name], gradient) for name, gradient in results[0].items())


BLOCKS = 64


class Chain(nn.Module):
    """Blocks alike, the first from the token ids, the last a loss; it counts the forwards of each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(BLOCKS))
        self.forwards = [0] * BLOCKS

    def pieces(self) -> list[Piece]:
        return [Piece(str(i), (block,), self._forward(i)) for i, block in enumerate(self.blocks)]

    def _forward(self, i: int) -> Callable[[Tensor | None, Microbatch], Tensor]:
        def forward(x: Tensor | None, batch: Microbatch) -> Tensor:
            self.forwards[i] += 1
            if x is None:
                x = batch.input_ids_BS[..., None].float().expand(*batch.input_ids_BS.shape, 8) / 100
            y = torch.tanh(self.blocks[i](x))
            return y.sum() if i == BLOCKS - 1 else y

        return forward


def chain(policy: str, *, all_first: bool = False) -> tuple[Chain, Program, Callable[[], Tensor]]:
    """The chain, its program on one rank, and what runs a step of two microbatches and returns gradients."""
    torch.manual_seed(3)
    model = Chain()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    mesh = Mesh(Layout())
    [spec] = unit_specs(
        model, {"all": (model,)}, rank_of_segment=[0], shards=1, pieces="flat", dtype=torch.float32
    )
    [unit] = rank_units_(model, [spec], mesh=mesh, dtype=torch.float32).values()
    unit.load_(values.__getitem__)
    weight_gradients = WeightGradients()
    weight_gradients.attach_(model)
    program = build(
        (gpipe if all_first else one_forward_one_backward)(ranks=1, microbatches=2),
        segments_of_stage=[BLOCKS],
        units=[UnitUse(tuple(range(BLOCKS)))],
        sharding=REPLICAS,
        recompute=RecomputeName.parse(policy),
        blocks=[Block()] * BLOCKS,
    )
    executor = Executor(
        program,
        {i: Segment(piece, weight_gradients) for i, piece in enumerate(model.pieces())},
        {0: unit},
        weight_gradients=weight_gradients,
        mesh=mesh,
        activation=lambda _: pytest.fail("one rank receives nothing"),
    )
    data = SyntheticDataset(50, 12, 1)
    batches = [data.rows(0, 2, range(m, m + 1)) for m in range(2)]

    def step() -> Tensor:
        executor.step(program.ranks[0], batches, valid_tokens=24, update=lambda _: None)
        return unit.summed.clone()

    return model, program, step


ALL_POLICIES = ["none", "full", "every:8", "sqrt", "slots:8", "slots:4", "slots:3", "slots:2", "min"]


@pytest.mark.parametrize(
    ("policy", "each"),
    list(zip(ALL_POLICIES, [64, 127, 120, 120, 201, 264, 322, 484, 2080], strict=True)),
)
def test_as_many_forwards_run_as_planned(policy: str, each: int) -> None:
    """Of 64 blocks, two microbatches, their backwards at once."""
    model, program, step = chain(policy)
    gradient = step()
    name = RecomputeName.parse(policy)
    assert forwards(plan(name, [Block()] * BLOCKS, at_once=True)) == each
    assert sum(model.forwards) == 2 * each
    assert sum(action.kind in (Kind.FORWARD, Kind.RECOMPUTE) for action in program.ranks[0]) == 2 * each
    assert torch.equal(gradient, chain("none")[2]())


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_no_more_is_kept_than_planned(policy: str) -> None:
    """What autograd keeps at most, in tapes of one block: as many as the program says, and nothing after."""
    _, program, step = chain(policy, all_first=True)
    with counting_kept_bytes() as kept:
        step()
        assert kept.now_bytes == 0
    tapes = peak_bytes(program, [Block(1.0, 0, 1)] * BLOCKS)[0]
    one = 2 * 12 * 8 * 4  # the linear layer's input and tanh's output: 12 tokens of 8 channels in float32
    assert kept.peak_bytes == tapes * one
    expected = {"none": 2 * BLOCKS, "full": 1, "every:8": 8, "sqrt": 8}
    assert tapes == expected.get(policy, 1)
