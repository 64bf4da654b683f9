# SPDX-License-Identifier: Apache-2.0
# Servers under load on the loopback interface; both the server and its client are on the allocator.
# Called by: acceptance_test.py.
# Invariant: what is compared is data and errors, never speed; every server ends by its own means
# with status 0, so that what it frees at its end is tested too.
"""Servers, as cases."""

import hashlib
import os
import re
import signal
import time
import urllib.request

from runner import Broken, Case, find, free_port

REDIS_DATA = "".join(
    "SET key:%d %s\nHSET hash:%d field%d value%d\nRPUSH list:%d %s\nZADD zset:%d %d member%d\nAPPEND text:%d chunk%d\n"
    % (i, "v" * (i % 700 + 1), i % 100, i, i, i % 50, "e" * (i % 90 + 1), i % 20, i * 7919 % 10007, i, i % 300, i)
    for i in range(40000))
REDIS_QUESTIONS = ("DBSIZE", "STRLEN key:699", "HLEN hash:7", "LLEN list:3", "ZRANGE zset:5 0 20 WITHSCORES",
                   "SORT list:1 ALPHA LIMIT 0 3", "GETRANGE text:9 0 100", "DEBUG DIGEST", "LOLWUT VERSION 5 1 1 1")


def redis(side):
    port = free_port()
    client = "redis-cli -p %d " % port
    side.write("data", REDIS_DATA)
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(side.folder),
               "--enable-debug-command", "local", "--io-threads", "2", "--appendfsync", "no"]
    answers = []
    for _ in range(2):
        server = side.serve(command, lambda: side.accepts(port))
        if not answers:
            side.shell(client + "--pipe <data")
        while "LOADING" in side.shell(client + "PING"):
            time.sleep(0.05)
        answers += [side.shell(client + question) for question in REDIS_QUESTIONS]
        # Background saves fork while clients allocate.
        side.shell(client + "SAVE; cp dump.rdb saved.rdb; (for i in 1 2 3; do %s BGSAVE; sleep 0.3; done) & "
                   "redis-benchmark -p %d -q -n 15000 -c 20 -r 5000 -d 200 -P 4 "
                   "-t set,get,incr,lpush,rpop,sadd,hset,zadd,mset; wait" % (client, port))
        # The keys of the benchmark are random; the second server starts from what was saved before it.
        side.shell(client + "MEMORY PURGE; " + client + "SHUTDOWN NOSAVE || true; while kill -0 %d 2>/dev/null && "
                   "grep -q redis /proc/%d/cmdline; do sleep 0.05; done" % (server.pid, server.pid))
        if server.wait(timeout=30) != 0:
            raise Broken("redis-server: exit status %d" % server.returncode)
        (side.folder / "saved.rdb").replace(side.folder / "dump.rdb")
    return "".join(answers)


NGINX_CONF = """
daemon off; worker_processes 2; pid nginx.pid; error_log error.log;
events { worker_connections 256; }
http {
  access_log access.log; gzip on; gzip_min_length 100; gzip_types *; default_type text/plain;
  client_body_temp_path body; proxy_temp_path proxy;
  fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
  server { listen 127.0.0.1:%(port)d; root files;
    location /inner/ { proxy_pass http://127.0.0.1:%(port)d/; proxy_buffers 4 4k; }
    location /list/ { alias files/; autoindex on; autoindex_exact_size on; } }
}
"""


def nginx(side):
    port = free_port()
    (side.folder / "files").mkdir()
    names = ["f%d" % size for size in (1, 100, 5000, 70000, 3000000)]
    for name in names:
        text = ("%s of some text\n" % name) * (int(name[1:]) // 16 + 1)
        side.write("files/" + name, text)
        os.utime(side.folder / "files" / name, (10**9, 10**9))
    side.write("nginx.conf", NGINX_CONF % {"port": port})
    root = ["user root;"] if os.getuid() == 0 else []
    server = side.serve(["nginx", "-p", str(side.folder), "-c", str(side.folder / "nginx.conf"), "-g",
                         " ".join(root + ["error_log error.log;"])], lambda: side.accepts(port))
    answers = []
    for path in [prefix + name for prefix in ("/", "/inner/") for name in names] + ["/list/"]:
        for encoding in ("identity", "gzip"):
            request = urllib.request.Request("http://127.0.0.1:%d%s" % (port, path),
                                             headers={"Accept-Encoding": encoding})
            with urllib.request.urlopen(request, timeout=20) as answer:
                answers.append("%s %s %d %s" % (path, encoding, answer.status, hashlib.md5(answer.read()).hexdigest()))
    for path in ("/f5000", "/inner/f70000"):
        # Workers are replaced in the middle of the load; the old ones close the connections that they had.
        text = side.shell("(sleep 1; kill -HUP %d) & wrk -t2 -c16 -d3s -H 'Accept-Encoding: gzip' "
                          "http://127.0.0.1:%d%s; wait" % (server.pid, port, path))
        answers += re.findall(r"Non-2xx.*|timeout [1-9]\d*", text)
        if not re.search(r"Requests/sec: +[1-9]", text):
            raise Broken("no requests were answered: " + text)
    side.stop(server, signal.SIGQUIT)
    answers += re.findall(r"\[(?:emerg|alert|crit)\].*", (side.folder / "error.log").read_text())
    return "\n".join(answers)


SQL = """
CREATE TABLE t AS SELECT i AS a, (i::bigint * 7919) %% 100003 AS b, md5(i::text) AS c FROM generate_series(1, 300000) i;
CREATE INDEX ON t(b);
ANALYZE t;
SELECT x.b %% 7, count(*), sum(y.a), max(x.c) FROM t x JOIN t y ON x.b = y.a GROUP BY 1 ORDER BY 1;
SET work_mem = '256kB';
SELECT md5(string_agg(c, ',' ORDER BY b, a)) FROM t;
SELECT b, row_number() OVER (PARTITION BY b %% 5 ORDER BY c) FROM t ORDER BY 2 DESC, 1 LIMIT 10;
SELECT md5(jsonb_agg(to_jsonb(t) ORDER BY a)::text) FROM t WHERE a %% 10 = 0;
WITH RECURSIVE w(n, x) AS (SELECT 1, 1::numeric UNION ALL SELECT n + 1, x * (n + 1) FROM w WHERE n < 300)
  SELECT max(x) FROM w;
DO $$ DECLARE s text := ''; BEGIN FOR i IN 1..20000 LOOP s := s || i; END LOOP; RAISE NOTICE '%%', md5(s); END $$;
SELECT count(*) FROM t WHERE c ~ '(a|b)+[0-9]{3}$';
SELECT (SELECT sum(abalance) FROM pgbench_accounts) = (SELECT sum(delta) FROM pgbench_history),
       (SELECT sum(tbalance) FROM pgbench_tellers) = (SELECT sum(bbalance) FROM pgbench_branches),
       (SELECT count(*) FROM pgbench_history);
""".replace("%%", "%")


POSTGRES = "/usr/lib/postgresql/*/bin/postgres"


def postgresql(side):
    port = free_port()
    side.env["PATH"] = os.path.dirname(find(POSTGRES)) + ":" + side.env["PATH"]
    side.shell("initdb -D data -U tester --no-sync -A trust -E UTF8")
    server = side.serve(["postgres", "-D", "data", "-p", str(port), "-k", str(side.folder), "-h", "127.0.0.1", "-F"],
                        lambda: side.accepts(port))
    at = "-h 127.0.0.1 -p %d -U tester " % port
    side.shell("for i in $(seq 100); do psql %s -c 'SELECT 1' postgres && break; sleep 0.1; done" % at)
    side.shell("createdb %s bench; pgbench -i -q -s 5 %s bench; pgbench -c 4 -j 2 -t 1500 %s bench" % (at, at, at))
    side.shell("pgbench -S -M prepared -c 4 -j 2 -t 3000 %s bench" % at)
    side.write("t.sql", SQL)
    # What restricts a dump to its reader is a random key.
    answers = side.shell("psql %s -X -v ON_ERROR_STOP=1 -At -f t.sql bench" % at)
    answers += side.shell("pg_dump %s -t t bench | grep -v restrict | md5sum" % at)
    side.stop(server, signal.SIGINT)
    log = (side.folder / "server.log").read_text(errors="replace")
    return answers + "\n".join(re.findall(r"(?:PANIC|FATAL|ERROR|was terminated).*", log))


CASES = [
    Case("redis", (("redis-server", "redis-server"), ("redis-cli", "redis-tools"), ("redis-benchmark", "redis-tools")),
         redis, limit=200),
    Case("nginx", (("nginx", "nginx"), ("wrk", "wrk")), nginx),
    Case("postgresql", ((POSTGRES, "postgresql"),), postgresql, limit=200, unprivileged=True),
]
