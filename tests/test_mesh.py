"""The mesh: who stands where, which groups exist, and that they are the right ranks."""

import pytest
import torch
import torch.distributed as dist

from fourfold.errors import UserError
from fourfold.mesh import Axis, Mesh
from fourfold.specs import Layout
from tests.ranks import RankPool


def facts(axis: Axis) -> tuple[str, int, int, tuple[int, ...]]:
    return axis.name, axis.size, axis.rank, axis.ranks


def axes_of(text: str) -> dict[str, tuple[str, int, int, tuple[int, ...]]]:
    mesh = Mesh(Layout.parse(text))
    names = ("pp", "dp", "fsdp", "cp", "tp", "data", "batch", "world")
    return {name: facts(getattr(mesh, name)) for name in names}


def sums_over_groups(text: str, names: tuple[tuple[str, ...], ...]) -> list[float]:
    """Sum powers of two over each joint axis, by torch itself."""
    mesh = Mesh(Layout.parse(text))
    sums = []
    for joint in names:
        tensor = torch.tensor(2.0**mesh.rank)
        axis = mesh.joint(*joint)
        if axis.group is not None:
            dist.all_reduce(tensor, group=axis.group)
        sums.append(tensor.item())
    return sums


def sharing(text: str) -> dict[str, bool]:
    mesh, again = Mesh(Layout.parse(text)), Mesh(Layout.parse(text))
    return {
        "dp is batch": mesh.batch is mesh.dp,
        "dp is data": mesh.data is mesh.dp,
        "world is torch's": mesh.world.group is dist.group.WORLD,
        "order of names": mesh.joint("tp", "dp") is mesh.joint("dp", "tp"),
        "a second mesh": again.dp.group is mesh.dp.group,
        "no group of one": mesh.pp.group is None and mesh.cp.group is None,
    }


def torch_mesh(text: str) -> tuple[tuple[str, ...] | None, list[int], list[bool]]:
    mesh = Mesh(Layout.parse(text))
    theirs = mesh.device_mesh
    names = theirs.mesh_dim_names or ()
    same = [theirs.get_group(name) is mesh.joint(name).group for name in names]
    return names, list(theirs.shape), same


def holders_of(
    text: str, stages: tuple[int, ...], copies: int = 1
) -> tuple[tuple[str, int, int, tuple[int, ...]], float]:
    """The axis of the ranks of some stages and copies joined with dp, and a sum of powers of two over it."""
    mesh = Mesh(Layout.parse(text))
    axis = mesh.sharing("dp", stages=stages, copies=copies)
    tensor = torch.tensor(2.0**mesh.rank)
    if axis.group is not None:
        dist.all_reduce(tensor, group=axis.group)
    return facts(axis), tensor.item()


def edges_are_the_pipeline_axis(text: str) -> bool:
    mesh = Mesh(Layout.parse(text))
    pairs = [(0, 1, "SEND_F"), (1, 0, "SEND_B")]
    return mesh.edges(pairs) == dict.fromkeys(pairs, mesh.pp)


def wrong_size(text: str) -> str:
    with pytest.raises(UserError) as caught:
        Mesh(Layout.parse(text))
    return str(caught.value)


def test_one_rank_needs_no_process_group() -> None:
    assert not dist.is_initialized()
    mesh = Mesh(Layout())
    assert (mesh.rank, mesh.world_size, mesh.device) == (0, 1, torch.device("cpu"))
    for axis in (mesh.pp, mesh.dp, mesh.fsdp, mesh.cp, mesh.tp):
        assert (axis.size, axis.rank, axis.ranks, axis.group) == (1, 0, (0,), None)
    assert mesh.batch is mesh.dp
    assert mesh.data is mesh.dp
    assert mesh.world is mesh.pp
    with pytest.raises(ValueError, match="has one rank"):
        _ = mesh.device_mesh


def test_layout_of_several_ranks_without_job() -> None:
    with pytest.raises(
        UserError, match="layout dp2 needs 2 ranks, this job has 1: start 2, or use a layout of 1"
    ):
        Mesh(Layout(dp=2))


def test_layout_of_another_size(ranks: RankPool) -> None:
    expected = "layout dp4 needs 4 ranks, this job has 2: start 4, or use a layout of 2"
    assert ranks(2, wrong_size, "dp4") == [expected] * 2


def test_tp_is_innermost_and_pp_outermost(ranks: RankPool) -> None:
    of_rank_1 = ranks(4, axes_of, "tp2,pp2")[1]
    assert of_rank_1["pp"] == ("pp", 2, 0, (1, 3))
    assert of_rank_1["tp"] == ("tp", 2, 1, (0, 1))
    assert of_rank_1["batch"] == ("dp", 1, 0, (1,))
    assert of_rank_1["world"] == ("pp,tp", 4, 1, (0, 1, 2, 3))


def test_joint_axes(ranks: RankPool) -> None:
    of_rank_2 = ranks(4, axes_of, "dp2,cp2")[2]
    assert of_rank_2["dp"] == ("dp", 2, 1, (0, 2))
    assert of_rank_2["cp"] == ("cp", 2, 0, (2, 3))
    assert of_rank_2["data"] == of_rank_2["dp"]
    assert of_rank_2["batch"] == ("dp,cp", 4, 2, (0, 1, 2, 3))


def test_groups_hold_the_ranks_of_the_axis(ranks: RankPool) -> None:
    # Rank = 2 * dp + tp. A sum of powers of two names its members.
    names = (("dp",), ("tp",), ("dp", "tp"), ("pp",))
    assert ranks(4, sums_over_groups, "dp2,tp2", names) == [
        [0b0101, 0b0011, 0b1111, 0b0001],
        [0b1010, 0b0011, 0b1111, 0b0010],
        [0b0101, 0b1100, 0b1111, 0b0100],
        [0b1010, 0b1100, 0b1111, 0b1000],
    ]


def test_the_holders_of_a_tied_parameter(ranks: RankPool) -> None:
    """First and last of 4 stages; both of 2, with the replicas on dp; and ranks that hold nothing of it."""
    assert ranks(4, holders_of, "pp4", (0, 3)) == [
        (("pp", 2, 0, (0, 3)), 9.0),
        (("pp", 1, 0, (1,)), 2.0),
        (("pp", 1, 0, (2,)), 4.0),
        (("pp", 2, 1, (0, 3)), 9.0),
    ]
    assert ranks(4, holders_of, "pp2,dp2", (0, 1)) == [
        (("pp,dp", 4, rank, (0, 1, 2, 3)), 15.0) for rank in range(4)
    ]


def test_the_holders_of_copies_on_the_channel_axis(ranks: RankPool) -> None:
    """Neighbours in pairs; with dp beside them; all of tp; none."""
    pairs = [
        (("tp", 2, rank % 2, (rank // 2 * 2, rank // 2 * 2 + 1)), (3.0, 12.0)[rank // 2]) for rank in range(4)
    ]
    assert ranks(4, holders_of, "tp4", (), 2) == pairs
    assert ranks(4, holders_of, "dp2,tp2", (), 2) == [
        (("dp,tp", 4, rank, (0, 1, 2, 3)), 15.0) for rank in range(4)
    ]
    assert ranks(8, holders_of, "dp2,tp4", (), 2)[6] == (("dp,tp", 4, 2, (2, 3, 6, 7)), 204.0)
    assert ranks(4, holders_of, "dp2,tp2", (), 1)[1] == (("dp", 2, 0, (1, 3)), 10.0)
    tied = ranks(8, holders_of, "pp4,tp2", (0, 3), 2)
    assert tied[1] == (("pp,tp", 4, 1, (0, 1, 6, 7)), 195.0)
    assert tied[2] == (("pp,tp", 1, 0, (2,)), 4.0)


def test_on_gloo_all_messages_travel_on_the_pipeline_axis(ranks: RankPool) -> None:
    """It tells them apart by their tags."""
    assert ranks(4, edges_are_the_pipeline_axis, "pp2,dp2") == [True] * 4


def test_groups_are_shared(ranks: RankPool) -> None:
    for found in (*ranks(4, sharing, "dp2,tp2"), *ranks(3, sharing, "dp3")):
        assert all(found.values()), found


def test_torch_mesh_has_the_same_groups(ranks: RankPool) -> None:
    assert ranks(4, torch_mesh, "fsdp2,tp2") == [(("fsdp", "tp"), [2, 2], [True, True])] * 4
    assert ranks(2, torch_mesh, "fsdp2") == [(("fsdp",), [2], [True])] * 2
