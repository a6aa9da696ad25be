"""One process of a gateway with workers: which one it is, and the files that all of them share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

STATE = "state"
MAX_PATH_BYTES = 100
"""Of a unix socket; systems allow 104 to 108."""


@dataclass(frozen=True, slots=True)
class Place:
    """`index` of a worker from 0 on, -1 for the process that keeps the state."""

    index: int
    workers: int
    generation: int
    """How often it has been started again."""
    directory: Path
    """Sockets and files of this gateway, for its user alone."""
    port: int
    life_fd: int
    """Ends when the supervisor is gone."""
    ready_fd: int
    """Takes a byte when the process serves."""

    @property
    def name(self) -> str:
        return name_of(self.index)

    @property
    def state_socket(self) -> Path:
        """Where workers are fed."""
        return self.directory / "feed.sock"

    def socket_of(self, index: int) -> Path:
        """Where the process of that index is asked."""
        return self.directory / f"{name_of(index)}.sock"

    def counts_of(self, index: int) -> Path:
        """What it has counted so far."""
        return self.directory / f"{name_of(index)}.counts"


def name_of(index: int) -> str:
    return STATE if index < 0 else f"worker-{index}"
