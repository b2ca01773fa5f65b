"""The job this process belongs to, read from the environment of torchrun or Slurm."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from fourfold.errors import UserError

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class JobEnvironment:
    """This process's place among the ranks, and where they meet.

    ``node`` numbers the machines. ``store_is_served`` says that the launcher already serves the store at
    ``master_address:master_port`` (torchrun and the local launcher do), so that rank 0 must not.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    master_address: str
    master_port: int
    store_is_served: bool = False

    @staticmethod
    def alone() -> "JobEnvironment":
        """Return the job of a single process, which meets nobody."""
        return JobEnvironment(0, 1, 0, 1, 0, "localhost", 0)

    def export(self) -> None:
        """Set the environment variables that torch reads, whoever started this process."""
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK=str(self.local_rank),
            LOCAL_WORLD_SIZE=str(self.local_world_size),
            MASTER_ADDR=self.master_address,
            MASTER_PORT=str(self.master_port),
        )


def joined_job(environment: Mapping[str, str] | None = None) -> JobEnvironment | None:
    """Return the job that torchrun or Slurm started this process in, or None.

    A Slurm job counts when it has more than one task. Raises UserError where the environment of a job
    is incomplete or is no number.
    """
    variables = os.environ if environment is None else environment
    if "RANK" in variables and "WORLD_SIZE" in variables:
        return _torchrun_job(variables)
    tasks = variables.get("SLURM_STEP_NUM_TASKS") or variables.get("SLURM_NTASKS", "1")
    if "SLURM_PROCID" in variables and tasks != "1":
        return _slurm_job(variables)
    return None


def _torchrun_job(variables: Mapping[str, str]) -> JobEnvironment:
    """Read the variables that torchrun sets; by hand, all five of them are needed."""
    missing = [name for name in TORCHRUN_VARIABLES if name not in variables]
    if missing:
        raise UserError(
            f"RANK and WORLD_SIZE are set but {', '.join(missing)} not: a rank of a job needs "
            f"{', '.join(TORCHRUN_VARIABLES)} (torchrun sets them); unset RANK and WORLD_SIZE to start "
            "local ranks instead"
        )
    rank, world_size = _number(variables, "RANK"), _number(variables, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise UserError(
            f"RANK={rank} is not one of the WORLD_SIZE={world_size} ranks: use 0 to {world_size - 1}"
        )
    local_rank = _number(variables, "LOCAL_RANK")
    local_world_size = (
        _number(variables, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in variables else world_size
    )
    return JobEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node=_number(variables, "GROUP_RANK") if "GROUP_RANK" in variables else rank // local_world_size,
        master_address=variables["MASTER_ADDR"],
        master_port=_number(variables, "MASTER_PORT"),
        store_is_served=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _slurm_job(variables: Mapping[str, str]) -> JobEnvironment:
    """Read the variables that srun sets. MASTER_ADDR and MASTER_PORT win over what Slurm tells."""
    world_size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "SLURM_NTASKS"
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST") or ""
    nodes = nodes or variables.get("SLURM_NODELIST", "")
    if not nodes and "MASTER_ADDR" not in variables:
        raise UserError(
            "this is a Slurm task but SLURM_JOB_NODELIST is not set: start the ranks with srun, "
            "or set MASTER_ADDR"
        )
    job = _number(variables, "SLURM_JOB_ID") if "SLURM_JOB_ID" in variables else 0
    step = int(variables["SLURM_STEP_ID"]) if variables.get("SLURM_STEP_ID", "").isdigit() else 0
    world_size = _number(variables, world_size_name)
    per_node = re.match(
        r"\d+", variables.get("SLURM_STEP_TASKS_PER_NODE", variables.get("SLURM_TASKS_PER_NODE", ""))
    )
    return JobEnvironment(
        rank=_number(variables, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(variables, "SLURM_LOCALID"),
        local_world_size=int(per_node.group()) if per_node else world_size,
        node=_number(variables, "SLURM_NODEID") if "SLURM_NODEID" in variables else 0,
        master_address=variables.get("MASTER_ADDR") or first_host(nodes),
        master_port=_number(variables, "MASTER_PORT")
        if "MASTER_PORT" in variables
        else slurm_port(job, step),
    )


def slurm_port(job: int, step: int) -> int:
    """Return the port at which the ranks of a Slurm step meet: the same on all, below the ephemeral ones."""
    return 10_000 + (7 * job + step) % 20_000


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: ``gpu[03-04,9],cpu1`` gives ``gpu03``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group())


def _number(variables: Mapping[str, str], name: str) -> int:
    """Return the variable as a whole number, at least 0."""
    text = variables.get(name, "")
    if not text.isdigit():
        shown = f"{name}={text}" if text else f"{name} is not set"
        raise UserError(f"{shown}: a rank of a job needs a whole number there (torchrun and srun set it)")
    return int(text)
