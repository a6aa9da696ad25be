"""What the links of an agent are given: the engine beside it, and what they share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from prfaas.clock import Clock
from prfaas.codecs import CodecSet
from prfaas.kvport import EngineConn
from prfaas.limits import Limits
from prfaas.placement import StagingMap
from prfaas.settings import AgentSettings
from prfaas.tls_files import TlsFiles
from remote_prefill.credit import CreditPool
from remote_prefill.exports import ExportHub
from remote_prefill.link_sampler import LoopLoad
from remote_prefill.metrics import AgentMetrics


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """The engine beside this agent, and its side of the numeric probe."""

    conn: EngineConn
    hub: ExportHub
    probe: Callable[[], Awaitable[StagingMap]]
    """KV of the probe tokens, computed once for all peers."""
    codecs: CodecSet
    """Those that its KV may come with."""


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """What all links of an agent share."""

    settings: AgentSettings
    limits: Limits
    codecs: CodecSet
    executor: Executor
    metrics: AgentMetrics
    clock: Clock
    credit: CreditPool
    tls: TlsFiles | None = None
    """Shown to every instance; None: plain text, on loopback only."""
    load: LoopLoad | None = None
    """Of the agent's thread; None: each link keeps its own."""
    free_staging: Callable[[], int] = lambda: 0
    """Bytes that new sessions may still reserve, for the instances to know."""
