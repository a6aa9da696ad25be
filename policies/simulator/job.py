"""One request on its way through the simulated sites."""

from __future__ import annotations

from policies.workload.request import Request
from prfaas.snapshot import Reason


class Job:
    """Everything that is known of one request so far; times in seconds, NaN until they are known.

    Mutable, and shared by the parts of the simulation that it passes through.
    """

    __slots__ = (
        "cached",
        "computed",
        "copied_s",
        "decode_at",
        "done_at",
        "fallback",
        "finished_at",
        "first_token_at",
        "flow",
        "instance",
        "kept", "key",
        "moves",
        "order",
        "peer",
        "plan",
        "prefill_s",
        "queue_s",
        "queued_at",
        "raw_bytes",
        "reason",
        "remote",
        "request",
        "sent_at",
        "started_at",
        "tries",
        "uncached",
        "uncached_d",
        "want",
        "wire_bytes",
    )  # fmt: skip

    def __init__(self, request: Request, order: int) -> None:
        self.request = request
        self.order = order
        """Of arrival: breaks ties."""
        self.want = request.prompt_tokens - 1
        """Tokens whose KV is needed before D computes the last one."""
        self.reason = Reason.FORCED_LOCAL
        self.fallback = ""
        """Why it is at D although it was sent elsewhere; empty: it was not, or it came back."""
        self.remote = False
        self.plan: tuple[tuple[str, str], ...] = ()
        self.tries = 0
        self.moves = 0
        """From site to site, while it waited."""
        self.peer = ""
        self.instance = ""
        self.uncached = 0
        """To prefill where it waits now; set again when its prefill starts."""
        self.cached = 0
        self.kept = 0
        """Leading tokens D has KV of from a transfer that ended early."""
        self.computed = 0
        """Of `uncached`, done in earlier chunks."""
        self.uncached_d = 0
        """What D lacked when it was decided."""
        self.key = 0.0
        self.flow: object = None
        self.raw_bytes = 0.0
        self.wire_bytes = 0.0
        self.sent_at = float("nan")
        self.queued_at = request.arrival_s
        self.started_at = float("nan")
        self.done_at = float("nan")
        self.decode_at = float("nan")
        self.queue_s = 0.0
        self.prefill_s = 0.0
        self.copied_s = 0.0
        """Of its arrival at D, what copying it out of staging took."""
        self.first_token_at = float("nan")
        self.finished_at = float("nan")
