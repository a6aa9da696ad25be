"""What the engine needs of KvPort; `prfaas_connect.port.engine.EnginePort` is one."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from prfaas_connect.port.messages import PortMessage, Welcome


class KvPort(Protocol):
    """Connection to the agent, with its shared memory. See `EnginePort` for the contract."""

    def start(self) -> None: ...

    def close(self) -> None: ...

    @property
    def connected(self) -> bool: ...

    @property
    def welcome(self) -> Welcome | None: ...

    @property
    def ring_bytes(self) -> int: ...

    def send(self, message: PortMessage, blob: bytes | memoryview = b"") -> bool: ...

    def ring_reserve(self, nbytes: int) -> int | None: ...

    def ring(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]: ...

    def staging(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]: ...
