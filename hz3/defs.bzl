# SPDX-License-Identifier: Apache-2.0
"""The rules that hz3's BUILD files are written in.

Called by: every BUILD.bazel under hz3/; tests/ has rules of its own, tests/defs.bzl.
Needs: hz3/options.bzl for the settings that the user may change.
Invariant: every object of the allocator is compiled with _COPTS below, in one lane.

    load("//hz3:defs.bzl", "hz3_box", "hz3_test")

    hz3_box(                       # one per box: C11, hidden symbols, private unless said
        name = "small",
        srcs = ["small.c"],
        hdrs = ["small.h"],        # exactly what the callers may include
        visibility = ["//hz3/hot:__pkg__"],
        deps = ["//hz3/base", "//hz3/pages"],
    )

    hz3_test(                      # GoogleTest with main(); gtest = False for a bare main()
        name = "small_test",
        srcs = ["small_test.cc"],
        deps = [":small"],
    )

hz3/BUILD.bazel alone also uses hz3_settings() of options.bzl, hz3_build_info,
hz3_shared_library and hz3_lane_libraries.
"""

load("@rules_cc//cc:defs.bzl", "cc_binary", "cc_library", "cc_test")
load(":options.bzl", "DefinesInfo", "LANES", "OPTIONS")

_DEFINES = "@hz3//hz3:defines"

# The allocator must not have its own calls turned into calls of itself, nor a libc symbol
# assumed to be the libc's.
_NO_BUILTIN = [
    "-fno-builtin-" + function
    for function in ["malloc", "calloc", "realloc", "free", "aligned_alloc", "memalign"]
]

# Bazel puts its own flags first, so that the ones here win over its hardening defaults.
_COPTS = [
    "-O2",
    "-U_FORTIFY_SOURCE",
    "-fno-stack-protector",
    "-fomit-frame-pointer",
    "-fvisibility=hidden",
    "-ftls-model=initial-exec",
    "-ffunction-sections",
    "-fdata-sections",
    "-fno-tree-slp-vectorize",
    "-Wall",
    "-Wextra",
] + _NO_BUILTIN + select({
    "@platforms//cpu:x86_64": ["-fcf-protection=none"],
    "//conditions:default": [],
}) + ["$(HZ3_COPTS)"]

_C_COPTS = ["-std=gnu11"]
_CXX_COPTS = ["-std=gnu++17", "-fno-exceptions", "-fno-rtti"]

def hz3_box(name, srcs, hdrs = [], deps = [], copts = [], linkopts = [], visibility = None, **kwargs):
    """A part of the allocator: one cc_library with the flags that all its code has.

    Args:
      name: the folder's name, for a box.
      srcs: C, or C++ for the operators; not both, for the flags differ. Private headers too.
      hdrs: the public headers.
      deps: the boxes below, and nothing from third_party.
      copts: added at the end.
      linkopts: likewise, of whatever it is linked into.
      visibility: the caller packages; private if left out.
      **kwargs: passed on.
    """
    is_cxx = any([src.endswith(".cc") for src in srcs])
    if is_cxx and any([src.endswith(".c") for src in srcs]):
        fail("hz3_box %s: C and C++ in one target; the flags differ, make two" % name)
    cc_library(
        name = name,
        srcs = srcs,
        hdrs = hdrs,
        # Link-time optimisation forgets what the operators say in assembler: that the C++
        # runtime is only weakly needed.
        copts = (_CXX_COPTS if is_cxx else _C_COPTS) + _COPTS + (["-fno-lto"] if is_cxx else []) + copts,
        linkopts = ["-pthread", "$(HZ3_LINKOPTS)"] + linkopts,
        linkstatic = True,
        toolchains = [_DEFINES],
        visibility = visibility or ["//visibility:private"],
        deps = deps,
        **kwargs
    )

# Both: the layering check wants who includes a header to depend on what exports it.
_GTEST = ["@com_google_googletest//:gtest", "@com_google_googletest//:gtest_main"]

def hz3_test(name, srcs, deps = [], copts = [], gtest = True, **kwargs):
    """A test that is compiled in the same lane as the code it tests."""
    cc_test(
        name = name,
        srcs = srcs,
        copts = ["-Wall", "-Wextra"] + _NO_BUILTIN + ["$(HZ3_COPTS)"] + copts,
        linkopts = ["-pthread"],
        linkstatic = True,
        toolchains = [_DEFINES],
        deps = deps + (_GTEST if gtest else []),
        **kwargs
    )

def hz3_shared_library(name, deps, version_script, **kwargs):
    """A shared library that exports what the version script lists and needs libc alone."""
    cc_binary(
        name = name,
        additional_linker_inputs = [version_script],
        linkopts = [
            "-Wl,--version-script=$(location %s)" % version_script,
            "-Wl,-soname," + name,
            "-Wl,--as-needed",
            "-Wl,-z,defs",
            "-Wl,-Bsymbolic-functions",
            # Blocks and thread-exit hooks outlive any dlclose.
            "-Wl,-z,nodelete",
            # Its constructor comes before those of other libraries, which may hook into fork as well.
            "-Wl,-z,initfirst",
        ],
        linkshared = True,
        linkstatic = True,
        deps = deps,
        **kwargs
    )

# --- the same library in every lane, side by side

_LANE = str(Label("//hz3:lane"))
_MODE = "//command_line_option:compilation_mode"

def _lane_transition_impl(_settings, attr):
    return {_LANE: attr.lane, _MODE: "opt"}

_lane_transition = transition(
    implementation = _lane_transition_impl,
    inputs = [],
    outputs = [_LANE, _MODE],
)

def _lane_library_impl(ctx):
    library = ctx.attr.library[0][DefaultInfo].files.to_list()[0]
    output = ctx.actions.declare_file(ctx.label.name)
    ctx.actions.symlink(output = output, target_file = library)
    return [DefaultInfo(files = depset([output]), runfiles = ctx.runfiles([output, library]))]

_lane_library = rule(
    implementation = _lane_library_impl,
    attrs = {
        "lane": attr.string(values = LANES),
        "library": attr.label(cfg = _lane_transition),
        "_allowlist_function_transition": attr.label(
            default = "@bazel_tools//tools/allowlists/function_transition_allowlist",
        ),
    },
)

def hz3_lane_libraries(library, **kwargs):
    """For libhz3.so: libhz3_<lane>.so for every lane, each always built with -c opt."""
    for lane in LANES:
        _lane_library(
            name = library.replace(".so", "_%s.so" % lane),
            lane = lane,
            library = library,
            **kwargs
        )

# --- the build-info string

# The value that config.h settled on is read by the preprocessor, so the string cannot
# disagree with the code; %REVISION% is filled in by the build action.
_BUILD_INFO_C = """\
// Generated by hz3/defs.bzl.
#include "hz3/build_info.h"

#include "hz3/config.h"

#define TEXT(value) #value
#define VALUE(macro) TEXT(macro)

const char hz3_build_info[] =
    "hz3 build: revision=%REVISION% lane=" HZ3_LANE_NAME
{options}
    " overridden={overridden} lto={lto} compiler=" COMPILER;
"""

_COMPILER_C = """\
#ifdef __clang__
#define COMPILER "clang " __clang_version__
#else
#define COMPILER "gcc " __VERSION__
#endif
"""

def _build_info_source_impl(ctx):
    settings = ctx.attr._defines[DefinesInfo]
    text = _BUILD_INFO_C.format(
        options = "\n".join([
            "    \" %s=\" VALUE(HZ3_%s)" % (option, option.upper())
            for option in OPTIONS
        ]),
        overridden = ",".join(sorted(settings.values)) or "none",
        lto = settings.lto,
    ).replace("#define TEXT", _COMPILER_C + "#define TEXT")
    template = ctx.actions.declare_file(ctx.label.name + ".in")
    ctx.actions.write(template, text)
    source = ctx.actions.declare_file("build_info.c")

    # Only the main workspace's status command knows a revision of hz3.
    ctx.actions.run_shell(
        outputs = [source],
        inputs = [template, ctx.info_file],
        command = """
            revision=$(sed -n 's/^STABLE_HZ3_REVISION //p' "$1")
            sed "s/%REVISION%/${revision:-unknown}/" "$2" > "$3"
        """,
        arguments = [ctx.info_file.path, template.path, source.path],
        mnemonic = "Hz3BuildInfo",
    )
    return [DefaultInfo(files = depset([source]))]

_build_info_source = rule(
    implementation = _build_info_source_impl,
    attrs = {"_defines": attr.label(default = _DEFINES, providers = [DefinesInfo])},
)

def hz3_build_info(name, hdrs, deps, **kwargs):
    """A box that holds `hz3_build_info`, the string that says what this library is."""
    _build_info_source(name = name + "_source")
    hz3_box(
        name = name,
        srcs = [":%s_source" % name],
        hdrs = hdrs,
        deps = deps,
        **kwargs
    )
