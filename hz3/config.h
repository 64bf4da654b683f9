// SPDX-License-Identifier: Apache-2.0
// What it is: every option of the allocator, with one complete block per lane.
// Called by: most boxes. The lane is chosen in one place, the Bazel build (--config=NAME).
// Needs: nothing of ours.
// Invariant: options are compile-time C values; no environment variable changes how memory is allocated.
#ifndef HZ3_CONFIG_H_
#define HZ3_CONFIG_H_

#include <assert.h>  // static_assert in C and C++

// HZ3_MAGAZINE_CAPACITY: objects in the smallest magazine, and so in a bin of objects up to 1 KiB at first; no bin of bigger ones holds more.
//   62 pointers plus the header fill 512 bytes. Below 62, the bins of the smaller ones never grow.
// HZ3_MAGAZINE_BYTES: object bytes that one magazine may hold at first, but 16 objects of up to 32 KiB, for the first 32 heaps. In a busy class
//   twice as much; 16 times as much where so many bytes are fewer objects than HZ3_MAGAZINE_CAPACITY.
// HZ3_HEAP_BYTES: bytes a thread may keep in spare magazines before it shares them through the depot. The magazines of its busy
//   classes may grow by half as much together; for objects of which few fit HZ3_MAGAZINE_BYTES by 8 times as much, while those of all
//   threads have grown by no more than 32 times as much.
// HZ3_DEPOT_BYTES: bytes of one class that the depot may keep at most, beside what cools, but two magazines unless memory is being given back. Nor does it keep more than HZ3_HEAP_BYTES for each thread,
//   nor more than a quarter of what is out of its spans; but HZ3_MAGAZINE_BYTES for each CPU always, of objects of up to 256 bytes. What
//   threads allocated themselves counts for each CPU by itself: HZ3_HEAP_BYTES, or a quarter of what is out of the spans of their home.
// HZ3_COOL_BYTES: bytes pushed to the depot after a magazine, but for those of threads' own blocks, before another CPU gets it: a typical second-level cache.
//   Threads that only free may leave twice as many there.
// HZ3_RETAIN_MIN_BYTES / HZ3_RETAIN_MAX_BYTES: dirty free memory kept from the kernel, per source (slices, large ranges).
//   The bound starts at the minimum and grows by what was wanted again within a second after it was purged. The maximum doubles
//   up to three times, a second each, while that goes on.
// HZ3_TICK_MS: period of the clean-up driven from slow paths (depot low-water, parked heaps).
// HZ3_CPUS_PER_SHARD: CPUs that share one depot shard.
// HZ3_LARGE_CACHE: 1 keeps freed large ranges for reuse, 0 gives each back to the kernel at once.
// HZ3_CHECKED: 1 adds the hardened checks of the checked lane to every operation.

#if defined(HZ3_LANE_SCALE)
#define HZ3_LANE_NAME "scale"
#define HZ3_LANE_MAGAZINE_CAPACITY 62
#define HZ3_LANE_MAGAZINE_BYTES (64 * 1024)
#define HZ3_LANE_HEAP_BYTES (1024 * 1024)
#define HZ3_LANE_DEPOT_BYTES (16 * 1024 * 1024)
#define HZ3_LANE_COOL_BYTES (1024 * 1024)
#define HZ3_LANE_RETAIN_MIN_BYTES (8 * 1024 * 1024)
#define HZ3_LANE_RETAIN_MAX_BYTES (256 * 1024 * 1024)
#define HZ3_LANE_TICK_MS 100
#define HZ3_LANE_CPUS_PER_SHARD 8
#define HZ3_LANE_LARGE_CACHE 1
#define HZ3_LANE_CHECKED 0
#elif defined(HZ3_LANE_CHECKED)
#define HZ3_LANE_NAME "checked"
#define HZ3_LANE_MAGAZINE_CAPACITY 62
#define HZ3_LANE_MAGAZINE_BYTES (64 * 1024)
#define HZ3_LANE_HEAP_BYTES (1024 * 1024)
#define HZ3_LANE_DEPOT_BYTES (8 * 1024 * 1024)
#define HZ3_LANE_COOL_BYTES (256 * 1024)
#define HZ3_LANE_RETAIN_MIN_BYTES (8 * 1024 * 1024)
#define HZ3_LANE_RETAIN_MAX_BYTES (64 * 1024 * 1024)
#define HZ3_LANE_TICK_MS 100
#define HZ3_LANE_CPUS_PER_SHARD 8
#define HZ3_LANE_LARGE_CACHE 1
#define HZ3_LANE_CHECKED 1
#elif defined(HZ3_LANE_TINY)
#define HZ3_LANE_NAME "tiny"  // tests only: minimal limits, so that every slow path runs within seconds
#define HZ3_LANE_MAGAZINE_CAPACITY 3
#define HZ3_LANE_MAGAZINE_BYTES (16 * 1024)
#define HZ3_LANE_HEAP_BYTES (16 * 1024)
#define HZ3_LANE_DEPOT_BYTES (64 * 1024)
#define HZ3_LANE_COOL_BYTES (16 * 1024)
#define HZ3_LANE_RETAIN_MIN_BYTES (256 * 1024)
#define HZ3_LANE_RETAIN_MAX_BYTES (1024 * 1024)
#define HZ3_LANE_TICK_MS 1
#define HZ3_LANE_CPUS_PER_SHARD 1
#define HZ3_LANE_LARGE_CACHE 1
#define HZ3_LANE_CHECKED 0
#elif defined(HZ3_LANE_FAST)
#define HZ3_LANE_NAME "fast"
#define HZ3_LANE_MAGAZINE_CAPACITY 62
#define HZ3_LANE_MAGAZINE_BYTES (64 * 1024)
#define HZ3_LANE_HEAP_BYTES (1024 * 1024)
#define HZ3_LANE_DEPOT_BYTES (16 * 1024 * 1024)
#define HZ3_LANE_COOL_BYTES (1024 * 1024)
#define HZ3_LANE_RETAIN_MIN_BYTES (8 * 1024 * 1024)
#define HZ3_LANE_RETAIN_MAX_BYTES (512 * 1024 * 1024)
#define HZ3_LANE_TICK_MS 100
#define HZ3_LANE_CPUS_PER_SHARD 8
#define HZ3_LANE_LARGE_CACHE 1
#define HZ3_LANE_CHECKED 0
#else
#error "unknown lane: define exactly one of HZ3_LANE_FAST, HZ3_LANE_SCALE, HZ3_LANE_CHECKED, HZ3_LANE_TINY"
#endif

// A Bazel setting (--//hz3:NAME=value) replaces the lane's value.
#ifndef HZ3_MAGAZINE_CAPACITY
#define HZ3_MAGAZINE_CAPACITY HZ3_LANE_MAGAZINE_CAPACITY
#endif
#ifndef HZ3_MAGAZINE_BYTES
#define HZ3_MAGAZINE_BYTES HZ3_LANE_MAGAZINE_BYTES
#endif
#ifndef HZ3_HEAP_BYTES
#define HZ3_HEAP_BYTES HZ3_LANE_HEAP_BYTES
#endif
#ifndef HZ3_DEPOT_BYTES
#define HZ3_DEPOT_BYTES HZ3_LANE_DEPOT_BYTES
#endif
#ifndef HZ3_COOL_BYTES
#define HZ3_COOL_BYTES HZ3_LANE_COOL_BYTES
#endif
#ifndef HZ3_RETAIN_MIN_BYTES
#define HZ3_RETAIN_MIN_BYTES HZ3_LANE_RETAIN_MIN_BYTES
#endif
#ifndef HZ3_RETAIN_MAX_BYTES
#define HZ3_RETAIN_MAX_BYTES HZ3_LANE_RETAIN_MAX_BYTES
#endif
#ifndef HZ3_TICK_MS
#define HZ3_TICK_MS HZ3_LANE_TICK_MS
#endif
#ifndef HZ3_CPUS_PER_SHARD
#define HZ3_CPUS_PER_SHARD HZ3_LANE_CPUS_PER_SHARD
#endif
#ifndef HZ3_LARGE_CACHE
#define HZ3_LARGE_CACHE HZ3_LANE_LARGE_CACHE
#endif
#ifndef HZ3_CHECKED
#define HZ3_CHECKED HZ3_LANE_CHECKED
#endif

static_assert(HZ3_MAGAZINE_CAPACITY >= 1 && HZ3_MAGAZINE_CAPACITY <= 62, "magazine_capacity must be 1..62");
static_assert(HZ3_MAGAZINE_BYTES >= 1, "magazine_bytes must be at least 1");
static_assert(HZ3_COOL_BYTES >= 1, "cool_bytes must be at least 1");
static_assert(HZ3_RETAIN_MIN_BYTES >= 65536, "retain_min_bytes must be at least 65536, one slice");
static_assert(HZ3_RETAIN_MIN_BYTES <= HZ3_RETAIN_MAX_BYTES, "retain_min_bytes must not exceed retain_max_bytes");
static_assert(HZ3_CPUS_PER_SHARD >= 1, "cpus_per_shard must be at least 1");
static_assert(HZ3_TICK_MS >= 1, "tick_ms must be at least 1");
static_assert(HZ3_LARGE_CACHE == 0 || HZ3_LARGE_CACHE == 1, "large_cache must be 0 or 1");
static_assert(HZ3_CHECKED == 0 || HZ3_CHECKED == 1, "checked must be 0 or 1");

#endif  // HZ3_CONFIG_H_
