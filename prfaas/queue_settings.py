"""Orders in which prompts leave a queue, of gateways as of simulated ones: settings and keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pydantic import Field

from prfaas.section import Section


class QueueSettings(Section):
    """Who of those that wait in the gateway goes to an engine next; as in the simulator."""

    name: Literal["fcfs", "srpt", "slack"] = Field(
        "fcfs",
        description="`fcfs`: first come, first served; `srpt`: shortest prefill first, with "
        "ageing; `slack`: who has to start soonest to meet a deadline.",
    )
    ageing: float = Field(
        2.0,
        gt=0,
        description="Order `srpt`: by arrival + this times the seconds of the prompt's prefill.",
    )
    overtaken_s: float = Field(
        8.0,
        gt=0,
        description="Order `srpt`: nothing that comes so much later goes first, however short.",
    )
    deadline_s: float = Field(10.0, gt=0, description="Order `slack`: every prompt's deadline.")
    deadline_per_s: float = Field(
        0.0, ge=0, description="Order `slack`: so much more for each second of its prefill."
    )


Key = Callable[[float, float], float]
"""Of a request that came at a time, and whose prefill will take so many seconds."""


def order_key(order: QueueSettings) -> Key:
    """The key that an order sorts by.

    `srpt`: a prompt is overtaken by shorter ones only for a time in proportion to its own length,
    and not for longer than `overtaken_s`.
    `slack`: the latest start that still meets the prompt's deadline.
    """
    if order.name == "srpt":
        ageing, most_s = order.ageing, order.overtaken_s
        return lambda arrival_s, seconds: arrival_s + min(ageing * seconds, most_s)
    if order.name == "slack":
        fixed_s, share = order.deadline_s, order.deadline_per_s - 1
        return lambda arrival_s, seconds: arrival_s + fixed_s + share * seconds
    return lambda arrival_s, seconds: arrival_s
