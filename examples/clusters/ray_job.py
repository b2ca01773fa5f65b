"""Two nodes of eight GPUs on a Ray cluster: python examples/clusters/ray_job.py run.toml --layout fsdp16

One Ray task a node, which runs torchrun, and that the same command as everywhere on each GPU. The tasks are
placed together or not at all. Ray starts no rank again by itself, and need not: where one fails all end, and
this script starts them again, --resume going on from the newest checkpoint.
"""

import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES, GPUS, RESTARTS = 2, 8, 10


@ray.remote(num_cpus=0)
def free_address() -> tuple[str, int]:
    """Return the address of this node, and a port that is free there now."""
    with socket.socket() as server:
        server.bind(("", 0))
        return ray.util.get_node_ip_address(), server.getsockname()[1]


def torchrun(number: int, address: str, port: int, arguments: list[str]) -> list[str]:
    """Return the command that runs the ranks of one node."""
    command = [sys.executable, "-m", "torch.distributed.run", "--shutdown-timeout=150"]
    place = [f"--nnodes={NODES}", f"--node-rank={number}", f"--nproc-per-node={GPUS}"]
    meeting = [f"--master-addr={address}", f"--master-port={port}"]
    return [*command, *place, *meeting, "--module", "fourfold", "train", *arguments, "--resume"]


@ray.remote(num_gpus=GPUS, max_retries=0)
def node(number: int, address: str, port: int, arguments: list[str]) -> int:
    """Run the ranks of one node and return the exit status of their launcher."""
    return subprocess.run(torchrun(number, address, port, arguments), check=False).returncode


def main() -> int:
    """Run to the end, with restarts."""
    ray.init(address="auto")
    group = placement_group([{"GPU": GPUS, "CPU": GPUS}] * NODES, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    places = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=n) for n in range(NODES)]
    for _ in range(RESTARTS + 1):
        address, port = ray.get(free_address.options(scheduling_strategy=places[0]).remote())
        tasks = [
            node.options(scheduling_strategy=place).remote(number, address, port, sys.argv[1:])
            for number, place in enumerate(places)
        ]
        statuses = ray.get(tasks)
        if not any(statuses):
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
