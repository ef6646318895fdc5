"""A long way to a server: a process of its own that adds delay and bounds the bandwidth of what comes back.

The delay is that of a long cable: it holds up every byte alike and lets as many be on their way as there are.
What spoils connections instead is `bench.chaos.proxy`.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from types import TracebackType
from typing import Self

PIECE = 64 << 10
SLOW_PIECE = 8 << 10
"""Where the rate is bounded: a link at 1 MB/s does not fall silent for longer than 8 ms."""

BURST_SECONDS = 0.02
"""So much may be made up for: a timer that fires late would make the way slower than it is said to be."""

ON_THE_WAY = 512
"""Pieces on their way over one connection: 160 MB/s at 200 ms."""


class Way:
    """The way to `target`, a port of the loopback, from `port`. Its process ends with its `with` block."""

    def __init__(self, target: int) -> None:
        command = [sys.executable, "-m", "retain.bench.proxy", str(target)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = int(self._told())

    def set(self, delay: float, rate: float | None) -> None:
        """From now on bytes from the server take `delay` seconds, and come at `rate` bytes a second at the
        most, over all connections together; None for as fast as they can.
        """
        if self._process.stdin is None:
            raise AssertionError("the proxy has no input")
        self._process.stdin.write(f"{delay} {rate or 0.0}\n")
        self._process.stdin.flush()
        self._told()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        with self._process:
            pass

    def _told(self) -> str:
        if self._process.stdout is None:
            raise AssertionError("the proxy has no output")
        return self._process.stdout.readline()


class _Proxy:
    def __init__(self, target: int) -> None:
        self.target = target
        self.delay = 0.0
        self.rate = 0.0
        self._free = 0.0

    async def join(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        far, forth = await asyncio.open_connection("127.0.0.1", self.target, limit=PIECE)
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(ON_THE_WAY)
        tasks = [
            asyncio.create_task(self._pass(near, forth)),
            asyncio.create_task(self._receive(far, pieces)),
            asyncio.create_task(self._deliver(pieces, back)),
        ]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in (forth, back):
            writer.close()

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(PIECE):
            target.write(data)
            await target.drain()

    async def _receive(
        self, source: asyncio.StreamReader, pieces: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        now = asyncio.get_running_loop().time
        while data := await source.read(SLOW_PIECE if self.rate else PIECE):
            if self.rate:
                self._free = max(self._free, now() - BURST_SECONDS) + len(data) / self.rate
                if (early := self._free - now()) > 0:
                    await asyncio.sleep(early)
            await pieces.put((now() + self.delay, data))
        await pieces.put((0.0, b""))

    async def _deliver(
        self, pieces: asyncio.Queue[tuple[float, bytes]], target: asyncio.StreamWriter
    ) -> None:
        now = asyncio.get_running_loop().time
        while (piece := await pieces.get())[1]:
            if (early := piece[0] - now()) > 0:
                await asyncio.sleep(early)
            target.write(piece[1])
            await target.drain()


async def _main(target: int) -> None:
    proxy = _Proxy(target)
    server = await asyncio.start_server(proxy.join, "127.0.0.1", 0, limit=PIECE)
    print(server.sockets[0].getsockname()[1], flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        delay, rate = line.split()
        proxy.delay, proxy.rate = float(delay), float(rate)
        print("done", flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(int(sys.argv[1])))
