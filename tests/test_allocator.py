"""Freed memory stays in the process."""

import platform
import resource
import subprocess
import sys

import pytest

# Allocates 256 MiB, frees it, allocates it again, and so on; prints the page faults of the last time.
PROGRAM = """
import resource, sys, torch
from fourfold.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(2**25) for _ in range(2)]
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    del blocks
print(faults)
"""


def faults(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_memory_is_not_given_back_between_steps() -> None:
    pages = 256 * 2**20 // resource.getpagesize()
    assert faults("leave") > pages // 2
    assert faults("keep") < pages // 20
