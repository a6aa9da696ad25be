"""Which parameters each policy has, and where a search looks for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Span:
    """The values a search tries: both ends count; evenly in the logarithm where `log`."""

    low: float
    high: float
    log: bool = False
    whole: bool = False


COMMON = ("min_uncached_tokens",)
"""Of every policy; never searched: they guard against measurements that are not there."""

_THRESHOLD = Span(64, 131072, log=True, whole=True)
_MARGIN = Span(0.0, 0.3)

SPANS: Mapping[str, Mapping[str, Span]] = MappingProxyType(
    {
        "always_local": {},
        "always_remote": {},
        "balanced_random": {},
        "least_ttft": {"remote_margin": _MARGIN},
        "length_threshold": {"threshold_tokens": _THRESHOLD},
        "uncached_ratio": {"threshold_tokens": _THRESHOLD, "uncached_ratio": Span(0.0, 1.0)},
        "local_first": {
            "local_ttft_s": Span(0.05, 20.0, log=True),
            "transfer_budget_s": Span(0.1, 60.0, log=True),
        },
        "paper": {"threshold_tokens": _THRESHOLD, "surge_s": Span(0.0, 20.0)},
        "priced": {
            "remote_margin": _MARGIN,
            "length_price_s": Span(0.0, 10.0),
            "busy_share": Span(0.0, 1.0),
            "link_weight": Span(0.0, 2.0),
            "queue_weight": Span(0.0, 1.0),
            "loss_share": Span(0.1, 2.0, log=True),
            "link_budget_s": Span(1.0, 60.0, log=True),
            "move_gain_s": Span(0.0, 5.0),
        },
    }
)
"""By policy and parameter; a policy that is not tuned by searching has none."""

FIXED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"priced": ("egress_s_per_gb", "staging_headroom")}
)
"""Parameters that say what things cost or hold, which a search must not choose."""


def parameters_of(policy: str) -> tuple[str, ...]:
    """Every parameter the policy reads."""
    return (*SPANS[policy], *FIXED.get(policy, ()), *COMMON)
