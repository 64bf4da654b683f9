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

static size_t objects_in(const struct hz3_bin *bin) {
  size_t objects = hz3_bin_objects(bin);
  return objects > hz3_magazine_capacity(HZ3_MAGAZINE_LEVELS - 1) ? 0 : objects;  // caught between two magazines
}

size_t hz3_heap_cached_objects(const struct hz3_heap *heap, unsigned size_class) {
  size_t objects = objects_in(&heap->bins[size_class]);
  if (hz3_heap_has_drain(heap, size_class)) objects += objects_in(&heap->drains[size_class]);
  if (heap->last.object != NULL && hz3_tag_class((intptr_t)heap->last.tag) == size_class) objects++;
  uint32_t index = heap->spare[size_class];
  const struct hz3_magazine *spare = index == 0 ? NULL : hz3_magazine_seen_at(index);
  return objects + (spare == NULL ? 0 : spare->count);
}

// A heap is a page of its own, and there may be thousands: each is read once, for all classes.
static void add_cached_by_heaps(size_t cached[HZ3_CLASS_COUNT], size_t *large_blocks, size_t *large_bytes) {
  for (struct hz3_heap *heap = hz3_heap_first(); heap != NULL; heap = heap->next_heap) {
    for (unsigned c = 1; c < HZ3_CLASS_COUNT; c++) cached[c] += hz3_heap_cached_objects(heap, c);
    if (HZ3_CHECKED) hz3_checked_add_quarantined(heap, cached);
    *large_bytes += hz3_large_cache_held(&heap->large, large_blocks);
  }
}

void hz3_get_stats(struct hz3_stats *stats) {
  *stats = (struct hz3_stats){0};
  size_t out[HZ3_CLASS_COUNT], cached[HZ3_CLASS_COUNT] = {0}, span_bytes = 0;
  for (unsigned c = 1; c < HZ3_CLASS_COUNT; c++) {
    out[c] = hz3_class_use(c).out;
    cached[c] = hz3_depot_objects(c);
  }
  // In use for the large box, but not for the program: what threads keep, or checked's quarantine.
  size_t held_blocks = 0, held_bytes = 0;
  if (HZ3_CHECKED) hz3_checked_get_held_large(&held_blocks, &held_bytes);
  add_cached_by_heaps(cached, &held_blocks, &held_bytes);
  for (unsigned c = 1; c < HZ3_CLASS_COUNT; c++) {
    struct hz3_class_stats *class = &stats->classes[c];
    class->object_bytes = hz3_size_classes[c].bytes;
    struct hz3_class_use use = hz3_class_use(c);
    class->spans = use.spans;
    class->span_bytes = use.objects / hz3_size_classes[c].objects * hz3_size_classes[c].slices * HZ3_SLICE_BYTES;
    class->cached_objects = hz3_min(cached[c], out[c]);
    class->live_objects = out[c] - class->cached_objects;
    stats->live_bytes += class->live_objects * class->object_bytes;
    stats->cached_bytes += class->cached_objects * class->object_bytes;
    span_bytes += class->span_bytes;
  }
  struct hz3_pages_stats pages;
  struct hz3_large_stats large;
  hz3_pages_get_stats(&pages);
  hz3_large_get_stats(&large);
  large.live_blocks -= hz3_min(large.live_blocks, held_blocks);
  large.live_bytes -= hz3_min(large.live_bytes, held_bytes);
  stats->free_bytes = span_bytes - hz3_min(span_bytes, stats->live_bytes + stats->cached_bytes) + pages.free_bytes + pages.kept_bytes +
                      large.mapped_bytes - large.live_bytes;
  stats->live_bytes += large.live_bytes;
  stats->large_blocks = large.live_blocks;
  stats->large_bytes = large.live_bytes;
  stats->mapped_bytes = pages.mapped_bytes + large.mapped_bytes;
  stats->dirty_bytes = pages.dirty_bytes + pages.kept_bytes + large.dirty_free_bytes;
  stats->metadata_bytes = hz3_metadata_bytes();
  stats->purges = pages.purges + large.purges;
  stats->heaps = hz3_heap_count() + 1;  // and the shared one
}
