// SPDX-License-Identifier: Apache-2.0
//
// tree: a full binary tree of 32-byte nodes is built and torn down
// recursively, parents first and children first, the left one of two or, as
// std::map does, the right one.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "workload.h"

struct node {
  struct node* left;
  struct node* right;
  uint64_t depth;
  uint64_t check;
};
_Static_assert(sizeof(struct node) == 32, "the workload is defined by it");

static struct node* build(uint64_t depth) {
  struct node* node = malloc(sizeof(*node));
  if (__builtin_expect(node == NULL, 0)) {
    wl_out_of_memory(sizeof(*node));
  }
  node->depth = depth;
  node->check = ~depth;
  node->left = depth == 0 ? NULL : build(depth - 1);
  node->right = depth == 0 ? NULL : build(depth - 1);
  return node;
}

static void check(const struct node* node, uint64_t depth) {
  WL_CHECK(node->depth == depth && node->check == ~depth &&
               (node->left == NULL) == (depth == 0),
           "a node of depth %" PRIu64 " changed", depth);
}

// Returns the number of nodes freed.
static uint64_t tear_down(struct node* node, uint64_t depth) {
  check(node, depth);
  uint64_t count = 1;
  if (depth > 0) {
    count += tear_down(node->left, depth - 1);
    count += tear_down(node->right, depth - 1);
  }
  free(node);
  return count;
}

static uint64_t tear_down_from_right(struct node* node, uint64_t depth) {
  check(node, depth);
  uint64_t count = 1;
  if (depth > 0) {
    count += tear_down_from_right(node->right, depth - 1);
    count += tear_down_from_right(node->left, depth - 1);
  }
  free(node);
  return count;
}

int main(int argc, char** argv) {
  struct wl_arg args[] = {
      {"depth", "of the tree", 20, 0, 30},
      {"rounds", "trees to build", 10, 1, UINT64_C(1) << 40},
      {"right", "1 tears the right child down before the left one", 0, 0, 1},
  };
  struct wl_program program = {
      .name = "tree",
      .about = "Builds and tears down a binary tree of 32-byte nodes. An op\n"
               "is one malloc with its free.",
      .example = "16 10",
      .args = args,
      .arg_count = sizeof(args) / sizeof(args[0]),
  };
  wl_parse(&program, argc, argv);
  uint64_t nodes = 0;
  uint64_t start = wl_now_ns();
  for (uint64_t i = 0; i < args[1].value; i++) {
    struct node* root = build(args[0].value);
    nodes += args[2].value ? tear_down_from_right(root, args[0].value)
                           : tear_down(root, args[0].value);
  }
  double time = wl_seconds(wl_now_ns() - start);
  uint64_t expected = ((UINT64_C(2) << args[0].value) - 1) * args[1].value;
  WL_CHECK(nodes == expected, "%" PRIu64 " nodes freed instead of %" PRIu64,
           nodes, expected);
  printf("tree: ops=%" PRIu64 " time=%.6f ops/s=%.2f\n", nodes, time,
         (double)nodes / time);
  return wl_finish(&program);
}
