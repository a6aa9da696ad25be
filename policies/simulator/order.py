"""Who is prefilled next: keys of waiting prompts; the smallest goes first."""

from __future__ import annotations

from collections.abc import Callable

from policies.scenario import QueueOrder
from policies.simulator.job import Job

Key = Callable[[Job, float], float]
"""Key of a job whose prefill will take so many seconds."""


def order_key(order: QueueOrder) -> Key:
    """The key a queue order sorts by.

    First come: arrival. Shortest remaining with ageing: arrival + ageing x seconds, so that a
    prompt is overtaken by shorter ones only for a time in proportion to its own length. Slack:
    the latest start that still meets the prompt's deadline.
    """
    if order.name == "srpt":
        ageing = order.ageing
        return lambda job, seconds: job.request.arrival_s + ageing * seconds
    if order.name == "slack":
        fixed, share = order.deadline_s, order.deadline_per_s - 1
        return lambda job, seconds: job.request.arrival_s + fixed + share * seconds
    return lambda job, seconds: job.request.arrival_s


def preempts(order: QueueOrder) -> bool:
    """Whether a newcomer may go before a prompt that has begun, at its next chunk."""
    return order.name != "fcfs"
