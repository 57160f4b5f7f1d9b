"""The descriptors of the process that runs the tests, and a limit on them.

Other tests may have left objects that close theirs at any time, and threads that open some.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


def open_descriptors() -> set[int]:
    """Return the descriptors of this process."""
    return {int(name) for name in os.listdir("/dev/fd")}


@contextmanager
def free_descriptors(count: int) -> Iterator[None]:
    """Let this process open `count` more descriptors in the block, or fewer if another thread opens some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = max(open_descriptors())
    gaps = []
    while (free := os.dup(0)) < last:
        gaps.append(free)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for gap in gaps:
            os.close(gap)
