"""What crosses between vLLM's processes: plans to the workers in each step, reports back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from prfaas_connect.vllm.plan import DecodePlan

_WorkerMetadata: type = getattr(base, "KVConnectorWorkerMetadata", object)


@dataclass(slots=True)
class PrfaasMetadata(base.KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler's half to the workers': one engine step."""

    decode: DecodePlan = field(default_factory=DecodePlan)
    prefill: Any = None
    """What the producer's halves say to each other."""


@dataclass(slots=True)
class PrfaasWorkerMetadata(_WorkerMetadata):  # type: ignore[misc]
    """From the workers' halves to the scheduler's: one engine step."""

    digests: dict[str, str] = field(default_factory=dict)
    """Digest of what was loaded, by session; see `Release`."""
    prefill: list[Any] = field(default_factory=list)
    """One entry of each worker whose producer has something to say."""

    def aggregate(self, other: PrfaasWorkerMetadata) -> PrfaasWorkerMetadata:
        return PrfaasWorkerMetadata(self.digests | other.digests, self.prefill + other.prefill)
