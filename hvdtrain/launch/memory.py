"""Memory on the CPU: what a step frees stays with the process, for the next step."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

# mallopt(3). The second is the most that glibc takes on 64 bits; a larger piece comes from the kernel each time.
_TRIM_THRESHOLD, _TRIM_BYTES = -1, 1 << 30
_MMAP_THRESHOLD, _MMAP_BYTES = -3, 32 << 20
_USERS_OWN = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "GLIBC_TUNABLES",
)


def keep_freed_memory(environ: Mapping[str, str] | None = None) -> bool:
    """Have glibc's malloc keep up to 1 GiB of freed memory, in place of giving it back to the kernel.

    Every step allocates and frees the gradients. Whether glibc returns them depends on what happens to lie above them;
    where it does, each step pays a page fault per 4 KiB again: 10,000 for 40 MB, which took a quarter of a step.

    Returns:
        Whether it was done: not where the user has set malloc's variables, or the C library is another one.
    """
    environ = os.environ if environ is None else environ
    if any(environ.get(name) for name in _USERS_OWN):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _MMAP_BYTES)) and bool(mallopt(_TRIM_THRESHOLD, _TRIM_BYTES))
