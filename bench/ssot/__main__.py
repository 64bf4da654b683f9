# SPDX-License-Identifier: Apache-2.0
"""Entry point of `python -m bench.ssot`."""

import sys

from bench.ssot.cli import main

sys.exit(main(sys.argv[1:]))
