// SPDX-License-Identifier: Apache-2.0
// What it is: whether huge pages are worth asking for (docs/decisions/0028, 0041), and which chunks do (0022); see pages.h.
// Called by: pages.c and purge.c; large through pages.h.
// Locks: hz3_pages.lock, held by the callers of what ends in _locked. Relaxed atomics: hints, by which nothing is published.
#include "hz3/base/os.h"
#include "hz3/pages/pages_internal.h"

enum {
  WORTH_NS = 1000 * 1000,           // a huge page saves 512 page faults, of 2 microseconds each
  PROBE_BYTES = 16 * 1024 * 1024,   // one huge page is touched, and timed, each time so much more was asked for
  PAUSE_MIN_MS = 64,                // for so long nothing is asked for after a dear one, which took 4 to 6 ms where it was seen;
  PAUSE_MAX_MS = 1024               // twice as long each time
};

// The first witness, and the next ones each time that twice as much was asked for. Of a huge page of which an eighth is written, the faults
// of small pages cost about half as much as clearing it whole. Twice in a row, for one may have been looked at before it was written.
enum { WITNESS_MIN_BYTES = 64 * 1024 * 1024, WRITTEN_SHARE = 8, SPARSE_LOOKS = 2 };
#define WITNESS_MAX_STEP ((size_t)1024 * 1024 * 1024)

// Nor are they worth it where small pages are not of 4 KiB: the kernel's huge ones have 32 MiB then, or 512.
static bool are_dear(void) {
  return hz3_os_page_bytes() != HZ3_HUGE_PAGE_BYTES / 512 || hz3_os_now_ms() < __atomic_load_n(&hz3_pages.huge_dear_until_ms, __ATOMIC_RELAXED);
}

// The first touch is what costs: the kernel clears the page, and may have to move others first, or to get memory back from the
// host of a virtual machine.
static bool probe_is_dear(char *page) {
  uint64_t before = hz3_os_thread_ns();
  *(volatile char *)page = 0;
  return hz3_os_thread_ns() - before > WORTH_NS;
}

static bool is_sparse(const struct hz3_huge_use *use) { return __atomic_load_n(&use->sparse_looks, __ATOMIC_RELAXED) == SPARSE_LOOKS; }

bool hz3_huge_pages_pay(void) { return !are_dear() && !is_sparse(&hz3_pages.huge_use); }

bool hz3_huge_pages_are_cheap(void) { return hz3_huge_pages_pay() && __atomic_load_n(&hz3_pages.huge_pause_ms, __ATOMIC_RELAXED) == 0; }

// What was not written at all, or is not there any more, tells nothing.
static void look_at_witness(struct hz3_huge_use *use) {
  char *witness = __atomic_exchange_n(&use->witness, NULL, __ATOMIC_RELAXED);
  size_t written = witness == NULL ? 0 : hz3_os_resident_bytes(witness, HZ3_HUGE_PAGE_BYTES);
  if (written == 0) return;
  unsigned looks = __atomic_load_n(&use->sparse_looks, __ATOMIC_RELAXED);
  looks = written * WRITTEN_SHARE < HZ3_HUGE_PAGE_BYTES ? hz3_min(looks + 1, SPARSE_LOOKS) : 0;
  __atomic_store_n(&use->sparse_looks, looks, __ATOMIC_RELAXED);
}

// Whether the first huge page is to be the next witness. Once one was hardly written, there is one in all that is asked for.
static bool place_witness(struct hz3_huge_use *use, char *start, size_t bytes, size_t asked) {
  bool is_time = __atomic_load_n(&use->sparse_looks, __ATOMIC_RELAXED) > 0 ||
                 asked >= hz3_max(__atomic_load_n(&use->witness_due_bytes, __ATOMIC_RELAXED), WITNESS_MIN_BYTES);
  if (!is_time || bytes < HZ3_HUGE_PAGE_BYTES) return false;
  __atomic_store_n(&use->witness, start, __ATOMIC_RELAXED);
  __atomic_store_n(&use->witness_due_bytes, asked + hz3_min(asked, WITNESS_MAX_STEP), __ATOMIC_RELAXED);
  return true;
}

// Whether the cost is to be measured again: not for a program that does not touch what it has asked for before. Of that, the
// second huge page is looked at, since the first one may have been touched here.
static bool is_due(struct hz3_huge_use *use, char *start, size_t bytes, size_t asked) {
  char *looked_at = start + (bytes > HZ3_HUGE_PAGE_BYTES ? HZ3_HUGE_PAGE_BYTES : 0);
  char *last = __atomic_exchange_n(&use->last, looked_at, __ATOMIC_RELAXED);
  return (asked - bytes) / PROBE_BYTES != asked / PROBE_BYTES && (last == NULL || hz3_os_is_resident(last));
}

// Whether huge pages are worth it for what has just been asked for, and was not touched yet. `pause`: see huge_pause_ms.
static bool are_affordable(char *start, uint64_t pause) {
  bool is_dear = probe_is_dear(start);
  pause = is_dear ? hz3_min(hz3_max(2 * pause, PAUSE_MIN_MS), PAUSE_MAX_MS) : 0;
  __atomic_store_n(&hz3_pages.huge_pause_ms, pause, __ATOMIC_RELAXED);
  if (is_dear) __atomic_store_n(&hz3_pages.huge_dear_until_ms, hz3_os_now_ms() + pause, __ATOMIC_RELAXED);
  return !is_dear;
}

// The advice is for all of it, and comes before the first touch: the kernel takes what lies side by side, with the same advice, for one
// mapping only if one side was never touched. If small pages are asked for after all, the one that was touched stays as it is.
enum hz3_huge_answer hz3_huge_pages_ask(struct hz3_huge_use *use, char *start, size_t bytes) {
  look_at_witness(use);
  size_t asked = __atomic_fetch_add(&use->asked_bytes, bytes, __ATOMIC_RELAXED) + bytes;
  bool pay = !are_dear() && !is_sparse(use);
  uint64_t pause = __atomic_load_n(&hz3_pages.huge_pause_ms, __ATOMIC_RELAXED);
  // After a dear one the first is touched in any case.
  bool has_witness = !(pay && pause != 0) && place_witness(use, start, bytes, asked);
  hz3_os_advise_huge(start, bytes, pay);
  if (!pay) return HZ3_HUGE_NONE;
  if (has_witness) {
    hz3_os_advise_huge(start, HZ3_HUGE_PAGE_BYTES, false);
    return HZ3_HUGE_BUT_FIRST;
  }
  if ((!is_due(use, start, bytes, asked) && pause == 0) || are_affordable(start, pause)) return HZ3_HUGE_ALL;
  hz3_os_advise_huge(start, bytes, false);
  return HZ3_HUGE_ONLY_FIRST;
}

static unsigned ends_of(const struct hz3_chunk *chunk) {
  uint64_t low = chunk->huge & 1, high = chunk->huge >> 63;
  return (low != high) + (chunk->below != NULL && chunk->below->huge >> 63 != low) +
         (chunk->above != NULL && (chunk->above->huge & 1) != high);
}

void hz3_chunk_join_locked(struct hz3_chunk *chunk) {
  struct hz3_chunk *newest = hz3_pages.newest;
  chunk->below = newest != NULL && newest->base + HZ3_CHUNK_BYTES == chunk->base ? newest : NULL;
  chunk->above = newest != NULL && newest->base == chunk->base + HZ3_CHUNK_BYTES ? newest : NULL;
  if (chunk->below != NULL) chunk->below->above = chunk;
  if (chunk->above != NULL) chunk->above->below = chunk;
  hz3_pages.newest = chunk;
  hz3_pages.advice_ends += ends_of(chunk);
}

void hz3_chunk_leave_locked(struct hz3_chunk *chunk) {
  hz3_pages.advice_ends -= ends_of(chunk);
  if (chunk->below != NULL) chunk->below->above = NULL;
  if (chunk->above != NULL) chunk->above->below = NULL;
  if (hz3_pages.newest == chunk) hz3_pages.newest = chunk->above != NULL ? chunk->above : chunk->below;
}

bool hz3_chunk_set_huge_locked(struct hz3_chunk *chunk, uint64_t huge) {
  uint64_t before = chunk->huge;
  size_t others = hz3_pages.advice_ends - ends_of(chunk), chunks = hz3_pages.chunks;
  size_t most = HZ3_ADVICE_ENDS + ((huge & ~before) != 0 ? hz3_min(chunks, HZ3_RENEWED_ENDS) : chunks / HZ3_CHUNKS_PER_ADVICE_END);
  chunk->huge = huge;
  size_t ends = others + ends_of(chunk);
  if (ends > hz3_pages.advice_ends && ends > most) {
    chunk->huge = before;
    return false;
  }
  hz3_pages.advice_ends = ends;
  return true;
}

static void offer_locked(uint64_t slices) {
  hz3_pages.held &= ~slices;
  hz3_pages.first->free |= slices;
  hz3_pages.dirty_slices += (unsigned)__builtin_popcountll(hz3_chunk_purgeable(hz3_pages.first) & slices);
  hz3_chunk_note_dirty_locked(hz3_pages.first);
  hz3_chunk_relist_locked(hz3_pages.first);
}

bool hz3_first_chunk_offer(unsigned count) {
  hz3_lock_acquire(&hz3_pages.lock);
  uint64_t held = hz3_pages.held;
  if (held != 0) offer_locked(held & hz3_slice_mask(0, hz3_min((unsigned)__builtin_ctzll(held) + count, HZ3_CHUNK_SLICES)));
  hz3_lock_release(&hz3_pages.lock);
  return held != 0;
}

// But not if the page behind them is resident, too, which nobody has used: then the kernel gives huge pages without being asked, or the
// user has locked what is mapped.
bool hz3_first_chunk_is_filled(void) {
  hz3_lock_acquire(&hz3_pages.lock);
  size_t bytes = hz3_pages.held == 0 ? 0 : (size_t)__builtin_ctzll(hz3_pages.held) * HZ3_SLICE_BYTES;
  char *base = bytes == 0 ? NULL : hz3_pages.first->base;  // trim may unmap it any time
  hz3_lock_release(&hz3_pages.lock);
  return bytes != 0 && hz3_os_resident_bytes(base, bytes) * HZ3_FILLED_SHARE >= bytes && !hz3_os_is_resident(base + bytes);
}

// Meanwhile the half is neither held back nor free: nobody else takes it, nor unmaps the chunk.
bool hz3_first_chunk_offer_huge(void) {
  hz3_lock_acquire(&hz3_pages.lock);
  struct hz3_chunk *chunk = hz3_pages.first;
  bool is_held = (hz3_pages.held & HZ3_HIGH_HALF) == HZ3_HIGH_HALF;
  if (is_held) hz3_pages.held &= ~HZ3_HIGH_HALF;
  hz3_lock_release(&hz3_pages.lock);
  if (!is_held) return false;
  enum hz3_huge_answer answer = hz3_huge_pages_ask(&hz3_pages.huge_use, chunk->base + HZ3_HUGE_PAGE_BYTES, HZ3_HUGE_PAGE_BYTES);
  hz3_lock_acquire(&hz3_pages.lock);
  if (answer == HZ3_HUGE_ONLY_FIRST) chunk->dirty |= HZ3_HIGH_HALF;
  if (answer == HZ3_HUGE_ALL) hz3_chunk_set_huge_locked(chunk, chunk->huge | HZ3_HIGH_HALF);
  offer_locked(HZ3_HIGH_HALF);
  hz3_lock_release(&hz3_pages.lock);
  return true;
}
