"""The floors, held: imports go down only, floor 0 needs no torch, one place communicates."""

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import fourfold

PACKAGE = Path(__file__).parent.parent / "src" / "fourfold"

FLOORS: dict[str, int] = {
    "errors": 0,
    "specs": 0,
    "flops": 0,
    "step_flops": 0,
    "traffic": 0,
    "memory": 0,
    "allocator": 0,
    "threads": 0,
    "learning_rate": 0,
    "place": 0,
    "stop": 0,
    "program": 0,
    "layer.split": 0,
    "layer.transfers": 0,
    "layer.list_scheduling": 0,
    "layer.schedules": 0,
    "layer.v_schedules": 0,
    "layer.schedule_search": 0,
    "layer.schedule_file": 0,
    "layer.transport": 2,
    "batch.pieces": 0,
    "batch.gathers": 0,
    "batch.reduction": 0,
    "batch.costs": 0,
    "channel.cuts": 0,
    "channel.plans": 0,
    "channel.costs": 0,
    "channel.parts": 2,
    "channel.vocabulary": 2,
    "channel.dropout": 2,
    "channel.checked_plan": 2,
    "channel.regather": 2,
    "channel.tensor_parallel": 2,
    "channel.decoder": 2,
    "rectangle": 0,
    "sequence.partition": 0,
    "sequence.rectangles": 0,
    "sequence.rows": 0,
    "sequence.costs": 0,
    "sequence.ring": 2,
    "sequence.ulysses": 2,
    "sequence.sinks": 2,
    "sequence.ops": 2,
    "sequence.attention": 2,
    "sequence.hugging_face": 2,
    "sequence.decoder": 2,
    "recompute": 0,
    "build": 0,
    "outline": 0,
    "block_memory": 0,
    "rank_memory": 0,
    "explain": 0,
    "explain_picture": 5,
    "events": 0,
    "trial": 0,
    "planner": 0,
    "mesh": 1,
    "kept": 1,
    "flop_counter": 1,
    "attention_engine": 1,
    "collectives": 1,
    "models": 1,
    "initialize": 2,
    "weight_gradients": 2,
    "refused_steps": 2,
    "batch.units": 2,
    "batch.unit_specs": 2,
    "batch.rank_units": 2,
    "batch.unit_groups": 2,
    "measured": 2,
    "ledger": 2,
    "segment": 3,
    "autograd_segment": 3,
    "execute": 3,
    "optimizer": 4,
    "named_weights": 4,
    "stages": 4,
    "parallel_model": 4,
    "assembly": 4,
    "module_state": 4,
    "module_gradients": 4,
    "sharded_module": 4,
    "data": 5,
    "held": 5,
    "training": 5,
    "not_finite": 5,
    "oracle": 5,
    "reference": 5,
    "first_difference": 5,
    "verify": 5,
    "rehearsal": 5,
    "sampling": 5,
    "checkpoint": 5,
    "gauges": 5,
    "loggers": 5,
    "reporting": 5,
    "pictures": 5,
    "run_folder": 5,
    "doctor": 5,
    "launch": 6,
    "bench": 6,
    "cli": 6,
    "__main__": 6,
}
"""Of a file, or of a folder where all its files share one."""

AXIS_FOLDERS = {"layer", "batch", "sequence", "channel"}

COMMUNICATION = {
    "all_reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_gather",
    "all_gather_into_tensor", "all_gather_single", "all_gather_object", "all_gather_tensor", "all_to_all",
    "all_to_all_single", "broadcast", "broadcast_object_list", "reduce", "scatter", "scatter_object_list",
    "gather", "gather_object", "send", "recv", "isend", "irecv", "send_object_list", "recv_object_list",
    "batch_isend_irecv", "barrier", "monitored_barrier", "all_reduce_coalesced", "all_gather_coalesced",
}  # fmt: skip
"""Functions of torch.distributed and its submodules."""

GROUP_METHODS = {"allreduce", "allgather", "alltoall", "alltoall_base", "_allgather_base"}
"""Methods of a process group that do the same; nothing else has these names."""


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path): path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"
}
AXIS_INITS = AXIS_FOLDERS & set(MODULES)


def floor_of(module: str) -> int:
    name = module
    while name not in FLOORS:
        assert "." in name, f"{module} has no floor: add it to FLOORS"
        name = name.rpartition(".")[0]
    return FLOORS[name]


def imports_of(path: Path, *, inside_functions: bool = True) -> set[str]:
    """The fourfold modules that a file imports, anywhere in it or at its top only."""
    found = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if inside_functions else tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fourfold":
            base = node.module.removeprefix("fourfold").removeprefix(".")
            for alias in node.names:
                longer = f"{base}.{alias.name}" if base else alias.name
                found.add(longer if longer in MODULES else base)
            assert node.level == 0, f"{path}: relative import"
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.removeprefix("fourfold.")
                for alias in node.names
                if alias.name.startswith("fourfold.")
            }
    return {name for name in found if name}


@pytest.mark.parametrize("module", sorted(set(MODULES) - AXIS_INITS))
def test_imports_go_down_only(module: str) -> None:
    above = {name for name in imports_of(MODULES[module]) if floor_of(name) > floor_of(module)}
    assert not above, f"{module} (floor {floor_of(module)}) imports upwards: {above}"


def test_axis_folders_have_empty_inits() -> None:
    for name in AXIS_INITS:
        assert not imports_of(MODULES[name])


def test_the_axes_never_import_each_other() -> None:
    for module, path in MODULES.items():
        own = module.split(".")[0]
        if own in AXIS_FOLDERS:
            others = {name.split(".")[0] for name in imports_of(path)} & (AXIS_FOLDERS - {own})
            assert not others, f"{module} imports another axis: {others}"


def test_no_import_cycles_between_files_or_folders() -> None:
    # Between folders anywhere; between files at their top: a method may load a file of its own folder late.
    files = {module: imports_of(path, inside_functions=False) for module, path in MODULES.items()}
    folders: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        top = module.split(".")[0]
        folders.setdefault(top, set()).update({name.split(".")[0] for name in imports_of(path)} - {top})
    for graph in (files, folders):
        assert not cycle_in(graph), f"import cycle: {' -> '.join(cycle_in(graph))}"


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    state: dict[str, int] = {}
    trail: list[str] = []

    def visit(node: str) -> list[str]:
        state[node] = 1
        trail.append(node)
        for following in sorted(graph.get(node, ())):
            if state.get(following) == 1:
                return [*trail[trail.index(following) :], following]
            if following not in state and (found := visit(following)):
                return found
        state[node] = 2
        trail.pop()
        return []

    for node in graph:
        if node not in state and (found := visit(node)):
            return found
    return []


def test_floor_0_imports_no_torch() -> None:
    modules = [
        f"fourfold.{module}" for module in MODULES if module not in AXIS_INITS and floor_of(module) == 0
    ]
    code = f"import sys, {', '.join(modules)}\nassert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)


def communication_in(source: str) -> list[str]:
    """The places where Python source communicates by torch, as written there."""
    tree = ast.parse(source)
    modules = {"torch.distributed", "dist", "distributed"}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname for alias in node.names if alias.asname and is_distributed(alias.name)}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if not is_distributed(full):
                    continue
                if alias.name in COMMUNICATION or alias.name == "*":
                    found.append(ast.unparse(node))
                else:
                    modules.add(alias.asname or alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            of_module = owner in modules or is_distributed(owner)
            if (of_module and node.attr in COMMUNICATION) or node.attr in GROUP_METHODS:
                found.append(ast.unparse(node))
    return found


def is_distributed(name: str) -> bool:
    return name == "torch.distributed" or name.startswith("torch.distributed.")


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch\ntorch.distributed.all_reduce(x)",
        "import torch.distributed as td\ntd.barrier()",
        "from torch import distributed\ndistributed.send(x, 1)",
        "from torch import distributed as d\nd.all_gather_object(out, x)",
        "from torch.distributed import all_gather",
        "from torch.distributed import ReduceOp, all_gather as gather_all",
        "from torch.distributed import *",
        "from torch.distributed.nn.functional import all_to_all_single",
        "import torch.distributed.nn.functional as nnf\nnnf.all_gather(x)",
        "from torch.distributed.nn import functional\nfunctional.broadcast(x, 0)",
        "import torch\ntorch.distributed.nn.functional.reduce_scatter(x, y)",
        "import torch.distributed._functional_collectives as funcol\nfuncol.all_gather_tensor(x, 0, g)",
        "reduce = torch.distributed.reduce",
        "axis.group.allreduce([x])",
    ],
)
def test_communication_is_seen_however_it_is_written(source: str) -> None:
    assert communication_in(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.init_process_group('gloo')",
        "from torch.distributed import ReduceOp, TCPStore",
        "from fourfold.collectives import all_reduce_, broadcast_\nall_reduce_(x, axis)",
        "from functools import reduce\nunit.reduce(axis)",
        "x.scatter(0, index, y)\ntorch.gather(x, 0, index)",
    ],
)
def test_what_is_no_communication_is_left_alone(source: str) -> None:
    assert not communication_in(source)


def test_only_collectives_communicate() -> None:
    for module, path in MODULES.items():
        found = communication_in(path.read_text())
        if module.split(".")[0] != "collectives":
            assert not found, f"{module} communicates: {found}"
    assert communication_in(MODULES["collectives.backend"].read_text())


def test_public_names_are_what_their_modules_define() -> None:
    """Also once every module is loaded: a submodule with a public name's spelling would take its place."""
    for module in MODULES:
        if module != "__main__":
            import_module(f"fourfold.{module}")
    assert fourfold.__all__ == sorted(fourfold._HOME)
    for name, home in fourfold._HOME.items():
        found = getattr(fourfold, name)
        assert callable(found), f"fourfold.{name} is {found!r}"
        assert found.__name__ == name
        assert found is getattr(import_module(f"fourfold.{home}"), name)
        assert found.__module__.startswith(f"fourfold.{home}")
    with pytest.raises(AttributeError, match="module 'fourfold' has no attribute 'nothing'"):
        _ = fourfold.nothing


def test_every_floor_has_its_file() -> None:
    unknown = [name for name in FLOORS if name not in MODULES]
    assert not unknown, f"FLOORS names what is not there: {unknown}"


def test_the_page_on_architecture_has_the_same_floors() -> None:
    page = (PACKAGE.parent.parent / "ARCHITECTURE.md").read_text()
    table = page.split("## The floors")[1].split("\n## ")[0]
    written = {}
    for line in table.splitlines():
        if cells := re.fullmatch(r"\| (\d) \| (.*?) \|.*", line):
            for name in re.findall(r"`([^`]+)`", cells[2]):
                written[name.rstrip("/").replace("/", ".")] = int(cells[1])
    assert written == {name: floor for name, floor in FLOORS.items() if name != "__main__"}


def test_no_file_is_a_drawer() -> None:
    for name in ("utils", "helpers", "common", "manager", "base", "misc"):
        assert not [module for module in MODULES if name in module.split(".")]
