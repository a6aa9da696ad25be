"""An epoll selector whose timeouts are not rounded up to milliseconds."""

from __future__ import annotations

import select
import selectors


class FineSelector(selectors.EpollSelector):
    """For event loops whose timers have to be exact to microseconds, with any number of files.

    The wait is select()'s, which takes microseconds and can wait for one file of any number: the
    epoll object, which is readable when one of its own files is ready.
    """

    def __init__(self) -> None:
        """Raises ValueError where this process has so many files open already that select() cannot
        wait for one more: make it early.
        """
        super().__init__()
        try:
            select.select([self.fileno()], (), (), 0)
        except ValueError:
            self.close()
            raise

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0:
            select.select([self.fileno()], (), (), timeout)
            timeout = 0
        return super().select(timeout)
