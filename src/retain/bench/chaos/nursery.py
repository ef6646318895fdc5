"""A process that has imported everything and makes clients by forking: a client costs no start of Python.

One JSON object a line on its input makes one client, whose process id it answers. It ends with its input, and
its clients with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback

from retain.bench.chaos.client import run
from retain.bench.chaos.content import block, prompt

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Make clients until the input ends."""
    block(prompt(0), 0)  # what is imported late is imported here
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the dead
    parent = os.getpid()
    for line in sys.stdin:
        given = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _be_client(given, parent)
        print(pid, flush=True)


def _be_client(given: dict[str, object], parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.close(0)
    try:
        run(given)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
