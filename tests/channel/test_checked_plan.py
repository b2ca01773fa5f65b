"""What is refused before anything is cut: plans that do not fit, and what would compute something else."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from fourfold.channel.checked_plan import checked_cuts
from fourfold.channel.dropout import refuse_dropout_
from fourfold.channel.plans import Branch, Columns, Plan, gpt2_plan, llama_plan
from fourfold.channel.tensor_parallel import tensor_parallel_
from fourfold.errors import UserError
from fourfold.mesh import Mesh
from fourfold.specs import Layout


class Net(nn.Module):
    """A vocabulary, two branches, and a tied head."""

    def __init__(self, **embedding: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4, **embedding)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0), nn.Linear(8, 4)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 6, bias=False)

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSC = self.embed(ids_BS)
        for branch in self.branches:
            x_BSC = x_BSC + branch(x_BSC)
        return self.head(self.norm(x_BSC))


BRANCH = Branch({"0": Columns()}, rows=("2",))
PLAN = Plan({"branches.*": BRANCH}, embedding="embed", head="head", last_norm="norm")


def refused(model: nn.Module, plan: Plan, *, ranks: int = 2, sequence_parallel: bool = False) -> list[str]:
    with pytest.raises(UserError) as caught:
        checked_cuts(model, plan, ranks=ranks, sequence_parallel=sequence_parallel)
    return list(caught.value.messages)


def test_what_the_plan_names_is_in_every_place() -> None:
    net = Net()
    net.branches[1] = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0))
    plan = replace(PLAN, branches=PLAN.branches | {"other.*": BRANCH}, embedding="embedding")
    assert refused(net, plan) == [
        "the plan's branch 'other.*' is no module of the model",
        "the plan's 'branches.1.2' is no module of the model. Did you mean 'branches.1.1'?",
        "the plan's 'embedding' is no module of the model. Did you mean 'embed'?",
    ]


def test_plans_without_sense() -> None:
    wrong = Branch({"0": Columns()}, rows=("1",), scaled=("heads",))
    assert refused(Net(), Plan({"branches.1": wrong})) == [
        "the plan's 'branches.1.1' has no matrix 'weight' to cut",
        "the plan's branch 'branches.1' has no attribute 'heads' to divide",
    ]
    assert refused(Net(), replace(PLAN, last_norm=None, embedding="norm")) == [
        "the plan's head and last_norm go together: behind last_norm the stream enters the head",
        "the plan's embedding 'norm' is a LayerNorm: name an nn.Embedding",
    ]
    assert refused(Net(), Plan({"branches": Branch({"0.0": Columns()}, ("0.2",)), "branches.1": BRANCH})) == [
        "the plan's branch 'branches.1' is inside of its branch 'branches'"
    ]
    grouped = Branch({"0": Columns()}, (), groups="heads")
    assert refused(Net(), Plan({"branches.1": grouped})) == [
        "the plan's branch 'branches.1' needs projections by columns, and by rows",
        "the plan's branch 'branches.1' has groups='heads', without q_proj and k_proj",
    ]


def test_what_the_ranks_do_not_divide_with_values_that_work() -> None:
    """8 channels, in 2 groups in the other plan, and a vocabulary of 6."""
    assert refused(Net(), PLAN, ranks=3) == [
        f"branches.{layer}.{name}: tp=3 does not divide 8 channels (Channel axis): use tp=1 or 2"
        for layer in (0, 1)
        for name in ("0.weight", "0.bias", "2.weight")
    ]
    [first, *_] = refused(Net(), Plan({"branches.0": Branch({"0": Columns(2)}, ("2",))}), ranks=4)
    assert first == "branches.0.0.weight: tp=4 does not divide 2 groups (Channel axis): use tp=1 or 2"
    [first, *_] = refused(Net(), Plan({}, embedding="embed"), ranks=7)
    assert first.endswith(
        "tp=7 is more than the 6 tokens of the vocabulary (Channel axis): use tp=1, 2, 3, 4, 5 or 6"
    )


def test_query_heads_have_no_copies() -> None:
    """4 query heads and 2 key/value heads on 8 ranks: the latter may be copied, the former not."""
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    [message] = refused(model, llama_plan(4, 2), ranks=8)
    assert message == (
        "model.layers.0.self_attn.q_proj.weight: tp=8 does not divide 4 groups (Channel axis): "
        "use tp=1, 2 or 4"
    )
    assert checked_cuts(model, llama_plan(4, 2), ranks=4, sequence_parallel=False)


def test_one_parameter_treated_in_two_ways() -> None:
    net = Net()
    net.head.weight = net.embed.weight
    assert checked_cuts(net, PLAN, ranks=2, sequence_parallel=True)
    message = "embed.weight is also 'head.weight', which the plan treats in another way (Channel axis)"
    assert refused(net, replace(PLAN, head=None, last_norm=None)) == [f"{message}: use tp=1"]


def test_what_an_embedding_cannot_do_in_parts() -> None:
    net = Net(max_norm=1.0, scale_grad_by_freq=True)
    assert checked_cuts(net, PLAN, ranks=1, sequence_parallel=False)
    first, second = refused(net, PLAN)
    assert first.startswith("'embed' has max_norm=1.0 (Channel axis): looking up tokens of other ranks would")
    assert second.endswith("use scale_grad_by_freq=False")


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_positions_counted_along_the_stream_need_all_of_it(kind: str) -> None:
    """A rank of sequence parallelism would have the position 0 at its own first token."""
    model: nn.Module
    with torch.device("meta"):
        if kind == "gpt2":
            model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1)).eval()
        else:
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=1))
    plan = gpt2_plan(12) if kind == "gpt2" else llama_plan(32, 32)
    [message] = refused(model, plan, sequence_parallel=True)
    assert message == (
        "sequence_parallel=True (Channel axis): the model counts positions along the stream, and each rank "
        "would start at 0; use sequence_parallel=False"
    )


def test_dropout_is_refused_in_training() -> None:
    """Before anything is cut, or, of what trains later, when it is called; not in evaluation."""
    # RNG-05
    net = Net()
    net.branches[1][1].p = 0.5
    message = (
        "'branches.1.1' drops out with p=0.5 in training (Channel axis): each rank of tp would draw another "
        "mask for the same stream; use p=0, or tp=1"
    )
    assert refused(net, PLAN) == [message]
    checked_cuts(net.eval(), PLAN, ranks=2, sequence_parallel=False)
    refuse_dropout_(net)
    net(torch.zeros(1, 2, dtype=torch.long))
    with pytest.raises(UserError, match=r"drops out with p=0\.5 in training"):
        net.train()(torch.zeros(1, 2, dtype=torch.long))


def test_nothing_is_gathered_again_that_is_not_gathered() -> None:
    with pytest.raises(UserError, match="use sequence_parallel=True, or regather=False"):
        tensor_parallel_(Net(), PLAN, Mesh(Layout()).tp, sequence_parallel=False, regather=True)


def test_a_model_is_cut_once() -> None:
    net, axis = Net(), Mesh(Layout()).tp
    tensor_parallel_(net.branches[0], Plan({"": BRANCH}), axis, sequence_parallel=False)
    with pytest.raises(UserError, match="is cut on the tp axis already"):
        tensor_parallel_(net, PLAN, axis, sequence_parallel=False)
