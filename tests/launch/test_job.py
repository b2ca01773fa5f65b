"""The environment of torchrun and Slurm."""

import pytest

from fourfold.errors import UserError
from fourfold.launch import JobEnvironment, joined_job
from fourfold.launch.job import first_host, slurm_port

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_no_launcher_means_no_job():
    assert joined_job({"PATH": "/bin"}) is None


def test_a_slurm_job_of_one_task_starts_its_own_ranks():
    assert joined_job({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}) is None


def test_torchrun():
    assert joined_job(TORCHRUN) == JobEnvironment(5, 8, 1, 4, 1, "node0", 29500, store_is_served=True)


def test_torchrun_by_hand_without_an_address():
    with pytest.raises(UserError, match="LOCAL_RANK, MASTER_ADDR, MASTER_PORT not"):
        joined_job({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(("name", "value"), [("RANK", "8"), ("MASTER_PORT", "http"), ("LOCAL_RANK", "-1")])
def test_torchrun_with_a_wrong_value(name: str, value: str):
    with pytest.raises(UserError, match=f"{name}={value}"):
        joined_job({**TORCHRUN, name: value})


def test_slurm():
    job = joined_job(
        {
            "SLURM_PROCID": "6",
            "SLURM_NTASKS": "8",
            "SLURM_LOCALID": "2",
            "SLURM_NODEID": "1",
            "SLURM_JOB_NODELIST": "gpu[003-004,9],cpu1",
            "SLURM_TASKS_PER_NODE": "4(x2)",
            "SLURM_JOB_ID": "1234567",
        }
    )
    assert job == JobEnvironment(6, 8, 2, 4, 1, "gpu003", slurm_port(1234567, 0))


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[03-04,9],cpu1", "gpu03"),
        ("rack[1-2]-node[07,09]", "rack1-node07"),
        ("a-b[5]", "a-b5"),
    ],
)
def test_first_host_of_a_node_list(nodes: str, host: str):
    assert first_host(nodes) == host


def test_slurm_ports_stay_below_the_ephemeral_range():
    assert {10_000 <= slurm_port(job, step) < 30_000 for job in range(0, 10**6, 997) for step in (0, 3)} == {
        True
    }
    assert slurm_port(77, 0) != slurm_port(77, 1)
