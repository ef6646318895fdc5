"""Background threads of a cache: bounded in number, never in the way of the process ending."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Task(Generic[T]):
    """A call on its way. `result` waits for it, at most `timeout` seconds."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._done = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._then: list[Callable[[Task[T]], None]] = []

    def run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error
        with self._lock:
            self._done.set()
            then, self._then = self._then, []
        for call in then:
            call(self)

    def when_done(self, call: Callable[[Task[T]], None]) -> None:
        """Have `call(task)` made once the task is done, at once if it is."""
        with self._lock:
            if not self._done.is_set():
                self._then.append(call)
                return
        call(self)

    def result(self, timeout: float) -> T:
        """What the call returned. Raises what it raised, or TimeoutError."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"not done within {timeout:.1f} s")
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


class Workers:
    """A pool of daemon threads, started when first needed. Unlike concurrent.futures, a stuck call does not
    hold up the interpreter's exit.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._limit = threads
        self._queue: queue.SimpleQueue[Task[object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._unfinished = 0
        self._idle = threading.Condition(self._lock)

    def submit(self, call: Callable[[], T]) -> Task[T]:
        """Run `call` on one of the threads."""
        task = Task(call)
        with self._lock:
            self._unfinished += 1
            if self._threads < min(self._limit, self._unfinished):
                self._threads += 1
                threading.Thread(target=self._work, name=f"{self._name}-{self._threads}", daemon=True).start()
        self._queue.put(task)  # type: ignore[arg-type]
        return task

    @property
    def unfinished(self) -> int:
        return self._unfinished

    def wait_idle(self, timeout: float) -> bool:
        """Wait until nothing is unfinished; False where that took too long."""
        with self._idle:
            return self._idle.wait_for(lambda: self._unfinished == 0, timeout)

    def stop(self) -> None:
        """Let the threads end when the queue is empty. Later submits start new ones."""
        with self._lock:
            count, self._threads = self._threads, 0
        for _ in range(count):
            self._queue.put(None)

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            task.run()
            del task  # or the last result would live on while this thread waits
            with self._idle:
                self._unfinished -= 1
                if self._unfinished == 0:
                    self._idle.notify_all()
