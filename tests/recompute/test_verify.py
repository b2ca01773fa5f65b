"""Every policy against one process, which computes nothing again."""

import json

import pytest

from fourfold.data import SyntheticDataset
from fourfold.mesh import Mesh
from fourfold.oracle import Oracle
from fourfold.specs import Layout, ModelSpec
from fourfold.specs.recompute_name import RecomputeName
from fourfold.verify import verify
from tests.commands import fourfold_
from tests.ranks import RankPool

TINY = ModelSpec.preset("tiny").replace({"num_hidden_layers": 4})
POLICIES = ["full", "every:2", "sqrt", "selective", "selective:attention", "slots:2", "min", "budget:0.003"]


def passes(layout: str, policy: str) -> bool:
    data = SyntheticDataset(TINY.vocab_size, sequence_length=24, seed=3)
    oracle = Oracle(TINY, data, batch=12, steps=1, seed=0)
    mesh = Mesh(Layout.parse(layout))
    return verify(oracle, mesh, microbatches=3, recompute=RecomputeName.parse(policy)).passes


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "pp2:1f1b", "pp2:zb-h1", "tp2", "cp2:ring"])
def test_every_policy_computes_what_one_process_computes(ranks: RankPool, layout: str) -> None:
    for policy in POLICIES:
        assert ranks(2, passes, layout, policy) == [True, True], policy


def test_the_command_takes_a_policy() -> None:
    arguments = ("--model", "tiny", "--layout", "dp1", "--steps", "1", "--json")
    done = fourfold_("verify", *arguments, "--recompute", "selective")
    assert (done.exit_code, json.loads(done.stdout)["pass"]) == (0, True)
