"""What commands print on, and the exit codes they end with."""

from __future__ import annotations

import os
import sys
import time

from rich.console import Console

BAD = 1
"""The command did its work and found something bad: a damaged object, a failed check, a differing answer."""

UNUSABLE = 2
"""The command could not do its work: a wrong setting, a missing dependency or file."""

INTERRUPTED = 130
TERMINATED = 143

FILE_WIDTH = 160
"""Columns of a table that goes into a file or a pipe, where there is no terminal to ask for its width."""

stdout = Console(
    highlight=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else FILE_WIDTH
)
stderr = Console(stderr=True, highlight=False)


def age(modified: float) -> str:
    """How long ago, in the largest unit that fits: 12 s, 5 min, 3 h, 2 d."""
    seconds = max(0.0, time.time() - modified)
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
