# SPDX-License-Identifier: Apache-2.0
"""What machine this is, and whether it is quiet enough to measure on.

Called by: allocators, cli, runner. Owns: nothing. Needs: Linux /proc.
"""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

from bench.ssot.errors import UserError

BUSY_SHARE = 0.04  # of all processors, used by others: the daemons of a large machine are more
SPIN_SPREAD = 0.15  # (slowest - fastest) / fastest of the calibration loops


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def describe() -> dict[str, str]:
    """Processor, kernel, libc and governor, as the log headers carry them."""
    models = [l for l in _read("/proc/cpuinfo").splitlines() if l.startswith("model name")]
    return {
        "cpu": models[0].split(":", 1)[1].strip() if models else platform.machine(),
        "cpus": str(os.cpu_count()),
        "memory_gib": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f}",
        "kernel": platform.release(),
        "glibc": platform.libc_ver()[1],
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or "none",
        "loadavg": _read("/proc/loadavg").rsplit(" ", 2)[0],
    }


def glibc_version() -> tuple[int, ...]:
    """(major, minor) of the running glibc; (0,) elsewhere."""
    try:
        return tuple(int(x) for x in platform.libc_ver()[1].split("."))
    except ValueError:
        return (0,)


def cpu_seconds() -> float:
    """Processor seconds used by everybody since boot, time stolen by a host included."""
    fields = [int(x) for x in _read("/proc/stat").split("\n", 1)[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK")


def _spin() -> float:
    start = time.perf_counter()
    total = 0
    for i in range(200_000):
        total += i
    return time.perf_counter() - start


def foreign_load(seconds: float = 1.0) -> float:
    """Processors' worth of work that others do while this process sleeps."""
    before, start = cpu_seconds(), time.monotonic()
    time.sleep(seconds)
    return max(0.0, (cpu_seconds() - before) / (time.monotonic() - start))


def spin_spread(repeats: int = 12) -> float:
    """Relative spread of a fixed calibration loop, the two worst repeats dropped."""
    times = sorted(_spin() for _ in range(repeats))[:-2]
    return times[-1] / times[0] - 1.0


def check_quiet(patience_s: float = 20.0, say=print) -> dict[str, float]:
    """Waits a little for quiet and returns the readings; UserError when it stays busy."""
    deadline = time.monotonic() + patience_s
    limit = BUSY_SHARE * (os.cpu_count() or 1)
    while True:
        load, spread = foreign_load(), spin_spread()
        readings = {"foreign_cpus": round(load, 3), "spin_spread": round(spread, 3)}
        if load <= limit and spread <= SPIN_SPREAD:
            return readings
        if time.monotonic() >= deadline:
            raise UserError(
                f"the machine is busy (others use {load:.2f} processors, {limit:.2f} are allowed; a fixed loop "
                f"varies by {spread:.0%}, {SPIN_SPREAD:.0%} are allowed): stop other work or pass --allow-busy"
            )
        say(f"waiting for quiet: others use {load:.2f} processors, loop varies by {spread:.0%}")
