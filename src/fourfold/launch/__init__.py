"""Starting ranks: local ones, or joining a torchrun or Slurm job."""

from fourfold.launch.job import JobEnvironment, joined_job
from fourfold.launch.local import check_local_ranks, launch, run_on_local_ranks
from fourfold.launch.rank import Rank

__all__ = ["JobEnvironment", "Rank", "check_local_ranks", "joined_job", "launch", "run_on_local_ranks"]
