"""Threads for handlers that block. Each runs one job at a time and is kept; one that never comes back is replaced by
need."""

import queue
import threading
from collections.abc import Callable

from penstock.sdk.functions.errors import InvocationCancelled

Job = Callable[[], None]


class Threads:
    """As many threads as jobs run at once. Jobs raise nothing."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)

    def run(self, job: Job) -> None:
        """In a thread that waits, or a new one."""
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._serve, name="penstock-handler", daemon=True).start()
        self._jobs.put(job)

    def _serve(self) -> None:
        while True:
            try:
                self._jobs.get()()
                self._idle.release()
            except InvocationCancelled:
                # It came when its job was over already. Whether this thread was counted as idle is unknown: end it.
                return


class Interrupt:
    """Raises InvocationCancelled in one thread, as long as that thread is still at the same job."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = 0
        self._sent = False

    def begin(self) -> None:
        """The job starts in this thread."""
        with self._lock:
            self._thread = threading.get_ident()

    def end(self) -> None:
        """The job is over; what was sent and has not come yet is taken back."""
        with self._lock:
            if self._sent:
                _raise_in(self._thread, None)
            self._thread = 0

    def send(self) -> None:
        """Raise it there. Code that waits in C notices when it comes back."""
        with self._lock:
            if self._thread and not self._sent:
                self._sent = True
                _raise_in(self._thread, InvocationCancelled)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    import ctypes

    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )
