# SPDX-License-Identifier: Apache-2.0
"""Everything that the workspace takes from outside, each pinned by SHA-256.

Called by: WORKSPACE here, and the WORKSPACE of a project that depends on @hz3.
Needs: the archives in .distdir (tools/setup) or a network; Bazel looks in that order.
Invariant: labels are spelled with @hz3, so that they also resolve from a consumer.
"""

load("@bazel_tools//tools/build_defs/repo:http.bzl", "http_archive")
load("@bazel_tools//tools/build_defs/repo:utils.bzl", "maybe")
load("@hz3//third_party:crate.bzl", "crate_archive")

_COVERAGE_TARGETS = ["coverage_report_generator", "lcov_merger"]

def _stub_repository_impl(ctx):
    lines = ["package(default_visibility = [\"//visibility:public\"])"]
    lines += ["filegroup(name = \"%s\")" % target for target in ctx.attr.targets]
    ctx.file("BUILD.bazel", "\n".join(lines) + "\n")

_stub_repository = repository_rule(
    implementation = _stub_repository_impl,
    doc = "A repository whose targets exist and hold nothing.",
    attrs = {"targets": attr.string_list(mandatory = True)},
)

def _rules_for_bazel_4():
    """What Bazel's own rules ask for, even for plain C; later releases bring their own."""
    maybe(
        http_archive,
        name = "rules_cc",
        # Debian's Bazel 4.2.3 has no use_cpp_toolchain; the toolchain type works everywhere.
        patch_cmds = [
            "find cc -name '*.bzl' -exec sed -i " +
            "-e 's/, \"use_cpp_toolchain\"//' " +
            "-e 's|use_cpp_toolchain()|[\"@bazel_tools//tools/cpp:toolchain_type\"]|' {} +",
        ],
        sha256 = "af6cc82d87db94585bceeda2561cb8a9d55ad435318ccb4ddfee18a43580fb5d",
        strip_prefix = "rules_cc-0.0.4",
        urls = ["https://github.com/bazelbuild/rules_cc/releases/download/0.0.4/rules_cc-0.0.4.tar.gz"],
    )
    maybe(
        http_archive,
        name = "rules_java",
        sha256 = "34b41ec683e67253043ab1a3d1e8b7c61e4e8edefbcad485381328c934d072fe",
        urls = ["https://github.com/bazelbuild/rules_java/releases/download/4.0.0/rules_java-4.0.0.tar.gz"],
    )

def _bazel_itself_repositories():
    # Debian's Bazel 4.2.3 does not know its version.
    if not native.bazel_version or native.bazel_version.startswith("4."):
        _rules_for_bazel_4()

    # Every test rule asks for a coverage reporter, a Java program that is only ever run by
    # `bazel coverage`; a stub keeps `bazel test` off the network.
    maybe(_stub_repository, name = "remote_coverage_tools", targets = _COVERAGE_TARGETS)

def _test_repositories():
    maybe(
        http_archive,
        name = "com_google_googletest",
        sha256 = "81964fe578e9bd7c94dfdb09c8e4d6e6759e19967e397dbea48d1c10e45d0df2",
        strip_prefix = "googletest-release-1.12.1",
        urls = ["https://github.com/google/googletest/archive/refs/tags/release-1.12.1.tar.gz"],
    )

def _peer_repositories():
    """The allocators that hz3 is measured against."""
    maybe(
        http_archive,
        name = "gperftools",
        build_file = "@hz3//third_party/gperftools:gperftools.BUILD",
        sha256 = "b0dcfe3aca1a8355955f4b415ede43530e3bb91953b6ffdd75c45891070fe0f1",
        strip_prefix = "gperftools-gperftools-2.10",
        urls = ["https://github.com/gperftools/gperftools/archive/refs/tags/gperftools-2.10.tar.gz"],
    )
    maybe(
        http_archive,
        name = "jemalloc",
        build_file = "@hz3//third_party/jemalloc:jemalloc.BUILD",
        sha256 = "2db82d1e7119df3e71b7640219b6dfe84789bc0537983c3b7ac4f7189aecfeaa",
        strip_prefix = "jemalloc-5.3.0",
        urls = ["https://github.com/jemalloc/jemalloc/releases/download/5.3.0/jemalloc-5.3.0.tar.bz2"],
    )
    maybe(
        crate_archive,
        name = "mimalloc",
        build_file = "@hz3//third_party/mimalloc:mimalloc.BUILD",
        crate = "libmimalloc-sys",
        sha256 = "6a45a52f43e1c16f667ccfe4dd8c85b7f7c204fd5e3bf46c5b0db9a5c3c0b8e9",
        version = "0.1.49",
    )
    maybe(
        crate_archive,
        name = "snmalloc",
        build_file = "@hz3//third_party/snmalloc:snmalloc.BUILD",
        crate = "snmalloc-sys",
        sha256 = "f09c93c55f9a2b8dab75738a83c771231c5f408af65b8657433fe5bc93cc76cb",
        version = "0.7.6",
    )
    maybe(
        crate_archive,
        name = "google_tcmalloc",
        build_file = "@hz3//third_party/google_tcmalloc:google_tcmalloc.BUILD",
        crate = "libtcmalloc-sys",
        sha256 = "33e204268a3b09862788a2894346c768b95b2cb29cba42c5e2bb9ea7f48fa317",
        version = "0.1.14",
    )
    maybe(
        crate_archive,
        name = "rpmalloc",
        build_file = "@hz3//third_party/rpmalloc:rpmalloc.BUILD",
        crate = "rpmalloc-sys",
        sha256 = "8d4b7d5e225a53887ee57fcec492eaf114b8e290f7072d035adc6ddd6810b67b",
        version = "0.2.3+b097fd0",
    )

def hz3_repositories():
    _bazel_itself_repositories()
    _test_repositories()
    _peer_repositories()
