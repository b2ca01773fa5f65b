"""Plain modules cut in place."""

import copy
import weakref
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from fourfold.channel.parts import assembled
from fourfold.channel.plans import Branch, Columns, Plan, gpt2_plan, llama_plan
from fourfold.channel.tensor_parallel import TensorParallel, tensor_parallel_
from fourfold.channel.vocabulary import vocabulary_parallel_cross_entropy_sum
from fourfold.collectives import all_gather, record
from fourfold.data import SyntheticDataset
from fourfold.errors import UserError
from fourfold.mesh import Mesh
from fourfold.specs import Layout, ModelSpec
from fourfold.training import initialized, rank_batches
from tests.ranks import RankPool


class Net(nn.Module):
    """A stream, one branch with biases, and a norm behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))
        self.norm = nn.LayerNorm(3)

    def forward(self, x_BSC: Tensor) -> Tensor:
        return self.norm(self.branch(x_BSC))


NET_PLAN = Plan(branches={"branch": Branch({"0": Columns()}, rows=("2",))})


def summed_and_whole(parallel: TensorParallel, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The whole gradients, from what the ranks computed, by nothing but the cuts."""
    found = {}
    tp = parallel.axis
    for name, gradient in gradients.items():
        cut = parallel.cuts[name]
        parts = (
            list(all_gather(gradient[None], tp))
            if len({cut.local_shape(r) for r in range(tp.size)}) == 1
            else None
        )
        if parts is None:
            shapes = [torch.Size(cut.local_shape(rank)) for rank in range(tp.size)]
            counts = [shape.numel() for shape in shapes]
            flat = all_gather(gradient.flatten(), tp, counts=counts).split(counts)
            parts = [part.view(shape) for part, shape in zip(flat, shapes, strict=True)]
        if cut.adds_up:
            groups = [parts[first : first + cut.copies] for first in range(0, tp.size, cut.copies)]
            parts = [torch.stack(group).sum(0) for group in groups for _ in group]
        found[name] = assembled(parts, cut)
    return found


def net_on_a_rank(
    net: Net, x_BSC: Tensor, *, cut_stream: bool
) -> tuple[Tensor, dict[str, Tensor], list[str]]:
    """The output, whole; the gradients of the sum of its squares, whole; the collectives."""
    mesh = Mesh(Layout(tp=torch.distributed.get_world_size()))
    net = copy.deepcopy(net)
    parallel = tensor_parallel_(net, NET_PLAN, mesh.tp, sequence_parallel=cut_stream)
    mine = x_BSC.chunk(mesh.tp.size, 1)[mesh.tp.rank] if cut_stream else x_BSC
    with record() as events:
        out = net(mine)
        out.square().sum().backward()
    ops = [event.op for event in events]
    if cut_stream:
        out = all_gather(out.detach().transpose(0, 1).contiguous(), mesh.tp).transpose(0, 1)
    gradients = {name: parameter.grad for name, parameter in net.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    return out.detach(), summed_and_whole(parallel, gradients), ops  # type: ignore[arg-type]


@pytest.mark.parametrize("cut_stream", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_two_collectives_a_branch_and_biases_once(ranks: RankPool, size: int, cut_stream: bool) -> None:
    """Output and every gradient as on one rank: row-wise biases are added once, and learn at full speed."""
    torch.manual_seed(0)
    net = Net().double()
    x_BSC = torch.randn(2, 8, 4, dtype=torch.float64)
    expected = net(x_BSC)
    expected.square().sum().backward()
    for out, gradients, ops in ranks(size, net_on_a_rank, net, x_BSC, cut_stream=cut_stream):
        torch.testing.assert_close(out, expected.detach(), rtol=0, atol=1e-14)
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(
                gradients[name], parameter.grad, rtol=0, atol=1e-13, msg=lambda m, name=name: name + m
            )
        if cut_stream:
            assert ops == ["all_gather", "reduce_scatter", "all_gather", "reduce_scatter"][: len(ops)]
            assert len(ops) >= 3  # the stream's own gradient is asked for by nobody here
        else:
            assert ops == ["all_reduce"]


def bias_on_a_rank() -> tuple[list[float], list[float]]:
    """A row-wise layer of ones with a bias: its output for (1, 2, 3, 4), and the bias's gradient."""
    mesh = Mesh(Layout(tp=torch.distributed.get_world_size()))
    net = nn.Sequential()
    net.branch = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 3))
    with torch.no_grad():
        net.branch[0].weight.copy_(torch.eye(4))
        net.branch[1].weight.fill_(1)
        net.branch[1].bias.copy_(torch.tensor([100.0, 200, 300]))
    plan = Plan(branches={"branch": Branch({"0": Columns()}, rows=("1",))})
    tensor_parallel_(net, plan, mesh.tp, sequence_parallel=False)
    out = net.branch(torch.tensor([[[1.0, 2, 3, 4]] * 3]).view(1, 3, 4))
    out.sum().backward()
    return out[0, 0].tolist(), net.branch[1].bias.grad.tolist()


@pytest.mark.parametrize("size", [2, 4])
def test_a_row_wise_bias_counts_once(ranks: RankPool, size: int) -> None:
    # TP-01, TP-02
    assert ranks(size, bias_on_a_rank) == [([110, 210, 310], [3, 3, 3])] * size


def hugging_face(kind: str) -> tuple[Any, Plan]:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=61,
            n_positions=32,
            n_embd=16,
            n_layer=2,
            n_head=4,
            attn_pdrop=0,
            embd_pdrop=0,
            resid_pdrop=0,
        )
        return transformers.GPT2LMHeadModel(config).double(), gpt2_plan(4)
    kinds = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    }
    config_class, model_class = kinds[kind]
    config = config_class(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=4, tie_word_embeddings=kind == "qwen3", pad_token_id=5,
    )  # fmt: skip
    return model_class(config).double(), llama_plan(8, 2)


def labelled(ids_BS: Tensor) -> Tensor:
    return torch.where(ids_BS % 5 == 0, -100, ids_BS)


def transformer_on_a_rank(kind: str, ids_BS: Tensor, how: str) -> tuple[float, dict[str, Tensor]]:
    mesh = Mesh(Layout(tp=torch.distributed.get_world_size()))
    model, plan = hugging_face(kind)
    model.set_attn_implementation(how)
    parallel = tensor_parallel_(model, plan, mesh.tp, sequence_parallel=False)
    ((first, _),) = parallel.cuts[f"{plan.embedding}.weight"].runs[mesh.tp.rank]
    logits_BSV = model(input_ids=ids_BS, use_cache=False).logits
    loss = vocabulary_parallel_cross_entropy_sum(
        logits_BSV * 1, labelled(ids_BS), axis=mesh.tp, first=first, vocab_size=61
    )
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return float(loss.detach()), summed_and_whole(parallel, gradients)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gpt2"])
@pytest.mark.parametrize(("size", "how"), [(2, "sdpa"), (4, "eager")])
def test_hugging_faces_models(ranks: RankPool, kind: str, size: int, how: str) -> None:
    """Loss and every gradient; on 4 ranks each key/value head of the grouped ones is on two.

    Token 5 is padding, which gets no gradient from the embedding; 20, 35 and 50 are the row 5 of other ranks.
    """
    ids_BS = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(1))
    ids_BS[0, 1:5] = torch.tensor([5, 20, 35, 50])
    model, _ = hugging_face(kind)
    logits_BSV = model(input_ids=ids_BS, use_cache=False).logits
    expected = nn.functional.cross_entropy(
        logits_BSV.flatten(0, 1), labelled(ids_BS).flatten(), reduction="sum"
    )
    expected.backward()
    # Their RMSNorm rounds to float32 on the way, where two sums that differ in the last bit may part.
    tolerance = 1e-12 if kind == "gpt2" else 1e-6
    for loss, gradients in ranks(size, transformer_on_a_rank, kind, ids_BS, how):
        assert loss == pytest.approx(float(expected.detach()), rel=tolerance)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            error = (gradients[name] - parameter.grad).abs().max() / parameter.grad.abs().max()
            assert error < tolerance, (name, error)


def without_a_length(layout: str) -> str:
    with pytest.raises(UserError) as caught:
        initialized(
            ModelSpec.preset("tiny"), Mesh(Layout.parse(layout)), microbatches=1, dtype="float32", seed=0
        )
    return str(caught.value)


def test_nothing_is_cut_by_a_guess(ranks: RankPool) -> None:
    """Neither tokens nor layers: stages for rows of one token are others than for long ones."""
    for message in ranks(2, without_a_length, "tp2"):
        assert "give sequence_length, or use tp2:allreduce" in message
    for message in ranks(2, without_a_length, "pp2"):
        assert "pp=2 deals layers to stages by what they cost" in message
        assert "give sequence_length" in message


def replicas_after_steps(layout: str) -> dict[str, list[str]]:
    """The bits of every parameter that several ranks of tp hold alike, on each of them, after 5 steps."""
    mesh = Mesh(Layout.parse(layout))
    spec = ModelSpec.preset("tiny-qwen3").replace({"num_key_value_heads": 2, "attention_bias": True})
    parallel = initialized(spec, mesh, microbatches=1, dtype="float32", seed=0, sequence_length=16)
    data = SyntheticDataset(spec.vocab_size, 16, 0)

    def update(_: Tensor) -> None:
        for unit in parallel.units:
            unit.master.sub_(unit.summed, alpha=0.1)
        parallel.publish_()

    for step in range(5):
        batches = rank_batches(data, mesh, step=step, batch=4, microbatches=1)
        parallel.step(batches, valid_tokens=data.valid_tokens(step, 4), update=update)
    weights = dict(parallel.model.named_parameters())
    found = {}
    for name, cut in parallel.cuts.items():
        parts = all_gather(weights[name].detach().contiguous()[None], mesh.tp) if cut.copies > 1 else []
        found[name] = [
            "same" if torch.equal(parts[rank], parts[rank // cut.copies * cut.copies]) else "different"
            for rank in range(len(parts))
        ]
    return found


@pytest.mark.parametrize("layout", ["tp2", "tp4", "tp4:allreduce", "dp2,tp2"])
def test_what_ranks_hold_alike_stays_alike(ranks: RankPool, layout: str) -> None:
    """Norms, and with fewer key/value heads than ranks their projections and biases: bit for bit."""
    # TP-05
    compared = 0
    for found in ranks(4 if layout != "tp2" else 2, replicas_after_steps, layout):
        for name, verdicts in found.items():
            assert set(verdicts) <= {"same"}, name
            compared += len(verdicts) > 0
    assert compared > 0


def tape_of_a_branch(regather: bool) -> tuple[int, list[str], dict[str, Tensor], Tensor]:
    """Elements that the tape of a branch keeps, its collectives, its gradients, that of the stream."""
    mesh = Mesh(Layout(tp=torch.distributed.get_world_size()))
    torch.manual_seed(0)
    net = Net().double()
    parallel = tensor_parallel_(net, NET_PLAN, mesh.tp, sequence_parallel=True, regather=regather)
    x_BSC = torch.randn(2, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mine = x_BSC.chunk(mesh.tp.size, 1)[mesh.tp.rank].contiguous().requires_grad_()
    gathered: list[weakref.ref[Tensor]] = []
    net.branch[0].register_forward_pre_hook(lambda _, args: gathered.append(weakref.ref(args[0])))
    with record() as events:
        out = net(mine)
        alive = gathered[0]()
        kept = 0 if alive is None else alive.numel()
        del alive
        out.square().sum().backward()
    found = {name: parameter.grad for name, parameter in net.named_parameters()}
    assert mine.grad is not None
    return kept, [e.op for e in events], summed_and_whole(parallel, found), mine.grad  # type: ignore[arg-type]


def test_what_entered_a_branch_is_gathered_again(ranks: RankPool) -> None:
    """One more all_gather in the backward, nothing of all tokens kept, and gradients equal bit for bit."""
    plain, again = ranks(2, tape_of_a_branch, False), ranks(2, tape_of_a_branch, True)
    for (_, ops, gradients, of_stream), (kept, more_ops, found, found_of_stream) in zip(
        plain, again, strict=True
    ):
        assert ops == ["all_gather", "reduce_scatter", "all_gather", "reduce_scatter"]
        assert more_ops == ["all_gather", "reduce_scatter", "all_gather", "all_gather", "reduce_scatter"]
        assert kept == 0
        assert torch.equal(of_stream, found_of_stream)
        assert all(torch.equal(gradients[name], found[name]) for name in gradients)


class SequenceFirst(nn.Module):
    """A branch that keeps transposed views and a slice of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x_BSC: Tensor, scale: Tensor) -> Tensor:
        x_SBC = x_BSC.transpose(0, 1)
        h_SBC = nn.functional.silu(x_SBC) * x_SBC[:1].exp() + x_BSC[1:].square().transpose(0, 1)
        return scale * self.down(self.up(h_SBC).tanh()).transpose(0, 1)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.branch = nn.LayerNorm(4), SequenceFirst()

    def forward(self, x_BSC: Tensor) -> Tensor:
        return x_BSC + self.branch(scale=torch.full_like(x_BSC[0, 0, 0], 0.5), x_BSC=self.norm(x_BSC))


RESIDUAL_PLAN = Plan({"branch": Branch({"up": Columns()}, rows=("down",))})


def residual_on_a_rank(net: Residual, x_BSC: Tensor, cut_stream: bool, regather: bool) -> dict[str, Tensor]:
    """The whole gradients of the sum of the output's squares."""
    mesh = Mesh(Layout(tp=torch.distributed.get_world_size()))
    net = copy.deepcopy(net)
    parallel = tensor_parallel_(net, RESIDUAL_PLAN, mesh.tp, sequence_parallel=cut_stream, regather=regather)
    net(x_BSC.chunk(mesh.tp.size, 1)[mesh.tp.rank] if cut_stream else x_BSC).square().sum().backward()
    return summed_and_whole(parallel, {n: p.grad for n, p in net.named_parameters() if p.grad is not None})


@pytest.mark.parametrize(("cut_stream", "regather"), [(False, False), (True, False), (True, True)])
def test_a_branch_with_arguments_by_name_that_keeps_views(
    ranks: RankPool, cut_stream: bool, regather: bool
) -> None:
    """The stream is found by its name, not its place, and views are taken of what is gathered again."""
    torch.manual_seed(0)
    net, x_BSC = Residual().double(), torch.randn(2, 8, 4, dtype=torch.float64)
    net(x_BSC).square().sum().backward()
    for gradients in ranks(2, residual_on_a_rank, net, x_BSC, cut_stream, regather):
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-12, atol=1e-12)


def test_a_branch_without_its_stream_is_refused() -> None:
    net = Residual()
    tensor_parallel_(net, RESIDUAL_PLAN, Mesh(Layout()).tp, sequence_parallel=False)
    with pytest.raises(UserError, match="a branch got no 'x_BSC', its first argument and the stream, but y"):
        net.branch(y=torch.zeros(1, 2, 4))


def copied_on_a_rank(regather: bool) -> tuple[list[bool], list[bool]]:
    """Which gradients a cut net got from its copy, and which of the copy's differ from its own later ones."""
    mesh = Mesh(Layout(tp=torch.distributed.get_world_size()))
    net = Net().double()
    tensor_parallel_(net, NET_PLAN, mesh.tp, sequence_parallel=True, regather=regather)
    copied = copy.deepcopy(net)
    x_BSC = torch.ones(1, 2, 4, dtype=torch.float64)
    copied(x_BSC).square().sum().backward()
    from_copy = [parameter.grad is not None for parameter in net.parameters()]
    net(x_BSC).square().sum().backward()
    pairs = zip(net.parameters(), copied.parameters(), strict=True)
    return from_copy, [not torch.equal(torch.as_tensor(a.grad), torch.as_tensor(b.grad)) for a, b in pairs]


@pytest.mark.parametrize("regather", [False, True])
def test_a_copy_of_a_cut_module_has_parameters_of_its_own(ranks: RankPool, regather: bool) -> None:
    for from_copy, different in ranks(2, copied_on_a_rank, regather):
        assert not any(from_copy)
        assert not any(different)
