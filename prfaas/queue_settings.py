"""Settings of the order in which requests leave a queue of the gateway."""

from __future__ import annotations

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
    deadline_s: float = Field(10.0, gt=0, description="Order `slack`: every prompt's deadline.")
    deadline_per_s: float = Field(
        0.0, ge=0, description="Order `slack`: so much more for each second of its prefill."
    )
