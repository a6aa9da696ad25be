"""Which decode engine a request goes to: the one where its first token would come first."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from prfaas.snapshot import LocalEngine
from prfaas.values import Value

REQUEST_TOKENS = 250
"""At an engine of unknown speed a request in the way weighs as much as so many to prefill."""

ALIKE = 1.1
"""Engines that would take up to so many times the fastest one's time for a prompt are equally fast:
equal machines measure curves that differ by some hundredths. For a long prompt those come to more
than many requests in the way, so all long prompts would meet at one engine."""


class EngineOption(Value, frozen=True):
    """One engine as a choice for one request."""

    local: LocalEngine
    recent_tokens: int = 0
    """Of the prompt, sent there of late: cached or soon to be."""
    transfers: int = 0
    """Requests there that wait for KV from a peer, and will decode with the rest."""
    usable: bool = True
    """It answers, is not draining, and its breaker is closed or waits for a trial."""


def rank_engines(
    options: Sequence[EngineOption], prompt_tokens: int, key: str
) -> list[EngineOption]:
    """Engines in the order in which to try them; the unusable ones last, for want of better.

    Engines of known speed are compared by the time to work off what waits there and then this
    prompt, of which the cached part costs nothing; and once more by this prompt's own time, for
    others will wait for it. So what shares a prefix stays together, unless that is much slower.
    Engines that are about equally fast are taken to be so.
    Each request that is there already counts for a decode step, which they all will share: it is
    what tells engines apart whose prompts are prefilled elsewhere.
    Engines of unknown speed are compared by what is not cached there and how many requests they
    have, and what ties is spread by `key`.
    """
    known, fastest_s = True, 0.0
    for option in options:
        curve = option.local.curve
        if curve.known:
            whole_s = curve.seconds(prompt_tokens)
            if not fastest_s or whole_s < fastest_s:
                fastest_s = whole_s
        elif option.usable:
            known = False

    def cost(option: EngineOption) -> tuple[bool, float, float]:
        local = option.local
        load, curve = local.load, local.curve
        cached = min(max(local.matched_tokens, option.recent_tokens), prompt_tokens)
        busy = load.running + load.waiting + load.sent_requests + option.transfers
        if known and curve.known:
            ahead_s = curve.seconds(load.queue_tokens + load.sent_tokens)
            own_s = curve.seconds(prompt_tokens - cached, cached)
            whole_s = curve.seconds(prompt_tokens)
            if fastest_s < whole_s <= ALIKE * fastest_s:
                own_s *= fastest_s / whole_s
            shared_s = busy * load.decode_step_s
            return (not option.usable, round(ahead_s + 2 * own_s + shared_s, 3), busy)
        waiting = busy * REQUEST_TOKENS + prompt_tokens - cached
        return (not option.usable, waiting, busy)

    def spread(at: int) -> bytes:
        name = options[at].local.name
        return hashlib.blake2b(f"{key}/{name}".encode(), digest_size=8).digest()

    costs = [cost(option) for option in options]
    order: Iterable[int] = range(len(costs))
    if len(set(costs)) < len(costs):  # else nothing ties
        order = sorted(order, key=spread)
    return [options[at] for at in sorted(order, key=costs.__getitem__)]
