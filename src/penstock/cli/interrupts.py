"""Says what a command may have left behind when it ends before its time: by Ctrl-C, by a termination, or because the
server went away in the middle."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from penstock.cli.output import notice

#: Windows has no hang-up.
SIGNALS: Final = (signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))


class Terminated(KeyboardInterrupt):
    """The process was asked to end by a signal."""


@contextmanager
def explained(left_behind: Callable[[], str]) -> Iterator[None]:
    """What stands inside makes something that is charged for. `left_behind` names it and the command that ends it."""
    from penstock.sdk.errors import BadAnswer, ServerError, Unreachable

    with _terminations():
        try:
            yield
        except KeyboardInterrupt:
            notice(left_behind())
            raise
        except (BadAnswer, ServerError):
            notice(left_behind())
            raise
        except Unreachable as error:
            if error.sent:
                notice(left_behind())
            raise


@contextmanager
def _terminations() -> Iterator[None]:
    """A termination is an exception meanwhile, so that there is time for a word."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _terminate) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminate(_: int, __: Any) -> None:
    raise Terminated
