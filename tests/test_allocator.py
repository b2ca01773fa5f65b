"""Freed memory stays in the process."""

import platform
import resource
import subprocess
import sys

import pytest

# Allocates 256 MiB, frees it, allocates it again, and so on; prints the page faults of the last time. Without
# the call it is 0 or nearly all of its 65,536 pages, by chance: whether the top of the heap is free.
PROGRAM = """
import resource, torch
from fourfold.allocator import keep_freed_memory
assert keep_freed_memory()
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(2**19) for _ in range(128)]
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    del blocks
print(faults)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_memory_is_not_given_back_between_steps() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    pages = 256 * 2**20 // resource.getpagesize()
    assert int(done.stdout) < pages // 20
