"""The ready files for clusters do what they say, as far as one machine can tell."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import yaml
from torch.distributed.run import parse_args
from typer.testing import CliRunner

from fourfold.cli import app

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
OPTIONS = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"}).output


@pytest.mark.parametrize(
    ("status", "failures", "is_requeued", "counted"),
    [
        (0, 3, False, 0),
        (2, 0, False, 0),
        (75, 0, True, 0),
        (75, 10, True, 0),
        (137, 0, True, 1),
        (137, 9, True, 10),
        (137, 10, False, 11),
    ],
)
def test_slurm_puts_the_job_back_where_it_can_go_on(
    tmp_path: Path, status: int, failures: int, is_requeued: bool, counted: int
):
    """Saved and to be continued, always, even at the 50th start; after ten failures in a row, no more."""
    for name, code in {"srun": f"exit {status}", "scontrol": "true"}.items():
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/said\n{code}\n')
        (tmp_path / name).chmod(0o755)
    count = tmp_path / "fourfold-7.failures"
    if failures:
        count.write_text("status 137\n" * failures)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "50"}
    script = ["bash", str(CLUSTERS / "slurm.sbatch"), "run.toml", "--layout", "fsdp16"]
    ended = subprocess.run(script, env=variables, cwd=tmp_path, check=False, capture_output=True)
    assert (ended.returncode, ended.stderr) == (status, b"")
    command = "srun --kill-on-bad-exit=1 fourfold train run.toml --layout fsdp16 --resume"
    assert (tmp_path / "said").read_text().splitlines() == [command] + ["scontrol requeue 7"] * is_requeued
    assert (len(count.read_text().splitlines()) if count.exists() else 0) == counted


def check_torchrun(words: list[str]) -> list[str]:
    """Let torchrun read the words that follow its name; return those of fourfold."""
    read = parse_args(words)
    assert read.module
    assert read.training_script == "fourfold"
    assert read.training_script_args[0] == "train"
    for word in read.training_script_args:
        if word.startswith("--"):
            assert word.partition("=")[0] in OPTIONS, word
    return read.training_script_args


def test_the_kubernetes_file_fits_together():
    runtime, job = yaml.safe_load_all((CLUSTERS / "kubernetes.yaml").read_text())
    assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["apiVersion"] == runtime["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    [node] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    trainer = job["spec"]["trainer"]
    assert trainer["command"] == ["torchrun"]
    words = check_torchrun(trainer["args"])
    assert "--resume" in words
    gpus = trainer["numNodes"] * trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    assert f"--layout=fsdp{gpus}" in words
    shutdown = int(trainer["args"][0].partition("=")[2])
    assert shutdown < pod["terminationGracePeriodSeconds"]
    mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_ray_script_calls_torchrun_as_it_is(monkeypatch: pytest.MonkeyPatch):
    for name in ("ray", "ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    torchrun = runpy.run_path(str(CLUSTERS / "ray_job.py"))["torchrun"]
    python, *module, _ = command = torchrun(1, "10.0.0.5", 4000, ["run.toml"])
    assert [python, *module[:2]] == [sys.executable, "-m", "torch.distributed.run"]
    assert check_torchrun(command[3:]) == ["train", "run.toml", "--resume"]


def test_the_page_has_a_torchrun_command_that_torchrun_reads():
    page = (CLUSTERS.parents[1] / "docs" / "clusters.md").read_text()
    command = page.split("```sh\ntorchrun")[1].split("```")[0].replace("\\\n", " ").split()
    assert check_torchrun(command)[-1] == "--resume"
