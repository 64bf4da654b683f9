// SPDX-License-Identifier: Apache-2.0
//
// containers: what C++ programs ask an allocator for through the standard
// library. Each kind fills containers, looks at them, and drops what is old.
//
// Invariant: whatever is dropped was checked against what was put in.
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <deque>
#include <iterator>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "workload.h"

namespace {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t below(uint64_t limit) {
    return (wl_xorshift64(&state_) >> 16) % limit;
  }
  uint64_t from(uint64_t least, uint64_t most) {
    return least + below(most - least + 1);
  }

 private:
  uint64_t state_;
};

// A document as parsers build them: text, or an array or object of documents.
struct Node {
  std::string text;
  std::vector<std::unique_ptr<Node>> array;
  std::map<std::string, std::unique_ptr<Node>> object;
};

std::unique_ptr<Node> make_document(Random& random, int depth,
                                    uint64_t* nodes) {
  auto node = std::make_unique<Node>();
  ++*nodes;
  uint64_t kind = depth == 0 ? 0 : random.below(3);
  if (kind == 0) {
    node->text.assign(random.from(3, 40), 't');
  } else if (kind == 1) {
    for (uint64_t n = random.from(1, 8); n > 0; n--) {
      node->array.push_back(make_document(random, depth - 1, nodes));
    }
  } else {
    for (uint64_t n = random.from(1, 6); n > 0; n--) {
      node->object.emplace("key of " + std::to_string(n),
                           make_document(random, depth - 1, nodes));
    }
  }
  return node;
}

uint64_t count_nodes(const Node& node) {
  uint64_t count = 1;
  for (const auto& element : node.array) {
    count += count_nodes(*element);
  }
  for (const auto& member : node.object) {
    count += count_nodes(*member.second);
  }
  WL_CHECK(count > 1 || node.text.find_first_not_of('t') == std::string::npos,
           "a text changed");
  return count;
}

// The last one is finished, even if it has more nodes than were asked for.
void documents(uint64_t ops, Random& random) {
  constexpr size_t kKept = 8;
  struct Document {
    std::unique_ptr<Node> root;
    uint64_t nodes;
  };
  std::deque<Document> kept;
  for (uint64_t done = 0; done < ops;) {
    uint64_t nodes = 0;
    auto root = make_document(random, 6, &nodes);
    kept.push_back({std::move(root), nodes});
    done += nodes;
    if (kept.size() > kKept) {
      const Document& oldest = kept.front();
      WL_CHECK(count_nodes(*oldest.root) == oldest.nodes,
               "a document lost nodes");
      kept.pop_front();
    }
  }
}

void hashes(uint64_t ops, Random& random) {
  constexpr size_t kTables = 64;
  std::vector<std::unordered_map<uint64_t, uint64_t>> tables(kTables);
  for (uint64_t i = 0; i < ops; i++) {
    auto& table = tables[random.below(kTables)];
    uint64_t key = random.below(4096);
    table[key] = ~key;
    if (table.size() > 600) {
      for (const auto& entry : table) {
        WL_CHECK(entry.second == ~entry.first, "an entry changed");
      }
      std::unordered_map<uint64_t, uint64_t>().swap(table);
    }
  }
}

void strings(uint64_t ops, Random& random) {
  constexpr size_t kMost = 20000;
  std::map<std::string, std::string> lines;
  for (uint64_t i = 0; i < ops; i++) {
    std::string line;
    for (uint64_t n = random.from(1, 60); n > 0; n--) {
      line += static_cast<char>('a' + random.below(26));
    }
    std::string key = line.substr(0, line.size() / 2 + 3);
    lines[std::move(key)] = std::move(line);
    if (lines.size() > kMost) {
      auto entry = lines.lower_bound(
          std::string(1, static_cast<char>('a' + random.below(26))));
      if (entry == lines.end()) {
        entry = lines.begin();
      }
      WL_CHECK(entry->second.compare(0, entry->first.size(), entry->first) == 0,
               "a line changed");
      lines.erase(entry);
    }
  }
}

void sets(uint64_t ops, Random& random) {
  constexpr size_t kMost = 10000;
  std::set<uint64_t> set;
  for (uint64_t i = 0; i < ops; i++) {
    set.insert(random.below(2 * kMost));
    if (set.size() > kMost) {
      WL_CHECK(*set.begin() < *std::next(set.begin()), "a set is not sorted");
      set.erase(set.begin());
    }
  }
}

void lists(uint64_t ops, Random& random) {
  constexpr uint64_t kElements = 100000;
  for (uint64_t left = ops, count; left > 0; left -= count) {
    count = std::min(left, kElements);
    std::list<uint64_t> list;
    for (uint64_t i = 0; i < count; i++) {
      list.push_back(random.below(UINT64_C(1) << 40));
    }
    list.sort();
    WL_CHECK(std::is_sorted(list.begin(), list.end()), "a list is not sorted");
    std::list<uint64_t> odd;
    std::copy_if(list.begin(), list.end(), std::back_inserter(odd),
                 [](uint64_t element) { return element % 2 == 1; });
    list.remove_if([](uint64_t element) { return element % 2 == 1; });
    WL_CHECK(list.size() + odd.size() == count, "a list lost elements");
  }
}

void vectors(uint64_t ops, Random& random) {
  constexpr size_t kVectors = 100, kMost = 100000;
  std::vector<std::vector<char>> all(kVectors);
  for (uint64_t i = 0; i < ops; i++) {
    auto& vector = all[random.below(kVectors)];
    vector.insert(vector.end(), random.from(1, 200), 'v');
    if (vector.size() > kMost) {
      WL_CHECK(vector.front() == 'v' && vector.back() == 'v',
               "a vector changed");
      std::vector<char>().swap(vector);
    }
  }
}

// A tree of which every version shares most of its nodes with the one before,
// as in functional languages and databases.
constexpr int kVersionBits = 20;

struct Inner {
  std::shared_ptr<const Inner> child[2];
};
using Version = std::shared_ptr<const Inner>;

Version with_key(const Version& tree, uint64_t key, int bit) {
  auto node = tree ? std::make_shared<Inner>(*tree) : std::make_shared<Inner>();
  if (bit > 0) {
    auto& child = node->child[key >> (bit - 1) & 1];
    child = with_key(child, key, bit - 1);
  }
  return node;
}

bool has_key(const Version& tree, uint64_t key) {
  const Inner* node = tree.get();
  for (int bit = kVersionBits; node != nullptr && bit > 0; bit--) {
    node = node->child[key >> (bit - 1) & 1].get();
  }
  return node != nullptr;
}

void versions(uint64_t ops, Random& random) {
  constexpr size_t kKept = 1000;
  struct Kept {
    Version tree;
    uint64_t newest;
  };
  std::deque<Kept> kept;
  Version tree;
  for (uint64_t i = 0; i < ops; i++) {
    uint64_t key = random.below(UINT64_C(1) << kVersionBits);
    tree = with_key(tree, key, kVersionBits);
    kept.push_back({tree, key});
    if (kept.size() > kKept) {
      WL_CHECK(has_key(kept.front().tree, kept.front().newest),
               "a version lost its key");
      kept.pop_front();
    }
  }
}

struct Kind {
  const char* name;
  void (*run)(uint64_t ops, Random& random);
};

constexpr Kind kKinds[] = {
    {"documents", documents}, {"hashes", hashes},   {"strings", strings},
    {"sets", sets},           {"lists", lists},     {"vectors", vectors},
    {"versions", versions},
};

struct Run {
  const Kind* kind;
  uint64_t ops;
  uint64_t seed;
};

void work(unsigned index, void* context) {
  const Run* run = static_cast<const Run*>(context);
  Random random(wl_stream_seed(run->seed, index));
  run->kind->run(run->ops, random);
}

}  // namespace

int main(int argc, char** argv) {
  wl_arg args[] = {
      {"threads", "at once, each with containers of its own", 1, 1,
       WL_MAX_THREADS},
      {"iters", "operations of each thread", 1000000, 1, UINT64_C(1) << 40},
      {"seed", "of the generators", WL_DEFAULT_SEED, 0, UINT64_MAX},
  };
  wl_program program = {};
  program.name = "containers";
  program.about =
      "Fills containers of the C++ library, looks at them, and drops what is\n"
      "old. An op is one element put in.";
  program.example = "2 100000 1 documents";
  program.args = args;
  program.arg_count = std::size(args);
  program.mode_help =
      "documents|hashes|strings|sets|lists|vectors|versions";
  wl_parse(&program, argc, argv);
  const char* name = program.mode_count > 0 ? program.mode[0] : kKinds[0].name;
  const Kind* kind = std::find_if(
      std::begin(kKinds), std::end(kKinds),
      [name](const Kind& k) { return std::strcmp(k.name, name) == 0; });
  if (kind == std::end(kKinds) || program.mode_count > 1) {
    wl_usage_error(&program, "'%s' is not one kind of container",
                   kind == std::end(kKinds) ? name : program.mode[1]);
  }
  unsigned threads = static_cast<unsigned>(args[0].value);
  Run run = {kind, args[1].value, args[2].value};
  double time = wl_seconds(wl_run(threads, work, &run));
  uint64_t ops = threads * run.ops;
  std::printf("containers: kind=%s threads=%u ops=%" PRIu64
              " time=%.6f ops/s=%.2f\n",
              kind->name, threads, ops, time, static_cast<double>(ops) / time);
  return wl_finish(&program);
}
