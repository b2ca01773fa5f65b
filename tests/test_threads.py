"""How threads are scheduled. See [Note: the lock that is tried for]."""

import os
import subprocess
import sys

import pytest

from fourfold.mesh import Mesh
from fourfold.specs import Layout
from tests.ranks import RankPool

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux has this policy")

CHOSEN_BEFORE = """
import os
from fourfold.threads import let_each_other_finish
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
let_each_other_finish()
assert os.sched_getscheduler(0) == os.SCHED_IDLE
"""


def policies(layout: str) -> set[int]:
    """Make a mesh; return the policies of this process's threads, gloo's among them."""
    Mesh(Layout.parse(layout))
    threads = [int(thread) for thread in os.listdir("/proc/self/task")]
    assert len(threads) > 1
    return {os.sched_getscheduler(thread) for thread in threads}


def test_threads_of_a_rank_do_not_push_each_other_aside(ranks: RankPool) -> None:
    assert ranks(2, policies, "dp2") == [{os.SCHED_BATCH}] * 2


def test_a_process_alone_is_left_as_it_is() -> None:
    before = os.sched_getscheduler(0)
    Mesh(Layout.parse("dp1"))
    assert os.sched_getscheduler(0) == before


def test_a_policy_that_somebody_chose_is_kept() -> None:
    done = subprocess.run([sys.executable, "-c", CHOSEN_BEFORE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
