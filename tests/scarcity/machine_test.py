#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Strict overcommit and a memory cgroup of 256 MiB: programs on the preloaded library must work under the one and survive
# in the other; one test case each, in $XML_OUTPUT_FILE. Where the right to set such limits is missing, they are skipped.
# Called by: Bazel, or by hand: machine_test.py LIBRARY FOLDER..., the folders being those with the programs.
# Needs: root. Of the strict overcommit, which is in force while a program runs, others on the machine feel only that they
# cannot map terabytes, as sanitizers do; of the group, nothing.
"""Runs programs under limits that only root can set."""

import os
import pathlib
import resource
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))
import kernel_limits
import report

HEADROOM_MIB = 1536
# The headroom is that of all processes together, and others take and return some meanwhile; limit_test has exact figures.
LEAST_PART, MOST_PART = 0.4, 1.4
FILL = "victim_plain fill 600 5000 70000 1500000"
GROUP_MIB = 256

WORKLOADS = [
    "random_mixed_dist 1000000 400 16 32768 0x12345678 app",
    "larson 1 8 1000 5000 100 1 4",
    "mstress 4 30 10",
    "large_blocks 500 6 5 25",
    "realloc_grow 3000000 5 2",
    "thread_churn 256 2000",
    "fragment 2 64",
    "producer_consumer 4 300000 64 1024",
    "mt_remote 4 200000 400 16 2048 50",
]
OVERCOMMITTED = WORKLOADS + [
    "victim_plain beyond",
    "limit_test",
    "memory_test --gtest_filter=*little_is_mapped_beyond_use*:*freed_at_random*:*ring_of*",
]
# Bursts up to 68 % of the limit on a base of 35 % or 55 %, with a second of little traffic after each: what one burst left
# behind has to go before the next, which is of other sizes, or the process is killed.
GROUPED = WORKLOADS + ["bursts 90 175 12 1000 1", "bursts 90 175 12 1000 2", "bursts 140 175 12 1000 1"]


class Programs:
    """Where the programs and the library are, and how they run."""

    def __init__(self, library, folders):
        self.library = os.path.realpath(library)
        self.folders = [pathlib.Path(folder) for folder in folders]

    def find(self, name):
        return next(str(path.resolve()) for path in (folder / name for folder in self.folders) if path.is_file())

    def run(self, command, preload=(), before_exec=None):
        """(exit status, output); a negative status is a signal's number."""
        name, *arguments = command.split()
        is_test = name.endswith("_test")
        environment = dict(os.environ, HZ3_TEST_SCALE="0.3")
        environment.pop("XML_OUTPUT_FILE", None)
        # What is written with GoogleTest has the allocator linked in, or preloads it itself.
        environment["LD_PRELOAD"] = " ".join(([] if is_test else [self.library]) + list(preload))
        done = subprocess.run([self.find(name), *arguments], env=environment, preexec_fn=before_exec, timeout=120,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return done.returncode, done.stdout


def passes(done):
    """The failure of a case whose program has to end well, or ""."""
    status, output = done
    return "" if status == 0 else "status %d\n%s" % (status, output[-3000:])


def fills(programs, preload):
    """Blocks of each size take up what may be committed, are then refused, and can be had again after they are freed."""
    text = ""
    # If the limit were not in force, another is, and the figures are too high.
    other = 3 * HEADROOM_MIB << 20
    for _ in range(3):
        with kernel_limits.strict_overcommit(HEADROOM_MIB):
            status, output = programs.run(FILL, preload, lambda: resource.setrlimit(resource.RLIMIT_DATA, (other, other)))
        figures = [tuple(map(int, line.split())) for line in output.splitlines()] if status == 0 else []
        parts = [usable / (HEADROOM_MIB << 20) for _, usable in figures]
        if len(parts) == len(FILL.split()) - 2 and min(parts) >= LEAST_PART and max(parts) <= MOST_PART:
            return ""
        text += "status %d, parts of the headroom: %s\n%s" % (status, parts, output[-3000:])
    return text


def overcommit_cases(programs):
    """(name, function that returns a failure) of what runs under vm.overcommit_memory=2."""
    vast = [programs.find("libvast.so")]

    def run(command):
        with kernel_limits.strict_overcommit(HEADROOM_MIB):
            return passes(programs.run(command, [] if command == "limit_test" else vast))

    yield FILL, lambda: fills(programs, vast)
    for command in OVERCOMMITTED:
        yield command, lambda command=command: run(command)


def cgroup_cases(programs):
    """The same in a memory cgroup. First that its limit is one: a program that is too big for it is killed."""

    def run(command):
        with kernel_limits.memory_cgroup(GROUP_MIB) as enter:
            return programs.run(command, before_exec=enter)

    def is_killed():
        status, output = run("bursts %d %d 1 0 1" % (GROUP_MIB + 50, GROUP_MIB + 80))
        return "" if status == -9 else "status %d: the limit is not in force\n%s" % (status, output)

    yield "what is too big is killed", is_killed
    for command in GROUPED:
        yield command, lambda command=command: passes(run(command))


def run_case(name, run):
    """The row of one case for the report."""
    start, outcome = time.monotonic(), "failed"
    try:
        text = run()
        outcome = "failed" if text else "passed"
    except kernel_limits.Unavailable as reason:
        outcome, text = "skipped", str(reason)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        text = str(error)
    print("%s: %s%s" % (outcome, name, "\n" + text if text else ""), flush=True)
    return name, outcome, text, time.monotonic() - start


def main():
    programs = Programs(sys.argv[1], sys.argv[2:])
    rows = [run_case("%s, %s" % (kind, name), run)
            for kind, cases in (("overcommit_memory=2", overcommit_cases), ("cgroup of %d MiB" % GROUP_MIB, cgroup_cases))
            for name, run in cases(programs)]
    return report.finish("machine_test", rows)


if __name__ == "__main__":
    sys.exit(main())
