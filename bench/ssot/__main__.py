# SPDX-License-Identifier: Apache-2.0
"""Entry point of `python -m bench.ssot`."""

import signal
import sys

# Whoever ends it by a signal gets what is done, as after Ctrl-C.
signal.signal(signal.SIGTERM, signal.default_int_handler)
# A character that the locale lacks is lost alone, not with the table and all that comes after it.
sys.stdout.reconfigure(errors="replace")
try:
    from bench.ssot.cli import main  # takes a second or more, in which Ctrl-C may come
except KeyboardInterrupt:
    print("ssot: interrupted", file=sys.stderr)
    sys.exit(130)
sys.exit(main(sys.argv[1:]))
