#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests the benchmark programs: exact work, result lines, failing self-checks.

Called by: bazel test //bench/workloads:workloads_test, and with --all-rows by
  the manual target that runs the long reference rows too.
Needs: the programs and libraries beside this file; nothing but the standard
  library.
"""

import os
import subprocess
import sys
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
MASK32 = (1 << 32) - 1
MASK64 = (1 << 64) - 1
SEED = 0x12345678

# The shortest arguments with which each program still does all it does.
TINY = {
    "buffers": "2 300 20 5000 60000",
    "burst_idle": "2 16 1",
    "cache_scratch": "2 10 8 1000",
    "cache_thrash": "2 10 8 1000",
    "containers": "2 20000 1 documents",
    "drawn": "2 20 47",
    "false_sharing": "2 5 100",
    "fragment": "1 16",
    "frames": "2 20 300 500 1 2",
    "glibc_simple": "2 1000",
    "large_blocks": "20 4 5 25",
    "larson": "1 8 1000 500 10 1 3",
    "lifo": "1000 64 16",
    "lru_cache": "1 4",
    "mstress": "4 2 3",
    "mt_remote": "4 20000 400 16 2048 50",
    "phases": "2 2 6 100",
    "producer_consumer": "2 20000 64 256",
    "queue": "2 5000 1000 64 100",
    "random_mixed": "20000 400 16 2048",
    "random_mixed_dist": "20000 400 16 32768 0x12345678 app",
    "realloc_grow": "100000 3 2",
    "size_sweep": "8 100000 10 20 2",
    "sparse": "2 50 20 100000 5000",
    "tasks": "4 2000 100",
    "thread_churn": "64 200",
    "tree": "10 3",
}

# Programs that notice when a block in use changes its contents.
CHECKING = ("buffers", "drawn", "frames", "larson", "mstress", "phases", "producer_consumer", "queue", "sparse", "tasks", "thread_churn",
            "tree", "large_blocks")

# threads iters remote_pct max | allocated local_freed remote_sent bytes
REFERENCE_ROWS = (
    (8, 250000, 50, 2048, 1000815, 499362, 499823, 1032979141),
    (32, 250000, 0, 2048, 4003242, 3996758, 0, 4132283820),
    (32, 250000, 50, 2048, 4003242, 1999454, 1997304, 4132283820),
    (32, 250000, 50, 32768, 4003242, 1999454, 1997304, 65636690377),
    (16, 2000000, 90, 2048, 16001603, 1597913, 14400484, 16509663688),
)
ALL_ROWS = "--all-rows" in sys.argv


def run(program, arguments="", preload=None, **environment):
  """Returns (exit status, stdout, stderr)."""
  environment = dict(os.environ, **environment)
  if preload:
    environment["LD_PRELOAD"] = os.path.join(HERE, preload)
  done = subprocess.run(
      [os.path.join(HERE, program)] + arguments.split(),
      env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
      universal_newlines=True, timeout=600)
  return done.returncode, done.stdout, done.stderr


def fields(output, prefix):
  """The key=value pairs of the one line that starts with `prefix`."""
  lines = [l for l in output.splitlines() if l.startswith(prefix + " ")]
  if len(lines) != 1:
    raise AssertionError("%d lines start with %s:\n%s" %
                         (len(lines), prefix, output))
  words = lines[0][len(prefix):].split()
  return dict(word.split("=", 1) for word in words)


def xorshift64(x):
  x ^= (x << 13) & MASK64
  x ^= x >> 7
  return x ^ ((x << 17) & MASK64)


def xorshift32(x):
  x ^= (x << 13) & MASK32
  x ^= x >> 17
  return x ^ ((x << 5) & MASK32)


def random_mixed_model(iters, slots, size_of):
  """Allocations and bytes that random_mixed has to ask for."""
  state, live, allocated, size_sum = SEED, set(), 0, 0
  for _ in range(iters):
    state = xorshift64(state)
    slot = state % slots
    if slot in live:
      live.remove(slot)
    else:
      live.add(slot)
      allocated += 1
      size_sum += size_of(state >> 32)
  return allocated, size_sum, len(live)


def weighted(*buckets):
  """The size draw of random_mixed_dist for (min, max, weight) buckets."""
  def size_of(random):
    total = sum(weight for _, _, weight in buckets)
    pick, rest = random % total, random // total
    for low, high, weight in buckets:
      if pick < weight:
        return low + rest % (high - low + 1)
      pick -= weight
    raise AssertionError("no bucket")
  return size_of


def stream_seed(seed, index):
  """wl_stream_seed."""
  z = (seed + (index + 1) * 0x9e3779b97f4a7c15) & MASK64
  z = ((z ^ (z >> 30)) * 0xbf58476d1ce4e5b9) & MASK64
  z = ((z ^ (z >> 27)) * 0x94d049bb133111eb) & MASK64
  return z ^ (z >> 31) or 1


def buffers_model(ops, places, least, most, order):
  """Bytes that buffers has to ask for in one thread."""
  state = stream_seed(SEED, 0)

  def below(bound):
    nonlocal state
    state = xorshift64(state)
    return (state >> 32) % bound

  def size():
    doublings = 0
    while least << (doublings + 1) < most:
      doublings += 1
    start = least << below(doublings + 1)
    return start + below(min(2 * start, most) - start + 1)

  asked = sum(size() for _ in range(places))
  while ops > 0:
    count = 1
    if order == 0:
      below(places)
    elif order == 2:
      count = min(1 + below(places // 4 + 1), places, ops)
    asked += sum(size() for _ in range(count))
    ops -= count
  return asked


def phases_model(rounds, phases, phase_kib, keep_percent):
  """(allocated, bytes) of phases in one thread."""
  state, allocated, size_sum = stream_seed(SEED, 0), 0, 0
  for _ in range(rounds):
    live = 0
    for base in (24 << phase for phase in range(phases)):
      built = 0
      while built < phase_kib << 10:
        state = xorshift64(state)
        built += base + (state >> 32) % (base // 2)
        allocated += 1
        live += 1
      size_sum += built
      kept = 0
      for _ in range(live):
        state = xorshift64(state)
        kept += (state >> 32) % 100 < keep_percent
      live = kept
    for _ in range(live):
      state = xorshift64(state)
  return allocated, size_sum


def frames_model(frames, most, order):
  """Blocks that one thread of frames allocates."""
  state, allocated = stream_seed(SEED, 0), 0
  for _ in range(frames):
    state = xorshift64(state)
    least = (most + 1) // 2
    count = least + (state >> 32) % (most - least + 1)
    allocated += count
    for _ in range(count - 1 if order == 1 else 0):
      state = xorshift64(state)
  return allocated


def mt_remote_model(threads, iters, slots, low, high, percent):
  """(allocated, local, remote, bytes) of mt_remote."""
  allocated = local = remote = size_sum = 0
  for thread in range(threads):
    state, live = SEED + 101 * thread, set()
    for _ in range(iters):
      state = xorshift32(state)
      slot, size = state % slots, low + state % (high - low + 1)
      if slot in live:
        live.remove(slot)
        state = xorshift32(state)
        if state % 100 < percent:
          remote += 1
        else:
          local += 1
      else:
        live.add(slot)
        allocated += 1
        size_sum += size
  return allocated, local, remote, size_sum


class ResultLines(unittest.TestCase):

  def test_every_program(self):
    for program, arguments in TINY.items():
      with self.subTest(program=program):
        status, out, err = run(program, arguments)
        self.assertEqual((status, err), (0, ""))
        result = fields(out, program + ":")
        ops, time = int(result["ops"]), float(result["time"])
        self.assertGreater(ops, 0)
        self.assertGreater(time, 0)
        # Both are rounded: the time to 1e-6 s, the rate to 1e-2.
        self.assertAlmostEqual(float(result["ops/s"]) * time / ops, 1,
                               delta=1e-6 / time + 1e-2 * time / ops)
        resources = fields(out, "[RESOURCES]")
        self.assertGreaterEqual(int(resources["peak_rss_kib"]),
                                int(resources["end_rss_kib"]))
        self.assertGreater(int(resources["minor_faults"]), 0)
        self.assertIn("voluntary_switches", resources)

  def test_settle_reports_the_resident_size_again(self):
    _, out, _ = run("lifo", "1000 --settle 1")
    resources = fields(out, "[RESOURCES]")
    self.assertEqual(resources["settle_s"], "1")
    self.assertGreater(int(resources["settled_rss_kib"]), 0)

  def test_help(self):
    for program in TINY:
      with self.subTest(program=program):
        status, out, err = run(program, "--help")
        self.assertEqual((status, err), (0, ""))
        self.assertIn("usage: " + program, out)
        self.assertIn("Example: " + program, out)


class BadArguments(unittest.TestCase):

  def expect_complaint(self, program, arguments, message):
    with self.subTest(program=program, arguments=arguments):
      status, out, err = run(program, arguments)
      self.assertEqual((status, out), (2, ""))
      self.assertRegex(err, "^%s: .*%s.*%s --help" %
                       (program, message, program))

  def test_every_program(self):
    for program in TINY:
      self.expect_complaint(program, "--nonsense", "unknown option")
      self.expect_complaint(program, "nonsense=1", "no argument named")
      self.expect_complaint(program, "1x", "'1x' is not a number from")
      self.expect_complaint(program, "99999999999999999999", "is not a number")
      self.expect_complaint(program, "--settle", "--settle: '' is not")

  def test_too_many(self):
    self.expect_complaint("lifo", "1 1 1 1 1", "too many arguments")
    self.expect_complaint("tree", "1 1 1 x", "too many arguments")

  def test_combinations(self):
    self.expect_complaint("random_mixed", "10 10 20 10", "smaller than min")
    self.expect_complaint("size_sweep", "9 8", "max is smaller than min")
    self.expect_complaint("mt_remote", "ring_slots=1000", "power of two")
    self.expect_complaint("lifo", "--latency", "unknown option")
    for mode, message in (("zipf", "app or trimix"),
                          ("app 1", "takes no numbers"),
                          ("trimix 1 2 3", "takes 9 numbers"),
                          ("trimix 1 2 3 4 5 6 7 8 -1", "'-1' is not"),
                          ("trimix 1 9 1 1 9 1 1 9 1", "no range")):
      self.expect_complaint("random_mixed_dist",
                            "10 10 16 99 1 " + mode, message)
    self.expect_complaint("containers", "1 10 1 bags", "'bags' is not one")
    self.expect_complaint("containers", "1 10 1 sets lists", "'lists' is not")


class ExactWork(unittest.TestCase):

  def count(self, program, arguments):
    status, out, err = run(program, arguments, "libmalloc_probe.so",
                           PROBE="count")
    self.assertEqual(status, 0, err)
    probe = fields(err, "[PROBE]")
    return out, int(probe["mallocs"]), int(probe["bytes"]), int(probe["frees"])

  def check_random_mixed(self, program, arguments, size_of):
    iters, slots = (int(word) for word in arguments.split()[:2])
    allocated, size_sum, live = random_mixed_model(iters, slots, size_of)
    out, mallocs, asked, frees = self.count(program, arguments)
    self.assertEqual((mallocs, asked, frees), (allocated, size_sum, allocated))
    self.assertEqual(int(fields(out, program + ":")["ops"]), iters + live)

  def test_random_mixed(self):
    self.check_random_mixed("random_mixed", "30000 400 16 2048",
                            lambda random: 16 + random % 2033)
    self.check_random_mixed("random_mixed", "30000 7 100 100",
                            lambda random: 100)

  def test_random_mixed_dist(self):
    self.check_random_mixed(
        "random_mixed_dist", "30000 400 16 32768 0x12345678 app",
        weighted((16, 256, 80), (257, 2048, 15), (2049, 32768, 5)))
    self.check_random_mixed(
        "random_mixed_dist",
        "30000 400 16 256 0x12345678 trimix 16 256 100 257 2048 0 2049 32768 0",
        weighted((16, 256, 100)))
    # The third range is empty after clipping, the second one shorter.
    self.check_random_mixed(
        "random_mixed_dist",
        "30000 400 20 300 0x12345678 trimix 1 256 70 257 2048 20 2049 9999 10",
        weighted((20, 256, 70), (257, 300, 20)))

  def test_no_call_is_optimised_away_or_added(self):
    for program, arguments, expected in (
        ("lifo", "1000 64 1", 1000), ("lifo", "1000 64 100", 1000),
        ("lifo", "1000 64 1 touch=1", 1000), ("lifo", "1000 64 100 1", 1000),
        ("tree", "9 2", 2 * 1023), ("tree", "9 2 1", 2 * 1023),
        ("glibc_simple", "1 6400", 50 * 6400),
        ("large_blocks", "20 4 5 6", 20)):
      with self.subTest(program=program, arguments=arguments):
        _, mallocs, _, frees = self.count(program, arguments)
        self.assertEqual((mallocs, frees), (expected, expected))

  def test_lifo_touches_its_blocks_only_if_asked_to(self):
    # This library itself never writes to a block, and has a page for each.
    for depth in (1, 100):
      faults = []
      for touch in (0, 1):
        _, out, _ = run("lifo", "1000 4096 %d %d" % (depth, touch),
                        "libfloor_bump.so")
        faults.append(int(fields(out, "[RESOURCES]")["minor_faults"]))
      self.assertLess(faults[0], 500)
      self.assertGreaterEqual(faults[1], faults[0] + 900)

  def test_phases(self):
    for arguments in ((2, 6, 100, 10), (1, 3, 20, 0), (2, 4, 30, 100)):
      with self.subTest(arguments=arguments):
        allocated, size_sum = phases_model(*arguments)
        out, mallocs, asked, frees = self.count(
            "phases", "1 %d %d %d %d" % arguments)
        self.assertEqual((mallocs, asked, frees),
                         (allocated, size_sum, allocated))
        self.assertEqual(int(fields(out, "phases:")["ops"]), 2 * allocated)

  def test_frames(self):
    for frames, most, order, walks in ((30, 100, 1, 0), (20, 7, 0, 2),
                                       (20, 1, 2, 1)):
      with self.subTest(order=order):
        allocated = frames_model(frames, most, order)
        out, mallocs, asked, frees = self.count(
            "frames", "1 %d %d 300 %d %d" % (frames, most, order, walks))
        self.assertEqual((mallocs, asked, frees),
                         (allocated, 300 * allocated, allocated))
        self.assertEqual(int(fields(out, "frames:")["ops"]), allocated)

  def test_tasks(self):
    # In one thread. Of the tasks that are left the blocks are not counted as ops.
    for steps, tasks in ((8, 1), (3000, 10), (500, 200)):
      with self.subTest(steps=steps, tasks=tasks):
        out, mallocs, asked, frees = self.count("tasks", "1 %d %d" % (steps, tasks))
        self.assertEqual(mallocs, frees)
        ops = int(fields(out, "tasks:")["ops"])
        self.assertLessEqual(ops, mallocs + frees - 2 * tasks)
        self.assertGreaterEqual(ops, mallocs + frees - tasks * (8 * 6 + 2))
        self.assertGreater(ops, 2 * steps)
        self.assertGreater(asked, 16 * mallocs)

  def test_drawn(self):
    # Seeds that draw neither calloc nor realloc, which the probe does not count, one for each order.
    orders = []
    for seed in (2, 4, 9, 12, 29, 50):
      with self.subTest(seed=seed):
        out, mallocs, asked, frees = self.count("drawn", "2 5 %d" % seed)
        drawn = fields(out, "[BENCH_ARGS]")
        orders.append(drawn["order"])
        self.assertEqual((drawn["cleared"], drawn["grown"]), ("0%", "0%"))
        self.assertEqual((int(fields(out, "drawn:")["ops"]), frees), (mallocs, mallocs))
        if drawn["sizes"] == "one":
          self.assertEqual(asked, mallocs * int(drawn["mean"]))
    self.assertEqual(sorted(orders), ["batches", "drops", "queue", "random", "stack", "young"])

  def test_drawn_draws_everything_and_the_same_for_any_threads(self):
    seen = set()
    for seed in range(1, 31):
      drawn = []
      for threads in (1, 3):
        status, out, err = run("drawn", "%d 1 %d" % (threads, seed))
        self.assertEqual(status, 0, err)
        drawn.append(fields(out, "[BENCH_ARGS]"))
      for what in set(drawn[0]) - {"threads", "places"}:
        self.assertEqual(drawn[0][what], drawn[1][what])
      seen |= {what + "=" + drawn[0][what] for what in ("sizes", "order", "free_order", "written")}
      seen |= {what for what in ("cleared", "grown", "passed") if drawn[0][what] != "0%"}
    self.assertEqual(len(seen), 5 + 6 + 3 + 4 + 3, seen)

  def test_queue(self):
    for way, fill, stay in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 30), (1, 1, 100)):
      with self.subTest(way=way, fill=fill, stay=stay):
        out, mallocs, asked, frees = self.count("queue", "1 3000 500 40 99 %d %d %d" % (way, fill, stay))
        self.assertEqual(int(fields(out, "queue:")["ops"]), mallocs)
        self.assertEqual((asked, frees), (40 * mallocs, mallocs))
        # All that passed through, and what was left then.
        self.assertGreaterEqual(mallocs, 3000 + 500 - 99 - 1)
        self.assertLessEqual(mallocs, 3002 + 500)

  def test_sparse(self):
    out, mallocs, asked, frees = self.count("sparse", "1 300 50 80000 20000")
    self.assertEqual(int(fields(out, "sparse:")["ops"]), 350)
    self.assertEqual((mallocs, frees), (350, 350))
    # Of every block the mean of 80,000 and 90,000 bytes, give or take three standard errors.
    self.assertLess(abs(asked / 350 - 85000), 500)

  def test_sparse_writes_no_more_than_the_start(self):
    # This library never writes to a block, and has pages of its own for each.
    faults = []
    for written in (4096, 81920):
      _, out, _ = run("sparse", "1 100 100 1000000 %d" % written, "libfloor_bump.so")
      faults.append(int(fields(out, "[RESOURCES]")["minor_faults"]))
    self.assertLess(faults[0], 1000)
    self.assertGreaterEqual(faults[1], faults[0] + 200 * 18)

  def test_buffers(self):
    for order in range(3):
      for places, least, most in ((20, 100, 1000), (1, 4096, 4096), (7, 1000, 1500)):
        with self.subTest(order=order, places=places):
          out, mallocs, asked, frees = self.count("buffers", "1 500 %d %d %d %d" % (places, least, most, order))
          self.assertEqual(int(fields(out, "buffers:")["ops"]), 500 + places)
          self.assertEqual((mallocs, frees), (500 + places, 500 + places))
          self.assertEqual(asked, buffers_model(500, places, least, most, order))

  def test_containers(self):
    kinds = ("documents", "hashes", "strings", "sets", "lists", "vectors",
             "versions")
    for kind in kinds:
      with self.subTest(kind=kind):
        out, mallocs, _, frees = self.count("containers", "1 3000 1 " + kind)
        result = fields(out, "containers:")
        self.assertEqual((result["kind"], result["ops"]), (kind, "3000"))
        self.assertGreater(mallocs, 100)
        self.assertLessEqual(mallocs - frees, 1)  # the pool for exceptions

  def test_lru_cache_stays_within_its_bound(self):
    _, out, _ = run("lru_cache", "1 4")
    trace = [l for l in out.splitlines() if l.startswith("[RSS_LIVE_TRACE]")]
    live = [int(sample.split(":")[2]) for sample in trace[0].split()[1:]]
    self.assertLessEqual(max(live), 4096)
    self.assertGreater(live[-1], 4000)
    self.assertGreaterEqual(
        float(fields(out, "lru_cache:")["rss_per_live"]), 1)

  def test_size_sweep(self):
    # Every byte from 8 to 20; two rounds of 1 + 30 batches of 3 blocks each.
    out, mallocs, asked, frees = self.count("size_sweep", "8 20 1 30 2 3")
    sizes = range(8, 21)
    self.assertEqual((mallocs, asked, frees),
                     (len(sizes) * 186, sum(sizes) * 186, len(sizes) * 186))
    self.assertEqual(int(fields(out, "size_sweep:")["ops"]), len(sizes) * 180)
    # Above 200 bytes, 1 % is more than a byte; the last size is max itself.
    sizes = [200]
    while sizes[-1] < 70000:
      sizes.append(min(70000, sizes[-1] + sizes[-1] // 100))
    _, out, _ = run("size_sweep", "200 70000 1 2 1")
    lines = [line for line in out.splitlines() if line.startswith("[SIZE] ")]
    self.assertEqual([int(fields(line, "[SIZE]")["bytes"]) for line in lines],
                     sizes)

  def test_size_sweep_times_what_it_says(self):
    # The probe's malloc takes 20 us: so does each pair, and the sum agrees.
    status, out, _ = run("size_sweep", "64 66 1 50 2", "libmalloc_probe.so",
                         PROBE="slow")
    self.assertEqual(status, 0)
    lines = [line for line in out.splitlines() if line.startswith("[SIZE] ")]
    self.assertEqual(len(lines), 3)
    for line in lines:
      self.assertGreaterEqual(float(fields(line, "[SIZE]")["ns"]), 20000)

  def test_no_program_writes_beyond_its_blocks(self):
    for program, arguments in TINY.items():
      if program == "realloc_grow":
        continue  # The probe does not follow realloc.
      with self.subTest(program=program):
        status, _, err = run(program, arguments, "libmalloc_probe.so",
                             PROBE="guard")
        self.assertEqual((status, err), (0, ""))

  def check_mt_remote(self, arguments, expected):
    status, out, err = run("mt_remote", arguments)
    self.assertEqual(status, 0, err)
    stats = fields(out, "[STATS]")
    self.assertEqual(stats["ring_full_fallback"], "0")
    self.assertEqual(
        (int(stats["allocated"]), int(stats["local_freed"]),
         int(stats["remote_sent"]),
         int(fields(out, "[FORM]")["bytes_requested"])), expected)
    return out

  def test_mt_remote_model(self):
    expected = mt_remote_model(3, 20000, 100, 16, 5000, 30)
    for form in ("", " touch=1", " --latency", " touch=1 --latency",
                 " ring_slots=64 bounded=1", " 64 1 1"):
      with self.subTest(form=form):
        self.check_mt_remote("3 20000 100 16 5000 30" + form, expected)

  def test_mt_remote_lines(self):
    out = self.check_mt_remote("2 10000 400 16 2048 50",
                               mt_remote_model(2, 10000, 400, 16, 2048, 50))
    self.assertIn("[BENCH_ARGS] threads=2 iters=10000 ws=400 min=16 max=2048"
                  " remote_pct=50 ring_slots=65536\n", out)
    self.assertRegex(out, r"(?m)^mt_remote: threads=2 ops=20000"
                     r" time=\d+\.\d{6} ops/s=\d+\.\d\d$")
    self.assertRegex(out, r"(?m)^\[EFFECTIVE_REMOTE\] target=50\.0%"
                     r" actual=(49|50)\.\d% fallback_rate=0\.00%$")

  def test_mt_remote_counts_what_a_full_ring_refuses(self):
    _, out, _ = run("mt_remote", "4 100000 400 16 2048 90 2")
    stats = {key: int(value) for key, value in fields(out, "[STATS]").items()}
    self.assertGreater(stats["ring_full_fallback"], 0)
    rate = 100 * stats["ring_full_fallback"] / (
        stats["ring_full_fallback"] + stats["remote_sent"])
    self.assertEqual(fields(out, "[EFFECTIVE_REMOTE]")["fallback_rate"],
                     "%.2f%%" % rate)

  def test_mt_remote_reference_rows(self):
    rows = REFERENCE_ROWS if ALL_ROWS else REFERENCE_ROWS[:1]
    for threads, iters, percent, high, *expected in rows:
      with self.subTest(threads=threads, iters=iters, remote=percent):
        # Room for every object: a slow allocator must not cause fallbacks.
        self.check_mt_remote("%d %d 400 16 %d %d %d" %
                             (threads, iters, high, percent, 1 << 21),
                             tuple(expected))


class Latency(unittest.TestCase):

  def test_percentiles(self):
    for program in ("random_mixed", "random_mixed_dist", "mt_remote"):
      with self.subTest(program=program):
        status, out, _ = run(program, TINY[program] + " --latency"
                             if program == "mt_remote" else
                             "--latency " + TINY[program])
        self.assertEqual(status, 0)
        for op in ("malloc", "free"):
          line = fields(out, "[LATENCY] op=" + op)
          values = [float(line[key]) for key in (
              "p10_ns", "p50_ns", "p99_ns", "p99.9_ns", "max_ns")]
          self.assertEqual(values, sorted(values))
          self.assertGreater(values[0], 0)
          self.assertGreater(int(line["count"]), 9000)

  def test_a_known_delay_is_found(self):
    _, out, _ = run("random_mixed", "4000 400 16 64 --latency",
                    "libmalloc_probe.so", PROBE="slow")
    allocated, _, _ = random_mixed_model(4000, 400, lambda random: 0)
    line = fields(out, "[LATENCY] op=malloc")
    self.assertEqual(int(line["count"]), allocated)
    # 3.2 % is the width of a bucket; the rest is for the calls themselves.
    self.assertGreaterEqual(float(line["p10_ns"]), 20000)
    self.assertLess(float(line["p50_ns"]), 20000 * 1.032 + 2000)
    self.assertLess(float(fields(out, "[LATENCY] op=free")["p50_ns"]), 10000)


class SelfChecks(unittest.TestCase):

  def expect_failure(self, program, arguments):
    with self.subTest(program=program):
      status, out, err = run(program, arguments, "libmalloc_probe.so",
                             PROBE="spoil")
      self.assertEqual(status, 1, out + err)
      self.assertRegex(err, "%s: self-check failed: .+" % program)

  def test_a_changed_block_is_noticed(self):
    for program in CHECKING:
      self.expect_failure(program, TINY[program])
    self.expect_failure("mt_remote", TINY["mt_remote"] + " touch=1")

  def test_no_memory_is_a_failure(self):
    status, _, err = run("lifo", "10 %d" % (1 << 40))
    if status == 0:
      self.skipTest("this machine promises a TiB")
    self.assertEqual(status, 1)
    self.assertIn("no memory for", err)


# Runs inside a Python that uses the null allocator itself.
FLOOR_SCRIPT = """
import ctypes
c = ctypes.CDLL(None)
for f in (c.malloc, c.calloc, c.realloc, c.memalign, c.aligned_alloc):
  f.restype = ctypes.c_void_p
S = ctypes.c_size_t
P = ctypes.c_void_p
first = c.malloc(S(100003))
assert first % 16 == 0
ctypes.memset(P(first), 7, 100003)
grown = c.realloc(P(first), S(300000))
assert ctypes.string_at(grown, 100003) == bytes([7]) * 100003
c.free(P(grown))
again = c.malloc(S(300000))
zeroed = c.calloc(S(3), S(100000))
assert ctypes.string_at(zeroed, 300000) == bytes(300000)
for alignment in (16, 64, 4096, 1 << 20):
  aligned = c.memalign(S(alignment), S(1000))
  assert aligned % alignment == 0
  ctypes.memset(P(aligned), 1, 1000)
  c.free(P(aligned))
out = P()
assert c.posix_memalign(ctypes.byref(out), S(24), S(8)) == 22
assert c.posix_memalign(ctypes.byref(out), S(256), S(8)) == 0
assert out.value % 256 == 0
assert c.malloc(S(1 << 62)) is None
print("reused" if again == grown else "fresh")
"""


class Floor(unittest.TestCase):

  def test_interface(self):
    for library, expected in (("libfloor_bump.so", "fresh"),
                              ("libfloor_lifo.so", "reused")):
      with self.subTest(library=library):
        done = subprocess.run(
            [sys.executable, "-c", FLOOR_SCRIPT],
            env=dict(os.environ, LD_PRELOAD=os.path.join(HERE, library)),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            universal_newlines=True, timeout=60)
        self.assertEqual((done.returncode, done.stdout.strip(), done.stderr),
                         (0, expected, ""))

  def test_every_program(self):
    for library in ("libfloor_bump.so", "libfloor_lifo.so"):
      for program, arguments in TINY.items():
        if library == "libfloor_bump.so" and program in ("fragment", "larson"):
          continue  # A second at full speed without reuse may fill the memory.
        with self.subTest(library=library, program=program):
          status, _, err = run(program, arguments, library)
          self.assertEqual((status, err), (0, ""))


if __name__ == "__main__":
  unittest.main(argv=[a for a in sys.argv if a != "--all-rows"])
