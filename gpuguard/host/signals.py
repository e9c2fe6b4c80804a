"""Hold back the signals that end a program while it does what must not be cut in two."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class HeldSignals:
    """While a child is being started: between fork and knowing its pid nobody could kill it.

    Not by a signal mask, which the child would inherit. ``let_go`` delivers what has come
    meanwhile; call it where an exception leads to the right clean-up. Without effect in other
    threads than the main one, which never see a signal.
    """

    def __init__(self) -> None:
        self._came: list[int] = []
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> HeldSignals:
        if threading.current_thread() is threading.main_thread():
            for signum in _ENDING:
                if callable(signal.getsignal(signum)):  # not ignored, nor deadly by default
                    self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.let_go()

    @property
    def has_come(self) -> bool:
        """True if one is being held back."""
        return bool(self._came)

    def let_go(self) -> None:
        """Put the handlers back, and deliver what has come."""
        before, self._before = self._before, {}
        for signum, handler in before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]
        came, self._came = self._came, []
        for number in came[:1]:
            os.kill(os.getpid(), number)

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        self._came.append(signum)
