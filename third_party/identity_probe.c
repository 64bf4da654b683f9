// SPDX-License-Identifier: Apache-2.0
// What it is: says which allocator serves this very process; run it under LD_PRELOAD.
// Called by: identity_test.
// Needs: libc only, so that nothing but the preload decides what malloc is.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// A symbol of the preloaded library that no other allocator has.
static void *own_symbol(const char *name)
{
    void *symbol = dlsym(RTLD_DEFAULT, name);
    if (symbol == NULL) {
        printf("no symbol %s\n", name);
        exit(1);
    }
    return symbol;
}

static void print_gperftools(void)
{
    const char *(*version)(int *, int *, const char **) = own_symbol("tc_version");
    printf("%s", version(NULL, NULL, NULL));
}

static void print_mimalloc(void)
{
    int (*version)(void) = own_symbol("mi_version");
    printf("mimalloc %d", version());
}

static void print_jemalloc(void)
{
    int (*mallctl)(const char *, void *, size_t *, void *, size_t) = own_symbol("mallctl");
    const char *version = "";
    size_t size = sizeof version;
    mallctl("version", &version, &size, NULL, 0);
    printf("jemalloc %.5s", version);
}

// These carry no version; a symbol that only they export has to do.
static void print_snmalloc(void)
{
    own_symbol("__malloc_end_pointer");
    own_symbol("malloc_good_size");
    printf("snmalloc");
}

static void print_google_tcmalloc(void)
{
    own_symbol("MallocExtension_Internal_GetStatsInPbtxt");
    int (*per_cpu_active)(void) = own_symbol("MallocExtension_Internal_GetPerCpuCachesActive");
    free(malloc(1));  // the per-CPU caches come up with the first use
    printf("google_tcmalloc per_cpu=%d", per_cpu_active() & 1);
}

static void print_rpmalloc(void)
{
    int (*thread_initialized)(void) = own_symbol("rpmalloc_is_thread_initialized");
    free(malloc(1));  // a thread's heap comes up with its first use
    printf("rpmalloc thread_initialized=%d", thread_initialized() != 0);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*print)(void);
    } peers[] = {
        {"gperftools", print_gperftools}, {"mimalloc", print_mimalloc},
        {"jemalloc", print_jemalloc},     {"snmalloc", print_snmalloc},
        {"google_tcmalloc", print_google_tcmalloc}, {"rpmalloc", print_rpmalloc},
    };
    for (size_t i = 0; argc == 2 && i < sizeof peers / sizeof peers[0]; i++) {
        if (strcmp(argv[1], peers[i].name) == 0) {
            Dl_info where;
            peers[i].print();
            if (dladdr(dlsym(RTLD_DEFAULT, "malloc"), &where) == 0) {
                return 1;
            }
            printf(" in %s\n", strrchr(where.dli_fname, '/') + 1);
            return 0;
        }
    }
    fprintf(stderr, "usage: identity_probe PEER\n");
    return 2;
}
