"""One request of a workload: when it comes, how long it is, which prefix blocks it consists of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

BLOCK_TOKENS = 512
"""Tokens a block id stands for: the grain of Mooncake's traces."""


@dataclass(frozen=True, slots=True)
class Request:
    """What planner and simulator know of a request. Times in seconds from the workload's start."""

    number: int
    """Row in the file or number of the draw: names the request in results."""
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Prefix-chained ids of the prompt's blocks: equal ids, equal prefixes. Only whole blocks can
    be reused. Empty: nothing is known of the prompt's content."""
    cached_tokens: int = 0
    """What D had cached where no blocks tell, as a request log says."""


def scaled(requests: Iterable[Request], speed: float) -> Iterator[Request]:
    """The same requests `speed` times as fast. What lives for a time lives shorter with them."""
    return (replace(r, arrival_s=r.arrival_s / speed) for r in requests)


def between(requests: Iterable[Request], start_s: float, end_s: float) -> Iterator[Request]:
    """Those that arrive in [start, end), with their own times."""
    return (r for r in requests if start_s <= r.arrival_s < end_s)
