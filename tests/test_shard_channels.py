"""Any module, cut by columns and rows and then sharded: the numbers of one process."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from fourfold import Layout, Mesh, ModelSpec, SyntheticDataset, UserError, rank_batches, shard
from fourfold.channel.plans import Branch, Columns, Plan, decoder_plan
from fourfold.channel.tensor_parallel import tensor_parallel_
from fourfold.channel.vocabulary import vocabulary_parallel_cross_entropy_sum
from fourfold.collectives import all_reduce_
from fourfold.initialize import normal
from fourfold.models import Decoder
from fourfold.sharded_module import ShardedModule
from tests.ranks import RankPool

# Tied, with q/k norms inside a branch, a vocabulary that no number of ranks divides, and on four ranks of tp
# two copies of each key/value head.
SPEC = ModelSpec.preset("tiny-qwen3").replace(
    {"vocab_size": 61, "num_hidden_layers": 2, "num_key_value_heads": 2}
)
LENGTH, BATCH, STEPS = 16, 4, 3


def sharded_on(mesh: Mesh, *, cut_stream: bool, on_meta: bool) -> ShardedModule:
    """A decoder, as any module, whose values follow from names and places or from torch's seed."""
    torch.manual_seed(0)
    with torch.device("meta" if on_meta else "cpu"):
        model = Decoder(SPEC).double()
    parallel = None
    if mesh.tp.size > 1:
        parallel = tensor_parallel_(model, decoder_plan(SPEC), mesh.tp, sequence_parallel=cut_stream)

    def initialize(name: str, first: int, target: Tensor) -> None:
        target.copy_(normal(0, name, first, len(target)))

    return shard(
        model,
        blocks=list(model.model.layers),
        mesh=mesh,
        tensor_parallel=parallel,
        initialize=initialize if on_meta else None,
    )


Trained = tuple[list[float], list[float], dict[str, Tensor]]
"""Losses, norms of gradients, and the weights in the end."""


def trained(layout: str, cut_stream: bool = False) -> Trained:
    mesh = Mesh(Layout.parse(layout))
    sharded = sharded_on(mesh, cut_stream=cut_stream, on_meta=False)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    data = SyntheticDataset(SPEC.vocab_size, sequence_length=LENGTH, seed=0)
    first = SPEC.vocab_size * mesh.tp.rank // mesh.tp.size
    losses, norms = [], []
    for step in range(STEPS):
        [batch] = rank_batches(data, mesh, step=step, batch=BATCH, microbatches=1)
        loss = vocabulary_parallel_cross_entropy_sum(
            sharded.module(batch), batch.labels_BS, axis=mesh.tp, first=first, vocab_size=SPEC.vocab_size
        ) / data.valid_tokens(step, BATCH)
        loss.backward()
        sharded.reduce_gradients()
        norms.append(sharded.clip_(0.5))
        optimizer.step()
        losses.append(float(all_reduce_(loss.detach().clone(), mesh.data)))
    return losses, norms, sharded.state_dict()


@cache
def on_one_process() -> Trained:
    return trained("dp1")


@pytest.mark.parametrize(
    ("layout", "cut_stream"),
    [("tp2", False), ("tp2", True), ("tp4", True), ("tp4", False), ("fsdp2,tp2", True), ("dp2,tp2", False),
     ("fsdp2:zero1,tp2", True), ("fsdp2:zero2,tp2", False)],
)  # fmt: skip
def test_losses_norms_and_weights(layout: str, cut_stream: bool, ranks: RankPool) -> None:
    losses, norms, weights = on_one_process()
    for found in ranks(Layout.parse(layout).world_size, trained, layout, cut_stream):
        assert found[0] == pytest.approx(losses, rel=1e-12)
        assert found[1] == pytest.approx(norms, rel=1e-12)
        assert found[2].keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(found[2][name], weight, rtol=0, atol=1e-12, msg=name)


def made_and_loaded(layout: str) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    sharded = sharded_on(Mesh(Layout.parse(layout)), cut_stream=False, on_meta=True)
    made = sharded.state_dict()
    sharded.load_state_dict({name: 2 * weight for name, weight in made.items()})
    with pytest.raises(UserError) as caught:
        sharded.load_state_dict(made | {"model.layers.0.mlp.up_proj.weight": torch.zeros(30, 32)})
    return made, sharded.state_dict(), str(caught.value)


@pytest.mark.parametrize("layout", ["tp4", "fsdp2,tp2"])
def test_weights_are_made_in_pieces_and_go_in_and_out_whole(layout: str, ranks: RankPool) -> None:
    # FS-04
    expected, _, refused = made_and_loaded("dp1")
    assert refused == "model.layers.0.mlp.up_proj.weight has the shape (30, 32), in the module (88, 32)"
    for made, loaded, message in ranks(4, made_and_loaded, layout):
        assert made.keys() == loaded.keys() == expected.keys()
        assert message == refused
        for name, weight in expected.items():
            assert torch.equal(made[name], weight), name
            assert torch.equal(loaded[name], 2 * weight), name


class FusedMLP(nn.Module):
    """Gate and up in one matrix, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(3, 8, bias=False), nn.Linear(4, 3, bias=False)

    def forward(self, x_BSC: Tensor) -> Tensor:
        gate, up = self.gate_up(x_BSC).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up)


class FusedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = FusedMLP()
        with torch.no_grad():  # each row is its own number
            self.mlp.gate_up.weight.copy_(torch.arange(8.0)[:, None].expand(8, 3))
            self.mlp.down.weight.copy_(torch.arange(12.0).view(3, 4))

    def forward(self, x_BSC: Tensor) -> Tensor:
        return self.mlp(x_BSC)


def fused(layout: str, pieces: str) -> tuple[list[float], Tensor, Tensor, Tensor]:
    """The rows that tp leaves this rank; output, whole weight and whole summed gradient of a fused matrix."""
    mesh, net = Mesh(Layout.parse(layout)), FusedNet().double()
    plan = Plan({"mlp": Branch({"gate_up": Columns(fused=2)}, ("down",))})
    parallel = tensor_parallel_(net, plan, mesh.tp, sequence_parallel=False) if mesh.tp.size > 1 else None
    rows = net.mlp.gate_up.weight[:, 0].tolist()
    sharded = shard(net, blocks=[net.mlp], mesh=mesh, pieces=pieces, tensor_parallel=parallel)
    out = net(torch.ones(1, 1, 3, dtype=torch.float64) / 8)
    out.sum().backward()
    sharded.reduce_gradients()
    weight = sharded.state_dict()["mlp.gate_up.weight"]
    with torch.no_grad():
        for piece in sharded.parameters():
            if piece.grad is not None:
                piece.sub_(piece.grad, alpha=1 / mesh.fsdp.size)
    stepped = sharded.state_dict()["mlp.gate_up.weight"]
    return rows, out.detach(), weight, weight - stepped


@pytest.mark.parametrize("pieces", ["rows", "flat"])
def test_fused_matrices_are_cut_each_and_come_back_in_order(pieces: str, ranks: RankPool) -> None:
    """Gate rows 0 to 3 and up rows 4 to 7: on tp2, and each half in two pieces on fsdp2."""
    # TP-10, FS-05
    _, out, weight, gradient = fused("dp1", pieces)
    assert weight[:, 0].tolist() == list(range(8))
    for rank, found in enumerate(ranks(4, fused, "fsdp2,tp2", pieces)):
        assert found[0] == ([0, 1, 4, 5], [2, 3, 6, 7])[rank % 2]
        assert torch.equal(found[2], weight)
        torch.testing.assert_close(found[1], out, rtol=1e-14, atol=0)
        torch.testing.assert_close(found[3], gradient, rtol=1e-12, atol=1e-12)


def refusals() -> tuple[str, str]:
    mesh = Mesh(Layout(tp=2))
    model = Decoder(SPEC)
    with pytest.raises(UserError) as without:
        shard(model, blocks=list(model.model.layers), mesh=mesh)
    parallel = tensor_parallel_(model, decoder_plan(SPEC), mesh.tp, sequence_parallel=False)
    with pytest.raises(UserError) as with_one:
        shard(model, blocks=list(model.model.layers), mesh=Mesh(Layout(dp=2)), tensor_parallel=parallel)
    return str(without.value), str(with_one.value)


def test_it_must_be_cut_where_tp_is_larger_than_one_and_only_there(ranks: RankPool) -> None:
    rule = "as tensor_parallel where tp is larger than 1, and only there"
    for without, with_one in ranks(2, refusals):
        assert without == f"tp=2 (Channel axis): give what tensor_parallel_ made of the module {rule}"
        assert with_one == f"tp=1 (Channel axis): give what tensor_parallel_ made of the module {rule}"
