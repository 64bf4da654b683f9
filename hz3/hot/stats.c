// SPDX-License-Identifier: Apache-2.0
// What it is: statistics over all boxes.
// Called by: the API edge.
// Invariant: every block is live, cached or in its span: live = handed out by the span stores - cached. Other threads'
//   bins are read while they run, so the figures are exact only when they rest.
#include "hz3/base/metadata.h"
#include "hz3/config.h"
#include "hz3/hot/checked.h"
#include "hz3/hot/class_spans.h"
#include "hz3/hot/heap.h"
#include "hz3/hot/hot.h"
#include "hz3/large/large.h"
#include "hz3/pages/pages.h"

size_t hz3_heap_cached_objects(const struct hz3_heap *heap, unsigned size_class) {
  const struct hz3_bin *bin = &heap->bins[size_class];
  void **lo = bin->lo, **top = bin->top;
  size_t objects = lo == NULL ? 0 : (size_t)(top - lo);
  if (objects > hz3_magazine_capacity(HZ3_MAGAZINE_LEVELS - 1)) objects = 0;  // caught between two magazines
  if (heap->last.object != NULL && heap->last.tag == size_class * sizeof(struct hz3_bin)) objects++;
  uint32_t spare = heap->spare[size_class];
  return objects + (spare == 0 ? 0 : hz3_magazine_at(spare)->count);
}

void hz3_get_class_stats(unsigned size_class, struct hz3_class_stats *stats) {
  const struct hz3_size_class *class = &hz3_size_classes[size_class];
  size_t out = hz3_class_objects_out(size_class), cached = hz3_depot_objects(size_class);
  for (struct hz3_heap *heap = hz3_heap_first(); heap != NULL; heap = heap->next_heap) {
    cached += hz3_heap_cached_objects(heap, size_class);
    if (HZ3_CHECKED) cached += hz3_checked_quarantined_objects(heap, size_class);
  }
  stats->object_bytes = class->bytes;
  stats->spans = hz3_class_spans(size_class);
  stats->span_bytes = stats->spans * class->slices * HZ3_SLICE_BYTES;
  stats->cached_objects = hz3_min(cached, out);
  stats->live_objects = out - stats->cached_objects;
}

void hz3_get_stats(struct hz3_stats *stats) {
  *stats = (struct hz3_stats){0};
  size_t span_bytes = 0;
  for (unsigned c = 1; c < HZ3_CLASS_COUNT; c++) {
    struct hz3_class_stats class;
    hz3_get_class_stats(c, &class);
    stats->live_bytes += class.live_objects * class.object_bytes;
    stats->cached_bytes += class.cached_objects * class.object_bytes;
    span_bytes += class.span_bytes;
  }
  struct hz3_pages_stats pages;
  struct hz3_large_stats large;
  hz3_pages_get_stats(&pages);
  hz3_large_get_stats(&large);
  // In use for the large box, but not for the program: what threads keep, or checked's quarantine.
  size_t held_blocks = 0, held_bytes = 0;
  if (HZ3_CHECKED) hz3_checked_get_held_large(&held_blocks, &held_bytes);
  for (struct hz3_heap *heap = hz3_heap_first(); heap != NULL; heap = heap->next_heap)
    held_bytes += hz3_large_cache_held(&heap->large, &held_blocks);
  large.live_blocks -= hz3_min(large.live_blocks, held_blocks);
  large.live_bytes -= hz3_min(large.live_bytes, held_bytes);
  stats->free_bytes = span_bytes - hz3_min(span_bytes, stats->live_bytes + stats->cached_bytes) + pages.free_bytes +
                      large.mapped_bytes - large.live_bytes;
  stats->live_bytes += large.live_bytes;
  stats->large_blocks = large.live_blocks;
  stats->large_bytes = large.live_bytes;
  stats->mapped_bytes = pages.mapped_bytes + large.mapped_bytes;
  stats->dirty_bytes = pages.dirty_bytes + large.dirty_free_bytes;
  stats->metadata_bytes = hz3_metadata_bytes();
  stats->purges = pages.purges + large.purges;
  stats->heaps = hz3_heap_count() + 1;  // and the shared one
}
