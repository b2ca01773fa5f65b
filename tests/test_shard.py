"""Any module, sharded: the numbers of one process, whatever the module contains; what is refused, and how."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fourfold
from fourfold import Layout, Mesh, ShardedModule, UserError
from fourfold.collectives import record
from tests.ranks import RankPool

ROWS = 7
"""Of the global batch: no number of ranks divides it."""
LAYOUTS = ["dp1", "fsdp2", "fsdp3", "fsdp2:zero1", "fsdp3:zero2", "dp2", "dp2,fsdp2"]


class Layer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.layers = nn.ModuleList(Layer(5) for _ in range(3))
        self.last = nn.Linear(5, 2)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, rows: Tensor, rank: int) -> Tensor:
        x = self.first(rows)
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.last(x)
        return y


class VisionBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.after = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 9), nn.GELU(), nn.Linear(9, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        z: Tensor = x + self.mlp(self.after(x))
        return z


class VisionTransformer(nn.Module):
    """Patches by convolution, a class token, learned positions, PyTorch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 6, kernel_size=2, stride=2)
        self.class_token = nn.Parameter(torch.randn(1, 1, 6))
        self.positions = nn.Parameter(torch.randn(1, 5, 6))
        self.encoder = nn.Sequential(*(VisionBlock(6) for _ in range(2)))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 2)

    def blocks(self) -> list[nn.Module]:
        return list(self.encoder)

    def forward(self, rows: Tensor, rank: int) -> Tensor:
        images = rows.repeat_interleave(16, dim=1).view(-1, 3, 4, 4).cumsum(-1).sin()
        x = self.patches(images).flatten(2).mT
        x = torch.cat((self.class_token.expand(len(x), -1, -1), x), dim=1) + self.positions
        y: Tensor = self.head(self.norm(self.encoder(x))[:, 0])
        return y


class Pair(NamedTuple):
    x: Tensor
    mask: Tensor | None


class OddBlock(nn.Module):
    """What blocks may contain, take and return."""

    def __init__(self, shared: nn.Parameter):
        super().__init__()
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.trained = nn.Linear(5, 5, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.extra = nn.Parameter(torch.randn(5))
        self.unused = nn.Parameter(torch.randn(2, 2))
        self.one = nn.Parameter(torch.randn(1))
        self.shared = shared
        self.shared_again = shared
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(
        self, pair: Pair, *, others: dict[str, Any], uses_extra: bool, nothing: None = None
    ) -> tuple[Pair, dict[str, Any]]:
        self.calls += 1
        x, mask = pair
        assert others["words"] == ["as", "it", "is"]
        assert nothing is None
        y = self.trained(self.frozen(x).tanh()) * self.scale + F.linear(
            others["list"][0], self.shared + self.shared_again
        )
        if uses_extra:
            y = y + self.extra * self.one
        if mask is not None:
            y = y * mask
        taken = others["rows"].sum() * 0 + x.mean()
        return Pair(x + y, mask), {"mean": [taken, others["rows"] + 1], "detached": y.detach()}


class Odd(nn.Module):
    """Tied weights, within and across blocks; a frozen unit; integers, keywords, tuples, lists and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 5)
        self.project = nn.Linear(3, 5)
        self.project.requires_grad_(False)
        shared = nn.Parameter(torch.randn(5, 5) / 4)
        self.odd_blocks = nn.ModuleList(OddBlock(shared) for _ in range(2))
        self.untouched = Layer(5)
        self.last = nn.Linear(5, 4)
        self.last.weight = self.embedding.weight

    def blocks(self) -> list[nn.Module]:
        return [*self.odd_blocks, self.untouched]

    def forward(self, rows: Tensor, rank: int) -> Tensor:
        ids = (rows[:, 0].abs() * 10).long() % 4
        x = self.project(rows) + self.embedding(ids)
        mean = x.new_zeros(())
        pair = Pair(x, None if rank == 0 else torch.ones_like(x) / 2)
        for block in self.odd_blocks:
            others = {"list": [x], "rows": ids, "words": ["as", "it", "is"]}
            pair, found = block(pair, others=others, uses_extra=rank == 0)
            assert not found["mean"][1].requires_grad
            assert pair.mask is None or not pair.mask.requires_grad
            mean = mean + found["mean"][0]
        y: Tensor = self.last(pair.x) + mean
        return y


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": Perceptron,
    "vision": VisionTransformer,
    "odd": Odd,
}


def made(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]().double()


def rows_of(step: int) -> Tensor:
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def losses_of(module: nn.Module, step: int, rank: int, world: int, parts: int = 1) -> list[Tensor]:
    """The losses of the parts of a rank's rows, each divided by the rows of the global batch."""
    mine = rows_of(step)[rank::world]
    return [module(part, rank).sin().sum() / ROWS for part in mine.tensor_split(parts)]


class Trained(NamedTuple):
    """What two steps of SGD gave."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    norms: list[float]
    evaluations: list[Tensor]
    weights: dict[str, Tensor]


def alone(name: str, world: int) -> Trained:
    """The oracle: one process goes through the rows of all ranks."""
    module = made(name)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    result = Trained([], [], [], [], {})
    for step in range(2):
        optimizer.zero_grad()
        total = 0.0
        for rank in range(world):
            (loss,) = losses_of(module, step, rank, world)
            loss.backward()
            total += loss.item()
        result.losses.append(total)
        trained = {key: p for key, p in module.named_parameters() if p.requires_grad}
        zero = {key: torch.zeros_like(p) for key, p in trained.items()}
        result.gradients.append({key: zero[key] if p.grad is None else p.grad for key, p in trained.items()})
        result.norms.append(float(torch.cat([g.flatten() for g in result.gradients[-1].values()]).norm()))
        optimizer.step()
        with torch.no_grad():
            result.evaluations.append(module(rows_of(9), 1))
        result.gradients[-1] = {key: gradient.clone() for key, gradient in result.gradients[-1].items()}
    result.weights.update(module.state_dict())
    return result


def whole_gradients(sharded: ShardedModule) -> dict[str, Tensor]:
    return {
        key: gradient.clone()
        for unit in sharded.units
        if unit.is_trained
        for key, gradient in unit.named(unit.whole(unit.summed))
    }


def together(name: str, layout: str, *, pieces: str = "auto", parts: int = 1, order: str = "each") -> Trained:
    """A rank's part of the same.

    ``order``: ``each`` part's backward follows its forward, the backwards come ``last``, after all forwards,
    or ``one`` backward goes through all.
    """
    mesh = Mesh(Layout.parse(layout))
    module = made(name)
    sharded = fourfold.shard(module, blocks=module.blocks(), mesh=mesh, pieces=pieces)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    result = Trained([], [], [], [], {})
    rank, world = mesh.data.rank, mesh.data.size
    for step in range(2):
        with torch.no_grad():
            module(rows_of(8), 1)
        if order == "each":
            total = 0.0
            for part in range(parts):
                loss = module(rows_of(step)[rank::world].tensor_split(parts)[part], rank).sin().sum() / ROWS
                loss.backward()
                total += loss.item()
        else:
            losses = losses_of(module, step, rank, world, parts)
            total = sum(loss.item() for loss in losses)
            if order == "one":
                torch.stack(losses).sum().backward()
            else:
                for loss in losses:
                    loss.backward()
        sharded.reduce_gradients()
        result.losses.append(total)
        result.gradients.append(whole_gradients(sharded))
        result.norms.append(sharded.gradient_norm())
        assert all_freed(sharded)
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode():
            result.evaluations.append(module(rows_of(9), 1))
        assert all_freed(sharded)
    result.weights.update(sharded.state_dict())
    return result


def all_freed(sharded: ShardedModule) -> bool:
    return not any(unit.is_present for unit in sharded.units if unit.placement.weights)


def assert_same(found: Sequence[Trained], expected: Trained, replicas: int = 1) -> None:
    losses = [sum(losses) for losses in zip(*(of_rank.losses for of_rank in found), strict=True)]
    close(losses, expected.losses)
    for of_rank in found:
        close(of_rank.norms, expected.norms)
        close(of_rank.evaluations, expected.evaluations)
        assert of_rank.weights.keys() == expected.weights.keys()
        close(
            {key: value for key, value in of_rank.weights.items() if "calls" not in key},
            {key: value for key, value in expected.weights.items() if "calls" not in key},
        )
        for mine, theirs in zip(of_rank.gradients, expected.gradients, strict=True):
            close(mine, theirs)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_two_steps_are_those_of_one_process(ranks: RankPool, name: str, layout: str) -> None:
    world = Layout.parse(layout).world_size
    assert_same(ranks(world, together, name, layout), alone(name, world))


@pytest.mark.parametrize("order", ["each", "last", "one"])
@pytest.mark.parametrize("layout", ["fsdp2", "fsdp2:zero1", "dp2,fsdp2"])
def test_accumulation_changes_nothing(ranks: RankPool, layout: str, order: str) -> None:
    """Three parts a step: forward and backward in turn, all forwards first, or one backward through all."""
    world = Layout.parse(layout).world_size
    found = ranks(world, together, "perceptron", layout, parts=3, order=order)
    assert_same(found, alone("perceptron", world))


@pytest.mark.parametrize("pieces", ["matrices", "rows", "flat"])
def test_any_way_to_cut_gives_the_same(ranks: RankPool, pieces: str) -> None:
    assert_same(ranks(3, together, "odd", "fsdp3", pieces=pieces), alone("odd", 3))


def sharded_perceptron(layout: str = "fsdp2", **options: Any) -> tuple[Perceptron, ShardedModule]:
    module = made("perceptron")
    assert isinstance(module, Perceptron)
    mesh = Mesh(Layout.parse(layout))
    return module, fourfold.shard(module, blocks=module.blocks(), mesh=mesh, **options)


def a_backward(module: nn.Module, rank: int = 0) -> None:
    module(rows_of(0), rank).sum().backward()


def collectives_of_a_step() -> tuple[list[tuple[str, int]], list[int], list[int]]:
    """The (op, bytes) of a step; the bytes of each unit; how many blocks are present as each computes."""
    module, sharded = sharded_perceptron()
    present: list[int] = []

    def count(*_: Any) -> None:
        present.append(sum(unit.is_present for unit in sharded.units[:3]))

    for layer in module.layers:
        layer.down.register_forward_hook(count)
        layer.down.register_full_backward_hook(count)
    with record() as events:
        a_backward(module)
        sharded.reduce_gradients()
    sizes = [sum(unit.counts) * 8 for unit in sharded.units]
    return [(event.op, event.bytes) for event in events], sizes, present


def test_a_step_gathers_twice_and_reduces_once_with_two_blocks_present(ranks: RankPool) -> None:
    for events, (first, second, third, root), present in ranks(2, collectives_of_a_step):
        gathers = [numbers for op, numbers in events if op == "all_gather"]
        assert sorted(gathers) == sorted([root, first, first, second, second, third])
        assert sorted(n for op, n in events if op == "reduce_scatter") == sorted([root, first, second, third])
        assert len(events) == 10
        assert present == [2, 2, 1, 2, 2, 1]


def mixed_precision() -> None:
    module, sharded = sharded_perceptron("dp1", dtype=torch.bfloat16, float32=["norm"])
    plain = made("perceptron").bfloat16()
    for key, parameter in plain.named_parameters():
        if "norm" in key:
            parameter.data = parameter.data.float()
    for (key, mine), theirs in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert mine.dtype == (torch.float32 if "norm" in key else torch.bfloat16) == theirs.dtype
    rows = rows_of(0).bfloat16()
    losses = []
    for each in (module, plain):
        losses.append(each(rows, 0).float().square().sum())
        losses[-1].backward()
    sharded.reduce_gradients()
    assert torch.equal(*losses)
    gradients = whole_gradients(sharded)
    for key, theirs in plain.named_parameters():
        assert gradients[key].dtype == torch.float32
        assert torch.equal(gradients[key], theirs.grad.float())
    assert {value.dtype for value in sharded.state_dict().values()} == {torch.float32}


def test_bfloat16_with_float32_norms_and_masters() -> None:
    mixed_precision()


def numbered(name: str, first: int, target: Tensor) -> None:
    """Values that say which element of which parameter they are."""
    target.copy_((torch.arange(first, first + target.numel()) / 512 + len(name)).view(target.shape))


def from_meta(layout: str) -> tuple[dict[str, Tensor], list[tuple[str, int, int]], int]:
    with torch.device("meta"):
        module = made("odd")
    calls = []

    def initialize(name: str, first: int, target: Tensor) -> None:
        calls.append((name, first, target.numel()))
        numbered(name, first, target)

    mesh = Mesh(Layout.parse(layout))
    sharded = fourfold.shard(module, blocks=module.blocks(), mesh=mesh, initialize=initialize)
    a_backward(module, mesh.rank)
    return sharded.state_dict(), calls, sum(unit.held_bytes for unit in sharded.units if not unit.is_trained)


def test_a_module_on_the_meta_device_starts_in_pieces(ranks: RankPool) -> None:
    found = ranks(3, from_meta, "fsdp3")
    shapes = made("odd").state_dict()
    for weights, _, _ in found:
        assert list(weights) == list(shapes)
        for key, shape in shapes.items():
            first_name = (
                "odd_blocks.0.shared" if "shared" in key else key.replace("last.weight", "embedding.weight")
            )
            expected = torch.zeros_like(shape)
            numbered(first_name, 0, expected)
            if "calls" not in key:
                assert torch.equal(weights[key], expected), key
    covered = [run for _, calls, _ in found for run in calls if "calls" not in run[0]]
    elements = [(name, first + i) for name, first, count in covered for i in range(count)]
    assert len(elements) == len(set(elements)) == sum(p.numel() for p in made("odd").parameters())
    for _, calls, _ in found:
        assert sum(count for _, _, count in calls) < len(elements) / 2


def other_values(layout: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    mesh = Mesh(Layout.parse(layout))
    module = made("odd")
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.add_(mesh.rank)
    sharded = fourfold.shard(module, blocks=module.blocks(), mesh=mesh)
    first = sharded.state_dict()
    saved = dict(made("odd").state_dict())
    saved = {key: value + 1 for key, value in saved.items() if key != "last.weight"}
    a_backward(module)
    sharded.load_state_dict(saved)
    return first, sharded.state_dict()


def test_values_are_those_of_the_first_rank_and_then_those_that_were_loaded(ranks: RankPool) -> None:
    expected = made("odd").state_dict()
    for first, second in ranks(3, other_values, "fsdp3"):
        assert list(first) == list(second) == list(expected)
        for key, value in expected.items():
            assert torch.equal(first[key], value.to(first[key].dtype)), key
            assert torch.equal(second[key], value + 1), key
        assert first["last.weight"] is first["embedding.weight"]


def test_a_state_dict_that_does_not_fit_is_refused() -> None:
    module, sharded = sharded_perceptron("dp1")
    state = sharded.state_dict()
    state["first.weight"] = state["first.weight"].T
    state["other"] = state.pop("last.bias")
    with pytest.raises(UserError) as caught:
        sharded.load_state_dict(state)
    assert caught.value.messages == (
        "other is not in the module",
        "first.weight has the shape (3, 5), in the module (5, 3)",
        "last.bias is missing",
    )
    for own in (module.state_dict, lambda: module.load_state_dict(state)):
        with pytest.raises(
            RuntimeError, match="the module is sharded: use state_dict and load_state_dict of"
        ):
            own()


def refused_optimizers() -> tuple[int, int, float]:
    """The elements of optimizer state on this rank, of the model, and how far a weight moved."""
    module = made("perceptron")
    early = torch.optim.AdamW(module.parameters())
    sharded = fourfold.shard(module, blocks=list(module.layers), mesh=Mesh(Layout(fsdp=2)))
    own = torch.optim.SGD(module.parameters(), lr=1.0)
    right = torch.optim.AdamW(
        [{"params": sharded.decayed}, {"params": sharded.plain}], lr=0.1, weight_decay=0.0
    )
    before = sharded.state_dict()["last.bias"]
    a_backward(module)
    for optimizer, message in (
        (early, "the optimizer was built before the module was sharded: build it from parameters"),
        (own, "the optimizer has the module's own parameters: build it from parameters"),
        (right, r"gradients are not summed: call reduce_gradients\(\)"),
    ):
        with pytest.raises(UserError, match=message):
            optimizer.step()
    with pytest.raises(RuntimeError, match="gradients are not summed"):
        sharded.gradient_norm()
    sharded.reduce_gradients()
    right.step()
    state = sum(tensors["exp_avg"].numel() for tensors in right.state.values())
    moved = (sharded.state_dict()["last.bias"] - before).abs().max()
    return state, sum(p.numel() for p in module.parameters()), float(moved)


def test_an_optimizer_that_would_do_nothing_is_refused(ranks: RankPool) -> None:
    # FS-11
    found = ranks(2, refused_optimizers)
    assert sum(state for state, _, _ in found) == found[0][1]
    for state, total, moved in found:
        assert state < 0.6 * total
        assert moved == pytest.approx(0.1, rel=1e-6)


def misused() -> None:
    module, sharded = sharded_perceptron()
    x = torch.ones(1, 5, dtype=torch.float64)
    with pytest.raises(
        RuntimeError, match=r"this Linear are not on this rank now: they belong to layers\.1,"
    ):
        module.layers[1].up(x)
    with pytest.raises(RuntimeError, match="they belong to what is in no block"):
        module.last(x)
    loss = module(rows_of(0), 0).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward through one forward of a block"):
        loss.backward()
    y = module.layers[0](x)
    sharded.reduce_gradients()
    with pytest.raises(RuntimeError, match=r"the backward of layers\.0 came after reduce_gradients\(\)"):
        y.sum().backward()
    with pytest.raises(UserError, match="the module is sharded already"):
        fourfold.shard(module, blocks=[], mesh=sharded.mesh)


def test_misuse_is_told(ranks: RankPool) -> None:
    ranks(2, misused)


def test_blocks_and_words_that_do_not_fit_are_refused_all_at_once() -> None:
    module = made("perceptron")
    assert isinstance(module, Perceptron)
    layers = list(module.layers)
    with pytest.raises(UserError) as caught:
        fourfold.shard(
            module, blocks=[layers[0], layers[0], nn.Linear(1, 1), layers[0].up], mesh=Mesh(Layout())
        )
    assert caught.value.messages == (
        "blocks[1] is blocks[0] again, layers.0: give each block once",
        "blocks[2] is a Linear that is not in the module: give parts of it, as in list(module.layers)",
        "block layers.0.up is inside of block layers.0: give one of them",
    )
    with pytest.raises(UserError, match=r"no parameter's name contains 'nrom'\. Did you mean 'norm'\?"):
        fourfold.shard(module, blocks=layers, mesh=Mesh(Layout()), float32=["nrom"])
    with pytest.raises(
        UserError, match="pieces='row' does not exist: use auto, blocks, matrices, rows or flat"
    ):
        fourfold.shard(module, blocks=layers, mesh=Mesh(Layout()), pieces="row")
    with torch.device("meta"):
        empty = made("perceptron")
    with pytest.raises(UserError, match=r"first\.weight is on the meta device and has no values"):
        fourfold.shard(empty, blocks=[], mesh=Mesh(Layout()))
    assert module(rows_of(0), 0).requires_grad, "a refused module works as before"


class Recomputed(Perceptron):
    """Drops the activations of each block and computes them again in the backward."""

    def forward(self, rows: Tensor, rank: int) -> Tensor:
        x = self.first(rows)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        y: Tensor = self.last(x)
        return y


def recomputed_and_zeroed() -> tuple[dict[str, Tensor], dict[str, Tensor], float, float]:
    torch.manual_seed(3)
    module = Recomputed().double()
    sharded = fourfold.shard(module, blocks=module.blocks(), mesh=Mesh(Layout(fsdp=2)))
    found = []
    for _ in range(2):
        loss = module(rows_of(0), 0).sum()
        module.zero_grad()  # as many do before each backward
        loss.backward()
        sharded.reduce_gradients()
        found.append(whole_gradients(sharded))
    norm = sharded.clip_(0.5)
    return *found, norm, sharded.gradient_norm()


def test_recomputed_blocks_zeroed_gradients_and_clipping(ranks: RankPool) -> None:
    plain = made("perceptron")
    a_backward(plain)
    expected = {key: 2 * p.grad for key, p in plain.named_parameters() if p.grad is not None}
    norm = float(torch.cat([gradient.flatten() for gradient in expected.values()]).norm())
    for first, second, before, after in ranks(2, recomputed_and_zeroed):
        close(first, expected)
        close(second, expected)
        close((before, after), (norm, 0.5))


def test_zero_grad_of_the_module_after_a_backward_leaves_no_gradient() -> None:
    module, sharded = sharded_perceptron("dp1")
    a_backward(module)
    module.zero_grad()
    sharded.reduce_gradients()
    assert sharded.gradient_norm() == 0.0


def more_ranks_than_elements() -> tuple[dict[str, Tensor], int]:
    torch.manual_seed(0)
    module = nn.Linear(1, 1).double()
    sharded = fourfold.shard(module, blocks=[module], mesh=Mesh(Layout(fsdp=3)), pieces="rows")
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1, weight_decay=0.0)
    for _ in range(2):
        module(torch.ones(2, 1, dtype=torch.float64)).sum().backward()
        sharded.reduce_gradients()
        sharded.clip_(1.0)
        optimizer.step()
    return sharded.state_dict(), sum(p.numel() for p in sharded.parameters())


def test_more_ranks_than_elements(ranks: RankPool) -> None:
    torch.manual_seed(0)
    expected = {key: value.double() - 0.2 for key, value in nn.Linear(1, 1).state_dict().items()}
    found = ranks(3, more_ranks_than_elements)
    assert sorted(owned for _, owned in found) == [0, 1, 1]
    for weights, _ in found:
        torch.testing.assert_close(weights, expected, atol=1e-6, rtol=0)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.block[1].register_buffer("flag", torch.tensor(True))

    def forward(self, rows: Tensor) -> Tensor:
        y: Tensor = self.block(rows)
        return y


def running_statistics() -> dict[str, Tensor]:
    torch.manual_seed(1)
    module = Normed().double()
    sharded = fourfold.shard(module, blocks=[module.block], mesh=Mesh(Layout(fsdp=2)))
    module(rows_of(sharded.mesh.rank)).sum().backward()
    sharded.reduce_gradients()
    module.eval()
    with torch.no_grad():
        module(rows_of(5))
    return sharded.state_dict()


def test_running_statistics_follow_a_ranks_own_data(ranks: RankPool) -> None:
    for rank, found in enumerate(ranks(2, running_statistics)):
        torch.manual_seed(1)
        plain = Normed().double()
        plain(rows_of(rank))
        close(found, dict(plain.state_dict()))


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=23,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    module: nn.Module = transformers.LlamaForCausalLM(config).double()
    return module


def llama_loss(module: nn.Module, rows: slice) -> Tensor:
    ids = torch.randint(23, (5, 6), generator=torch.Generator().manual_seed(1))[rows]
    logits = module(input_ids=ids).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / 25


def llama_steps() -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    module = llama()
    mesh = Mesh(Layout(fsdp=2))
    sharded = fourfold.shard(module, blocks=list(module.model.layers), mesh=mesh)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    gradients = []
    for _ in range(2):
        llama_loss(module, slice(mesh.rank, None, 2)).backward()
        sharded.reduce_gradients()
        gradients.append(whole_gradients(sharded))
        optimizer.step()
    return gradients, sharded.state_dict()


def test_a_hugging_face_model(ranks: RankPool) -> None:
    module = llama()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    expected = []
    for _ in range(2):
        optimizer.zero_grad()
        llama_loss(module, slice(None)).backward()
        expected.append({key: p.grad.clone() for key, p in module.named_parameters() if p.grad is not None})
        optimizer.step()
    for gradients, weights in ranks(2, llama_steps):
        close(gradients, expected)
        close(weights, dict(module.state_dict()))


def in_order(layout: str, order: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    blocks = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(4)]
    module = nn.ModuleList(blocks)
    sharded = fourfold.shard(module, blocks=blocks, mesh=Mesh(Layout.parse(layout)))
    x = torch.ones(2, 4, dtype=torch.float64)
    for index in order:
        x = blocks[index](x).tanh()
    x.sum().backward()
    sharded.reduce_gradients()
    torch.optim.SGD(sharded.parameters(), lr=0.1).step()
    return x.detach(), sharded.state_dict()


@pytest.mark.parametrize("order", [[0, 0, 1, 2, 3], [0, 2], [3, 2, 1, 0], [0, 1, 2, 3, 0, 1]])
def test_blocks_that_are_layers_themselves_run_in_any_order(ranks: RankPool, order: list[int]) -> None:
    """Twice, skipped, backwards: gathered ahead or not, a block's weights are there."""
    [(y, _)] = ranks(1, in_order, "dp1", order)
    for found, state in ranks(2, in_order, "fsdp2", order):
        assert torch.equal(found, y)
        assert all(value.isfinite().all() for value in state.values())
