// SPDX-License-Identifier: Apache-2.0
//
// A C program without a C++ runtime loads a library that brings one, and runs out of memory in it.
// Needs: HZ3_CXX_PLUGIN names the library cxx_plugin.so.
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static void *relay(void *(*allocate)(size_t), size_t bytes) {
  return allocate(bytes);
}

static void *find(void *plugin, const char *name) {
  void *symbol = dlsym(plugin, name);
  if (symbol == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    exit(1);
  }
  return symbol;
}

int main(void) {
  static const char *const names[] = {"cxx_plugin_catches_bad_alloc", "cxx_plugin_gets_null", "cxx_plugin_handler_is_called"};
  const char *path = getenv("HZ3_CXX_PLUGIN");
  void *plugin = path == NULL ? NULL : dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (plugin == NULL) {
    fprintf(stderr, "no library: %s\n", path == NULL ? "HZ3_CXX_PLUGIN is not set" : dlerror());
    return 1;
  }
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    int (*call)(size_t);
    *(void **)&call = find(plugin, names[i]);
    if (call(PTRDIFF_MAX / 2) != 1) {
      fprintf(stderr, "%s: failed\n", names[i]);
      return 1;
    }
  }
  int (*from_afar)(size_t, void *(*)(void *(*)(size_t), size_t));
  *(void **)&from_afar = find(plugin, "cxx_plugin_catches_from_afar");
  if (from_afar(PTRDIFF_MAX / 2, relay) != 1) {
    fprintf(stderr, "cxx_plugin_catches_from_afar: failed\n");
    return 1;
  }
  return 0;
}
