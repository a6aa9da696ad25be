"""Settings of routing policies: which one runs, and the parameters of all of them."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from prfaas.queue_settings import QueueSettings
from prfaas.section import Section


class PolicySettings(Section):
    """Which routing policy runs, and its parameters."""

    file: Path | None = Field(
        None,
        description="Policy file (from `prfaas tune`, or by hand) that names policy and parameters "
        "instead of the keys here.",
    )
    name: str = Field("least_ttft", description="Registered policy name.")
    min_uncached_tokens: int = Field(
        64, ge=0, description="Fewer uncached tokens than this stay local without asking further."
    )
    threshold_tokens: int = Field(
        2048,
        ge=0,
        description="Policies `length_threshold`, `uncached_ratio`, and `paper` until it has "
        "solved its own: more uncached tokens than this go remote.",
    )
    uncached_ratio: float = Field(
        0.7,
        ge=0,
        le=1,
        description="Policy `uncached_ratio`: from this uncached share on prompts go remote.",
    )
    surge_s: float = Field(
        2.0,
        ge=0,
        description="Policy `paper`: the threshold doubles for each such lead of the remote queue "
        "over D's; 0: it does not.",
    )
    local_ttft_s: float = Field(
        2.0, ge=0, description="Policy `local_first`: what D can start within this stays."
    )
    transfer_budget_s: float = Field(
        2.0,
        ge=0,
        description="Policy `local_first`: KV under way to D, in seconds of the link's goodput.",
    )
    remote_margin: float = Field(
        0.05, ge=0, description="Remote must be faster than local by this share to be chosen."
    )
    length_price_s: float = Field(
        3.0,
        ge=0,
        description="Policy `priced`: seconds of TTFT that a prompt e times as long as the solved "
        "threshold may cost to leave, and one a factor of e shorter must gain; 0: lengths have "
        "no price.",
    )
    busy_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Policy `priced`: how much of `length_price_s` falls away at a site where "
        "nobody has waited lately.",
    )
    link_weight: float = Field(
        1.0,
        ge=0,
        description="Policy `priced`: how much of the time counts by which a prompt's KV delays "
        "the transfers under way on its link.",
    )
    queue_weight: float = Field(
        0.15,
        ge=0,
        description="Policy `priced`: how much of the time counts by which a prompt delays others "
        "in D's queue.",
    )
    loss_share: float = Field(
        0.5,
        ge=0,
        description="Policy `priced`: prices of length, link and queue cost a request at most this "
        "share of its estimated TTFT where that is shortest.",
    )
    egress_s_per_gb: float = Field(
        0.0,
        ge=0,
        description="Policy `priced`: seconds of TTFT that a gigabyte of KV on the wire must gain.",
    )
    link_budget_s: float = Field(
        20.0,
        gt=0,
        description="Policy `priced`: with more KV under way than the link carries in this time a "
        "peer gets nothing new, until half of it is left.",
    )
    staging_headroom: float = Field(
        1.0,
        ge=1,
        description="Policy `priced`: D's free staging must be so many times the request's KV.",
    )
    move_gain_s: float | None = Field(
        0.1,
        ge=0,
        description="Policy `priced`: a request that waits moves to a site that stands idle if it "
        "gains so much TTFT; none: it stays.",
    )
    queue: QueueSettings | None = Field(
        None,
        description="In which order requests wait in the gateway while this policy is the active "
        "one, as policy files say it; none: `gateway.queue`.",
    )
