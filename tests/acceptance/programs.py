# SPDX-License-Identifier: Apache-2.0
# Programs that read, compute and write: the result is their output.
# Called by: acceptance_test.py.
# Invariant: every program and its input are deterministic, so that any difference is the allocator's.
"""Everyday programs, as cases."""

from runner import Case

SQL = """
CREATE TABLE t(a INTEGER PRIMARY KEY, b INTEGER, c TEXT);
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 200000)
  INSERT INTO t SELECT i, (i * 7919) % 100003, printf('row %d of %x', i, i * i) FROM n;
CREATE INDEX tb ON t(b);
SELECT count(*), sum(length(c)) FROM t WHERE b BETWEEN 1000 AND 50000;
SELECT max(length(s)) FROM (SELECT group_concat(c) AS s FROM t GROUP BY b % 997);
UPDATE t SET c = c || upper(c) WHERE b % 3 = 0;
SELECT x.b % 7, count(*), sum(y.a) FROM t x JOIN t y ON x.b = y.a GROUP BY 1 ORDER BY 2, 1;
SELECT b, row_number() OVER (PARTITION BY b % 5 ORDER BY c) FROM t ORDER BY 2 DESC, 1 LIMIT 20;
SELECT json_group_array(json_object('a', a, 'c', c)) FROM t WHERE a % 5000 = 0;
DELETE FROM t WHERE b % 2;
VACUUM;
PRAGMA integrity_check;
.dump t
"""

GIT = """
git config --global user.name "A Tester"; git config --global user.email tester@example.org
git config --global init.defaultBranch main; git config --global pack.threads 2
export GIT_AUTHOR_DATE=2001-01-01T00:00:00Z GIT_COMMITTER_DATE=2001-01-01T00:00:00Z
git init -q origin; cd origin
for i in $(seq 40); do
  mkdir -p d$((i % 5)); seq $i $((i * 37 + 2000)) >d$((i % 5))/f$((i % 7)); git add .; git commit -qm "change $i"
  [ $((i % 10)) != 0 ] || { git branch b$i; git tag -a -m "tag $i" t$i; }
done
git checkout -q b20; echo side >side; git add side; git commit -qm side; git checkout -q main; git merge -q -m merge b20
git gc -q --aggressive; git fsck --full --strict; git log --graph --stat --format='%H %s'; git blame -s d1/f1 | md5sum
cd ..; git clone -q --no-local origin copy; cd copy; git fsck --full --strict; git rev-parse HEAD
git status --short
git diff --stat t10 t40; git archive HEAD | md5sum; git grep -c 77 | sort; git repack -q -a -d -f; git fsck --full
"""

# Every function is unlike the others, so that each costs the compiler memory of its own.
BIG_C = """
python3 - >big.c <<'END'
print("struct s { int a, b; struct s *n; };")
for i in range(1500):
    print("int f%d(struct s *p, int k) { int r = %d; while (p) { r += p->a * k - p->b / %d; if (r & %d) p = p->n;"
          " else r ^= f%d(p->n, r %% 7); if (r > %d) break; } return r; }"
          % (i, i, i + 1, i % 31 + 1, max(0, i - 1), i))
END
"""

BIG_CXX = """
cat >big.cc <<'END'
#include <algorithm>
#include <functional>
#include <iostream>
#include <map>
#include <random>
#include <regex>
#include <sstream>
#include <unordered_map>
#include <variant>
template <int N> struct Node { std::map<int, std::string> m; std::variant<int, double, std::string> v;
  int f(int x) { m[x + N] = std::to_string(x); std::sort(m.begin()->second.begin(), m.begin()->second.end());
                 return std::regex_match(m[x], std::regex("[0-9]*")) ? N : Node<N - 1>().f(x); } };
template <> struct Node<0> { int f(int x) { return x; } };
int main() { std::mt19937 r(1); std::unordered_map<int, std::function<int(int)>> u;
  for (int i = 0; i < 100; i++) u[i] = [i](int x) { return Node<60>().f(x + i); };
  int s = 0; for (auto& e : u) s += e.second(r() % 100); std::cout << s << std::endl; }
END
"""

PERL = r"""
cat >t.pl <<'END'
use strict; use warnings;
my %h; $h{$_ % 70000} .= "$_," for 1 .. 900000;
my $n = 0; $n += length for values %h; print "$n ", scalar(keys %h), "\n";
my @a = map { { id => $_, list => [ ($_) x ($_ % 17) ], text => "x" x ($_ % 300) } } 1 .. 60000;
@a = sort { length $a->{text} <=> length $b->{text} or $a->{id} <=> $b->{id} } @a;
print join(",", map { $_->{id} . ":" . @{ $_->{list} } } @a[ 0 .. 40 ]), "\n";
my $s = join " ", map { $_->{text} . $_->{id} } @a; my $c = 0; $c += $1 while $s =~ /x(\d+)/g; print "$c\n";
splice @a, 100, 50000; undef %h; $s =~ s/x+/y/g; print length $s, "\n"; $s x= 20; print length $s, "\n";
for my $i (1 .. 4) {
  my $p = fork; if (!$p) { my @b = map { "y" x $_ } 1 .. 3000; exit(@b == 3000 ? $i : 0) }
  waitpid $p, 0; print $? >> 8, "\n";
}
END
perl t.pl
"""

NODE = r"""
cat >t.js <<'END'
const crypto = require('crypto'), zlib = require('zlib'), fs = require('fs');
const { Worker, isMainThread, parentPort, workerData } = require('worker_threads');
function work(n) {
  const hash = crypto.createHash('sha256');
  for (let i = 0; i < n; i++) {
    const b = Buffer.alloc((i * 7919) % 20000 + 1, 'row ' + i);
    const packed = zlib.deflateSync(b);
    if (!zlib.inflateSync(packed).equals(b)) throw new Error('round trip ' + i);
    hash.update(packed.subarray(0, 200));
  }
  return hash.digest('hex');
}
if (!isMainThread) { parentPort.postMessage(work(workerData)); } else {
  const rows = [];
  for (let i = 0; i < 200000; i++) rows.push({ id: i, tags: [String(i % 9), 'x'.repeat(i % 50)] });
  const text = JSON.stringify(rows); console.log(text.length, JSON.parse(text)[777].tags[1].length, work(2000));
  fs.writeFileSync('t.json.gz', zlib.gzipSync(text)); console.log(zlib.gunzipSync(fs.readFileSync('t.json.gz')).length);
  let left = 4; const answers = [];
  for (let i = 0; i < 4; i++) new Worker(__filename, { workerData: 500 + i }).on('message', m => {
    answers.push(m); if (--left == 0) console.log(answers.sort().join('\n')); });
}
END
node t.js
"""

JAVA = r"""
cat >T.java <<'END'
import java.nio.ByteBuffer; import java.util.*; import java.util.concurrent.*; import java.util.stream.*;
import java.util.zip.*;
public class T {
  static long work(int seed) throws Exception {
    Random random = new Random(seed); CRC32 crc = new CRC32();
    for (int i = 0; i < 1500; i++) {
      byte[] data = new byte[random.nextInt(30000) + 1];
      for (int j = 0; j < data.length; j++) data[j] = (byte) (j * seed >> 3);
      Deflater d = new Deflater(); d.setInput(data); d.finish();
      byte[] out = new byte[40000]; int n = d.deflate(out); d.end();
      Inflater f = new Inflater(); f.setInput(out, 0, n); byte[] back = new byte[data.length]; f.inflate(back); f.end();
      if (!Arrays.equals(data, back)) throw new Exception("round trip"); crc.update(out, 0, n);
      ByteBuffer direct = ByteBuffer.allocateDirect(random.nextInt(100000) + 1);
      direct.put(0, (byte) i); crc.update(direct.get(0));
    }
    return crc.getValue();
  }
  public static void main(String[] a) throws Exception {
    ExecutorService pool = Executors.newFixedThreadPool(4); List<Future<Long>> answers = new ArrayList<>();
    for (int i = 1; i <= 8; i++) { final int seed = i; answers.add(pool.submit(() -> work(seed))); }
    for (Future<Long> answer : answers) System.out.println(answer.get());
    pool.shutdown();
    Map<Integer, List<String>> m = IntStream.range(0, 300000).mapToObj(i -> "row " + i)
        .collect(Collectors.groupingBy(s -> s.hashCode() % 1000, TreeMap::new, Collectors.toList()));
    System.out.println(m.size() + " " + m.hashCode());
  }
}
END
javac -J-Xmx512m T.java; java -Xmx512m -cp . T
"""

# A million lines in random order.
LINES = """
python3 - >lines <<'END'
import random
random.seed(1)
for _ in range(1200000): print(random.randrange(10**9), "x" * random.randrange(60))
END
"""

SORT = LINES + """
sort -S 300M --parallel=2 lines | md5sum; sort -S 8M -n --parallel=2 -T . lines | md5sum
sort -k2 -u -S 20M -T . lines | wc
"""

XZ = LINES + """
xz -T2 -3 --block-size=4MiB -k lines; md5sum lines.xz; xz -t lines.xz; xz -T2 -dc lines.xz | cmp - lines
"""

STRESS = """
stress-ng --malloc 2 --malloc-ops 3000 --malloc-pthreads 2 --malloc-bytes 64M --malloc-touch --verify --timeout 60
stress-ng --malloc 2 --malloc-ops 20000 --malloc-thresh 65536 --malloc-zerofree --verify --timeout 60
stress-ng --bigheap 1 --bigheap-growth 1M --bigheap-ops 300 --tree 1 --tree-ops 3 --verify --timeout 60
stress-ng --qsort 1 --qsort-ops 20 --verify --timeout 60
echo all verified
"""


def script(text):
    return lambda side: side.shell(text)


def stress(side):
    # It tells its figures, all of them times; its status says whether everything verified.
    return side.shell(STRESS).splitlines()[-1]


CASES = [
    Case("sqlite", (("sqlite3", "sqlite3"),),
         lambda side: side.shell("sqlite3 t.db <%s" % side.write("t.sql", SQL))),
    Case("git", (("git", "git"),), script(GIT)),
    Case("gcc", (("gcc", "gcc"),),
         script(BIG_C + "gcc -O2 -c big.c -o big.o; gcc -O1 -g -flto -frandom-seed=1 -c big.c -o lto.o; "
                "gcc -O0 -S big.c; md5sum big.o lto.o big.s")),
    Case("g++", (("g++", "g++"),), script(BIG_CXX + "g++ -std=c++17 -O2 -c big.cc -o big.o; "
                                          "g++ big.o -o big -Wl,--build-id=none; md5sum big.o big; ./big"), limit=200),
    Case("clang", (("clang-14", "clang-14"),),
         script(BIG_C + BIG_CXX + "clang-14 -O2 -Wno-everything -c big.c -o c.o; "
                "clang-14 -std=c++17 -O2 -c big.cc -o cxx.o; md5sum c.o cxx.o"), limit=200),
    Case("perl", (("perl", "perl"),), script(PERL)),
    Case("node", (("node", "nodejs"),), script(NODE)),
    Case("java", (("java", "default-jre-headless"), ("javac", "default-jdk-headless")), script(JAVA)),
    Case("sort", (("sort", "coreutils"),), script(SORT)),
    Case("xz", (("xz", "xz-utils"),), script(XZ)),
    Case("stress-ng", (("stress-ng", "stress-ng"),), stress, limit=200),
]
