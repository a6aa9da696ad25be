"""What a process that moves KV asks of gRPC and of the C library, before gRPC is loaded."""

from __future__ import annotations

import ctypes
import os
import sys

EXPERIMENTS = ("tcp_rcv_lowat", "tcp_frame_size_tuning")
"""Of gRPC's own: a receiver is woken when a good part of a message has come, not for every few
packets, and reads them in larger pieces. At 300 Mbit/s that is a sixth of all CPU at D.
"""
MMAP_BYTES = 32 << 20
"""The most that glibc takes. Below it memory comes from the heap, where it has its pages already:
messages of a megabyte would get fresh ones each time, which costs more than copying them does.
"""
TRIM_BYTES = 256 << 20
"""Free memory at the end of the heap beyond this goes back to the system."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def tune_process() -> None:
    """Call it before anything imports gRPC. What the environment says on it stays as it is."""
    os.environ.setdefault("GRPC_EXPERIMENTS", ",".join(EXPERIMENTS))
    if not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        _keep_memory()


def _keep_memory() -> bool:
    """Whether the C library is one that can be told."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # not glibc
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES))
