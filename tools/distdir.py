#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Fills .distdir, where Bazel looks for a third-party archive before it asks the network.
# Called by: tools/setup.
# Owns: .distdir/ (never committed).
# Needs: apt lists of a Debian release that still carries the pinned versions; no root.
# Invariant: a file appears in .distdir only complete and with the SHA-256 below, which is the one that
# third_party/repositories.bzl pins. Debian keeps the upstream bytes, at most packed differently; each
# repacking undoes that, and the checksum proves it. What cannot be had is left to Bazel's download.
"""Fill .distdir with the pinned third-party archives, from Debian source packages."""

import gzip
import hashlib
import lzma
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile


def unchanged(data):
    return data


def xz_to_gzip(data):
    # Upstream's was compressed by gzip(1); Python's zlib yields other bytes.
    return subprocess.run(["gzip", "-n"], input=lzma.decompress(data), stdout=subprocess.PIPE,
                          check=True).stdout


def xz_to_python_gzip(data):
    # rules_java was packed by Bazel's own Python packer: fixed name and time in the header.
    with tempfile.TemporaryFile() as out:
        with gzip.GzipFile("rules_java-4.0.0.tar", "wb", 9, out, 946684800) as packed:
            packed.write(lzma.decompress(data))
        out.seek(0)
        return out.read()


# Debian source package, its archive's suffix, archive name at its origin, SHA-256, repacking.
ARCHIVES = [
    ("googletest", "_1.12.1.orig.tar.gz", "release-1.12.1.tar.gz",
     "81964fe578e9bd7c94dfdb09c8e4d6e6759e19967e397dbea48d1c10e45d0df2", unchanged),
    ("google-perftools", "_2.10.orig.tar.gz", "gperftools-2.10.tar.gz",
     "b0dcfe3aca1a8355955f4b415ede43530e3bb91953b6ffdd75c45891070fe0f1", unchanged),
    ("jemalloc", "_5.3.0.orig.tar.bz2", "jemalloc-5.3.0.tar.bz2",
     "2db82d1e7119df3e71b7640219b6dfe84789bc0537983c3b7ac4f7189aecfeaa", unchanged),
    ("bazel-rules-cc", "_0.0.4.orig.tar.xz", "rules_cc-0.0.4.tar.gz",
     "af6cc82d87db94585bceeda2561cb8a9d55ad435318ccb4ddfee18a43580fb5d", xz_to_gzip),
    ("bazel-rules-java", "_4.0.0.orig.tar.xz", "rules_java-4.0.0.tar.gz",
     "34b41ec683e67253043ab1a3d1e8b7c61e4e8edefbcad485381328c934d072fe", xz_to_python_gzip),
]


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def missing_archives(distdir):
    return [row for row in ARCHIVES
            if not (distdir / row[2]).is_file() or sha256(distdir / row[2]) != row[3]]


def source_list():
    """The machine's Debian package sources as deb-src lines."""
    form = "$(ORIGIN)|deb-src $(REPO_URI) $(RELEASE) $(COMPONENT)"
    out = subprocess.run(["apt-get", "indextargets", "--format", form, "Created-By: Packages"],
                         stdout=subprocess.PIPE, check=True, text=True).stdout
    lines = {line.split("|", 1)[1] for line in out.splitlines() if line.startswith("Debian|")}
    return "\n".join(sorted(lines)) + "\n"


def fetch(packages, work):
    """Downloads the packages' upstream archives into `work`, with apt's state kept inside it."""
    for folder in ("state/lists/partial", "cache/archives/partial"):
        (work / folder).mkdir(parents=True)
    (work / "sources.list").write_text(source_list())
    options = []
    for option in ("Dir::State=%s/state" % work, "Dir::Cache=%s/cache" % work,
                   "Dir::State::status=/var/lib/dpkg/status",
                   "Dir::Etc::SourceList=%s/sources.list" % work,
                   "Dir::Etc::SourceParts=/dev/null", "APT::Sandbox::User=",
                   "Acquire::Retries=3"):
        options += ["-o", option]
    for command in (["update"], ["source", "--download-only", "--tar-only"] + packages):
        done = subprocess.run(["apt-get", "-q"] + options + command, cwd=work, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            print(done.stdout, file=sys.stderr)


def main():
    distdir = pathlib.Path(sys.argv[1])
    distdir.mkdir(exist_ok=True)
    wanted = missing_archives(distdir)
    if not wanted:
        print("all %d archives are there" % len(ARCHIVES))
        return
    with tempfile.TemporaryDirectory(prefix="hz3_distdir_") as temp:
        work = pathlib.Path(temp)
        if shutil.which("apt-get"):
            fetch([row[0] for row in wanted], work)
        for package, suffix, name, _, repack in wanted:
            original = work / (package + suffix)
            if original.is_file():
                (distdir / (name + ".part")).write_bytes(repack(original.read_bytes()))
                os.replace(distdir / (name + ".part"), distdir / name)
    still = {row[2] for row in missing_archives(distdir)}
    for _, _, name, _, _ in wanted:
        print("%-26s %s" % (name, "Bazel will download it" if name in still else "ok"))
    for name in still:
        (distdir / name).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
