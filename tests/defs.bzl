# SPDX-License-Identifier: Apache-2.0
"""The rules for the tests of the whole library, linked and preloaded.

Called by: every BUILD.bazel under tests/.
Invariant: these tests know the allocator by libc's and C++'s names and hz3.h alone, so they are compiled like any
user's program, without the flags of the lane.
"""

load("@rules_cc//cc:defs.bzl", "cc_binary", "cc_test")

# A block that is made and freed must not be optimised away, nor a size be thought absurd.
USER_COPTS = [
    "-fno-builtin",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-warning-option",
    "-Wno-alloc-size-larger-than",
    "-Wno-use-after-free",
]

_LIBRARY = "//hz3:libhz3.so"

def library_test(name, srcs, deps = [], gtest = True, preload = False, linked = True, data = [], env = {}, size = "medium", tags = [], **kwargs):
    """A test with the allocator linked in, and with `preload` a second one, NAME_preload, with libhz3.so preloaded.

    Args:
      name: of the linked test.
      srcs: the sources.
      deps: libraries beside the support library.
      gtest: whether the test is written with GoogleTest and takes main() from the support library.
      preload: whether it also runs preloaded.
      linked: False for what is promised of the preloaded library alone.
      data: files at run time.
      env: variables; $(rootpath) of data is expanded.
      size: as for every test.
      tags: as for every test.
      **kwargs: passed on to the linked test.
    """
    deps = deps + (["//tests/support:main"] if gtest else [])
    if linked:
        cc_test(
            name = name,
            size = size,
            srcs = srcs,
            copts = USER_COPTS,
            data = data,
            env = env,
            linkopts = ["-pthread"],
            linkstatic = True,
            malloc = "//hz3:malloc",
            tags = tags,
            deps = deps,
            **kwargs
        )
    if not preload:
        return
    cc_binary(
        name = name + "_plain",
        testonly = True,
        srcs = srcs,
        copts = USER_COPTS,
        linkopts = ["-pthread", "-Wl,--as-needed"],  # a program in C brings no C++ runtime
        linkstatic = True,
        tags = tags,
        deps = deps,
    )
    native.sh_test(
        name = name + "_preload",
        size = size,
        srcs = ["//tests/support:preload.sh"],
        args = ["$(rootpath %s)" % _LIBRARY, "$(rootpath :%s_plain)" % name],
        data = data + [_LIBRARY, ":%s_plain" % name],
        # What depends on time and chance has run at length when linked.
        env = dict(env, HZ3_TEST_SCALE = "0.3"),
        tags = tags,
    )
