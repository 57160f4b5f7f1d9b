"""The order of the packages of the kernel."""

from __future__ import annotations

KERNEL = (
    *("core", "messages", "compat", "hardware", "settings"),
    *("leases", "rank", "forkserver", "diagnostics", "pool", "verdict", "driver"),
)
"""The packages of the kernel, lowest first. A module imports from its own package and from lower ones."""
