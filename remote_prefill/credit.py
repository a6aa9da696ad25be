"""How much may be under way to a D agent at once, shared by its sessions."""

from __future__ import annotations

from prfaas.layout import KvLayout
from prfaas.send_session import least_credit


class CreditPool:
    """Divides `window_bytes` by the sessions that are open; each gets at least one frame's worth.

    Nothing to close. What a session has been granted before stays under way until it is verified,
    so the sum may be over the window for as long.
    """

    def __init__(self, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self.sessions = 0

    def join(self) -> None:
        self.sessions += 1

    def leave(self) -> None:
        self.sessions -= 1

    def share(self, layout: KvLayout) -> int:
        """Credit of one session now."""
        return max(least_credit(layout), self.window_bytes // max(1, self.sessions))
