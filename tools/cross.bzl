# SPDX-License-Identifier: Apache-2.0
"""A compiler for another platform than the one that builds.

Called by: tools/aarch64/BUILD.bazel, tools/musl/BUILD.bazel.
Needs: what tools/setup installs for the platform.

    bazel build //... --incompatible_enable_cc_toolchain_resolution \
        --platforms=//PACKAGE:platform --extra_toolchains=//PACKAGE:toolchain
"""

load("@bazel_tools//tools/cpp:unix_cc_toolchain_config.bzl", "cc_toolchain_config")
load("@rules_cc//cc:defs.bzl", "cc_toolchain")

_TOOLS = ["ar", "cpp", "dwp", "gcc", "gcov", "ld", "llvm-cov", "nm", "objcopy", "objdump", "strip"]

def cross_compiler(constraints, target, includes, tool_prefix = "/usr/bin/", compiler = None, **flags):
    """Defines :platform, and :toolchain for it.

    Args:
      constraints: of the platform; not all of them true of the machine that builds.
      target: its name, for messages.
      includes: folders of the compiler's own headers.
      tool_prefix: of the names of all tools, there or not.
      compiler: a file of this package to use instead of the prefix's gcc.
      **flags: lists for cc_toolchain_config.
    """
    native.platform(
        name = "platform",
        constraint_values = constraints,
        visibility = ["//visibility:public"],
    )
    native.toolchain(
        name = "toolchain",
        target_compatible_with = constraints,
        toolchain = ":compiler",
        toolchain_type = "@bazel_tools//tools/cpp:toolchain_type",
    )
    native.filegroup(
        name = "files",
        srcs = [compiler] if compiler else [],
    )
    cc_toolchain(
        name = "compiler",
        toolchain_config = ":config",
        supports_param_files = 1,
        **{kind + "_files": ":files" for kind in ["all", "ar", "as", "compiler", "dwp", "linker", "objcopy", "strip"]}
    )
    cc_toolchain_config(
        name = "config",
        toolchain_identifier = target,
        abi_version = target,
        abi_libc_version = target,
        compiler = "gcc",
        cpu = target,
        cxx_builtin_include_directories = includes,
        host_system_name = "x86_64",
        opt_compile_flags = ["-O2", "-DNDEBUG"],
        target_libc = target,
        target_system_name = target,
        tool_paths = {tool: compiler if compiler and tool == "gcc" else tool_prefix + tool for tool in _TOOLS},
        **flags
    )
