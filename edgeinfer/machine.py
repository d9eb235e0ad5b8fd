"""What this machine allows: how many threads to compute with, and how much memory is free."""

from __future__ import annotations

import os
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")


def default_threads() -> int:
    """One a physical core that this process may use, within its container's share of processors."""
    if hasattr(os, "sched_getaffinity"):
        allowed = os.sched_getaffinity(0)
    else:
        allowed = set(range(os.cpu_count() or 1))
    siblings = {_read(f"/sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list") or str(n) for n in allowed}
    quota = (_read(_GROUP / "cpu.max") or "max").split()
    share = float(quota[0]) / float(quota[1]) if quota[0] != "max" else len(siblings)
    return max(1, min(len(siblings), int(share + 0.5)))


def available_memory() -> int | None:
    """Bytes that can be allocated without swapping: the system's, the container's or the process's limit; None if unknown."""
    limits = []
    for line in (_read("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    most, used = _read(_GROUP / "memory.max"), _read(_GROUP / "memory.current")
    if most and used and most != "max":
        # files that were read count as used, though the system drops them when memory is wanted
        details = dict(line.split() for line in (_read(_GROUP / "memory.stat") or "").splitlines())
        limits.append(max(0, int(most) - int(used) + int(details.get("inactive_file", 0))))
    try:
        import resource
    except ImportError:  # not a POSIX system
        pass
    else:
        soft = resource.getrlimit(resource.RLIMIT_AS)[0]
        mapped = _read("/proc/self/statm")
        if soft != resource.RLIM_INFINITY and mapped:
            limits.append(max(0, soft - int(mapped.split()[0]) * resource.getpagesize()))
    return min(limits) if limits else None


def _read(path: str | Path) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
