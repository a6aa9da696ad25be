"""Who is prefilled next: keys of waiting prompts; the smallest goes first."""

from __future__ import annotations

from collections.abc import Callable

from policies.scenario import QueueOrder
from policies.simulator.job import Job
from prfaas import queue_settings

Key = Callable[[Job, float], float]
"""Key of a job whose prefill will take so many seconds."""


def order_key(order: QueueOrder) -> Key:
    """The key a queue order sorts by."""
    key = queue_settings.order_key(order)
    return lambda job, seconds: key(job.request.arrival_s, seconds)


def preempts(order: QueueOrder) -> bool:
    """Whether a newcomer may go before a prompt that has begun, at its next chunk."""
    return order.name != "fcfs"
