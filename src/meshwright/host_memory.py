"""The memory of this machine that processes can still take, within its container."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

GIB = 1024**3
MEMINFO = Path("/proc/meminfo")
CGROUPS = (  # folder, file of the limit, file of the usage, name of the reclaimable page cache
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_gib() -> float | None:
    """Return the memory that processes can still take, within the machine and its container; None if unknown."""
    known = [one for one in (_machine_bytes(), *(_container_bytes(*group) for group in CGROUPS)) if one is not None]
    return min(known) / GIB if known else None


def _machine_bytes() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        lines = MEMINFO.read_text().splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    with suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _container_bytes(folder: Path, limit: str, used: str, cached: str) -> int | None:
    with suppress(OSError, ValueError):  # there is no such limit, or it is 'max'
        in_use = int((folder / used).read_text())
        figures = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, int((folder / limit).read_text()) - in_use + int(figures.get(cached, 0)))
    return None
