# SPDX-License-Identifier: Apache-2.0
"""A repository with the C or C++ sources that a Rust crate carries.

Called by: third_party/repositories.bzl, for peers whose newest releases are at hand this way.
Needs: cargo (tools/setup --peers), and only when a target of that peer is built.
Invariant: the crate's archive has the pinned SHA-256; no Rust code is compiled.
"""

_CARGO_TOML = """\
[package]
name = "fetch"
version = "0.0.0"
edition = "2021"

[dependencies]
{crate} = "={version}"
"""

def _run(ctx, command, hint):
    done = ctx.execute(command)
    if done.return_code:
        fail("%s: %s\n%s" % (ctx.name, hint, done.stderr))
    return done.stdout.strip()

def _crate_impl(ctx):
    name = "%s-%s" % (ctx.attr.crate, ctx.attr.version)
    cargo = ctx.which("cargo")
    if not cargo:
        fail("%s is fetched by cargo, which is not installed; run: tools/setup --peers" % ctx.name)
    ctx.file("fetch/src/lib.rs", "")
    ctx.file("fetch/Cargo.toml", _CARGO_TOML.format(crate = ctx.attr.crate, version = ctx.attr.version))
    _run(
        ctx,
        [cargo, "fetch", "--quiet", "--manifest-path", "fetch/Cargo.toml"],
        "cargo fetch of %s failed" % name,
    )
    find = "ls \"${CARGO_HOME:-$HOME/.cargo}\"/registry/cache/*/%s.crate | head -1" % name
    archive = _run(ctx, ["sh", "-c", find], "cargo kept no archive of %s" % name)
    _run(
        ctx,
        ["sh", "-c", "echo \"$1  $2\" | sha256sum --check --quiet", "sh", ctx.attr.sha256, archive],
        "%s does not have the pinned SHA-256" % archive,
    )
    _run(ctx, ["tar", "-xzf", archive, "--strip-components=1"], "cannot unpack %s" % archive)
    ctx.delete("fetch")
    ctx.symlink(ctx.attr.build_file, "BUILD.bazel")

crate_archive = repository_rule(
    implementation = _crate_impl,
    attrs = {
        "build_file": attr.label(mandatory = True),
        "crate": attr.string(mandatory = True),
        "sha256": attr.string(mandatory = True),
        "version": attr.string(mandatory = True),
    },
    environ = ["CARGO_HOME", "HOME", "PATH"],
)
