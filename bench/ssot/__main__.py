# SPDX-License-Identifier: Apache-2.0
"""Entry point of `python -m bench.ssot`."""

import signal
import sys

from bench.ssot.cli import main

# Whoever ends it by a signal gets what is done, as after Ctrl-C.
signal.signal(signal.SIGTERM, signal.default_int_handler)
sys.exit(main(sys.argv[1:]))
