"""The command line: `retain COMMAND`, one file a command."""

from __future__ import annotations

import signal
import sys

from retain.cli.app import app
from retain.cli.terminal import INTERRUPTED, TERMINATED, UNUSABLE, stderr
from retain.errors import RetainError


def main() -> None:
    """Run one command and exit: a RetainError is printed as its one sentence, without a traceback."""
    # What a command started ends with it, since `finally` runs; serve and daemon bring handlers of their own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        app()
    except RetainError as error:
        stderr.print(f"retain: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(UNUSABLE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        sys.stderr.close()
        sys.exit(0)


__all__ = ["main"]
