"""What the pages say is what the code does: listings, code, links, run files, names."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.assembly import parallelize
from fourfold.batch import pieces
from fourfold.mesh import Mesh
from fourfold.models import Decoder
from fourfold.program import Kind, draw
from fourfold.specs import PLACEMENTS, Layout, ModelSpec, RunSpec, ShardingSection
from tests.commands import fourfold_
from tests.ranks import RankPool

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
BATCH = (ROOT / "docs" / "axes" / "batch.md").read_text()
CODE = "\n".join(re.findall(r"```python\n(.*?)```", BATCH, re.DOTALL))
LISTINGS = re.findall(r"```text ([^\n]+)\n(.*?)```", BATCH, re.DOTALL)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names that the page's code defines, after it ran in a folder of its own."""
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        names: dict[str, Any] = {}
        exec(compile(CODE, "docs/axes/batch.md", "exec"), names)
    return {**names, "folder": folder}


@pytest.mark.parametrize(("what", "text"), LISTINGS)
def test_a_listing_is_what_the_code_prints(page: dict[str, Any], what: str, text: str) -> None:
    layout, *options = what.split()
    given = {name: int(value) for name, value in (option.split("=") for option in options)}
    program = page["step_of"](Layout.parse(layout), layers=2, **given)
    assert [line.strip() for line in draw.listing(program).splitlines()] == ["rank 0:", *text.splitlines()]


def test_every_kind_of_layout_has_a_listing() -> None:
    assert {what.split()[0] for what, _ in LISTINGS} == {"dp4", "fsdp4", "fsdp4:zero1", "dp2,fsdp4"}


def fsdp_listing() -> str:
    """Of a real model with two layers, and no block so small that it is joined to another."""
    spec = ModelSpec.preset("tiny").replace({"vocab_size": 400, "num_hidden_layers": 2})
    with torch.device("meta"):
        model = Decoder(spec)
    return draw.listing(parallelize(model, mesh=Mesh(Layout.parse("fsdp2"))).program)


def test_a_real_model_runs_the_listed_program(ranks: RankPool) -> None:
    listed = dict(LISTINGS)["fsdp4"].split()
    assert [found.split()[2:] for found in ranks(2, fsdp_listing)] == [listed, listed]


def test_the_code_draws_the_picture(page: dict[str, Any]) -> None:
    drawn = page["folder"] / "fsdp_step.png"
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert drawn.name in BATCH


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_the_picture_shows_the_bound_on_weights(page: dict[str, Any], prefetch: int) -> None:
    """The weights of prefetch + 1 units at once are as many rows in the lane of weights."""
    program = page["step_of"](Layout.parse("fsdp4"), layers=5, prefetch=prefetch)
    lanes = draw._lanes(page["clock"](program, page["seconds"]))
    assert list(lanes) == [(0, "compute"), (0, "communication"), (0, "weights")]
    gathers = sum(action.kind is Kind.GATHER for action in program.ranks[0])
    assert len(lanes[0, "weights"]) == gathers
    assert draw._rows(lanes[0, "weights"])[1] == prefetch + 1


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_the_formula_of_gathers(page: dict[str, Any], prefetch: int, microbatches: int) -> None:
    """G = M (2 Psi - embedding - last p+1 units) - (M-1) (first p layers), with units of one size."""
    program = page["step_of"](Layout.parse("fsdp4"), layers=8, prefetch=prefetch, microbatches=microbatches)
    gathers = sum(action.kind is Kind.GATHER for action in program.ranks[0])
    assert gathers == microbatches * (2 * 10 - 1 - (prefetch + 1)) - (microbatches - 1) * prefetch


def test_the_table_of_placements() -> None:
    rows = dict(re.findall(r"\| `(dp|fsdp[:\w]*)` \| (\w+ \| \w+ \| \w+) \|", BATCH))
    written = {name: tuple(cell == "pieces" for cell in cells.split(" | ")) for name, cells in rows.items()}
    table = {f"fsdp:{name}" if name else "fsdp": placement for name, placement in PLACEMENTS.items()}
    table["dp"] = Layout.parse("dp2").placement
    assert written == {
        name: (placement.weights, placement.gradients, placement.optimizer)
        for name, placement in table.items()
    }


def test_the_options_of_sharding() -> None:
    table = BATCH.split("| `[sharding]` |")[1].split("\n\n")[0]
    written = dict(re.findall(r"^\| `(\w+)` \| `\"?(\w+)\"?` \|", table, re.MULTILINE))
    defaults = ShardingSection().model_dump()
    assert written == {name: str(value) for name, value in defaults.items()}


def test_the_balance_that_auto_asks_for() -> None:
    assert f"more than {pieces.BALANCED} times the mean" in BATCH


def test_the_commands_of_the_layer_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand, one after another; what a run would have written is a schedule's trace."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    assert fourfold_("schedule", "1f1b", "--trace", str(run / "program.json")).exit_code == 0
    page = (ROOT / "docs" / "axes" / "layer.md").read_text()
    commands = "".join(re.findall(r"```sh\n(.*?)```", page, re.DOTALL)).splitlines()
    assert len(commands) == 5
    for command in commands:
        name, *arguments = command.split()
        assert name == "fourfold"
        assert fourfold_(*arguments).exit_code == 0, command
    assert {path.name for path in tmp_path.iterdir()} == {"1f1b.png", "zbv.png", "mine.csv", "runs"}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.toml")), ids=lambda path: path.stem)
def test_an_example_can_be_run(path: Path) -> None:
    run = RunSpec.load(path)
    run.check(vocab_size=257, world_size=4)
    assert f"fourfold train examples/{path.name}" in path.read_text()
