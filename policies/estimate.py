"""TTFT estimates of every candidate from one snapshot: pure functions, seconds in all parts.

The parts of an estimate add up to its `ttft_s`, so a log line shows what made a place slow. A place
whose inputs are unknown or too old has no estimate, which keeps the request away from it.

Local: D works off its queue and then the prompt, chunk by chunk, with one decode step of its
running batch between two chunks; one more step computes the last prompt token.

Remote: one round trip, then P's queue and prefill, while the wire works off what is already on the
link and this session's bytes, layer by layer behind the computation; then D imports, waits for the
chunk it may be in the middle of, and computes the last prompt token in a decode step.
"""

from __future__ import annotations

from prfaas.snapshot import (
    EngineLoad,
    Estimate,
    PrefillCurve,
    RemoteInstance,
    RequestFacts,
    Snapshot,
)

TAIL_SHARE = 1 / 32
"""Share of a chunk's bytes that can only leave when P has computed its last layer: one layer of
about thirty (the snapshot does not say how many the model has)."""


def queue_seconds(load: EngineLoad, curve: PrefillCurve) -> float:
    """Until the prompts ahead are computed, with the decode steps between their chunks."""
    tokens = load.queue_tokens + load.sent_tokens
    if tokens <= 0:
        return 0.0
    # Attention cost grows with each prompt's own length, not with that of the queue.
    prompts = load.waiting + load.sent_requests
    if prompts <= 1:
        return _served_seconds(load, curve, tokens, 0)
    return prompts * _served_seconds(load, curve, tokens / prompts, 0)


def prefill_seconds(load: EngineLoad, curve: PrefillCurve, uncached: int, cached: int) -> float:
    """To prefill `uncached` tokens after `cached` ones at an engine that is also decoding."""
    return _served_seconds(load, curve, uncached, cached)


def wire_bytes(snapshot: Snapshot, remote: RemoteInstance, uncached_at_d: int) -> float:
    """KV of tokens that D lacks, as it crosses the link."""
    return snapshot.token_bytes * uncached_at_d / max(remote.link.wire_ratio, 1e-9)


def local_estimate(request: RequestFacts, snapshot: Snapshot) -> Estimate | None:
    """Estimate for D itself, or None while its curve is unknown or its load too old."""
    local = snapshot.local
    load, curve = local.load, local.curve
    if not curve.known or load.age_s > snapshot.max_age_s:
        return None
    uncached = max(0, request.prompt_tokens - 1 - local.matched_tokens)
    queue_s = queue_seconds(load, curve)
    prefill_s = prefill_seconds(load, curve, uncached, local.matched_tokens)
    decode_s = _last_token_seconds(request, snapshot)
    return Estimate(
        "local",
        queue_s + prefill_s + decode_s,
        queue_s=queue_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        uncached_tokens=uncached,
    )


def remote_estimate(
    request: RequestFacts, snapshot: Snapshot, remote: RemoteInstance, import_s_per_byte: float
) -> Estimate | None:
    """Estimate for one instance, or None while any of its inputs is unknown or too old.

    `import_s_per_byte`: seconds D takes to import one raw byte from staging into its pool.
    """
    local, link = snapshot.local, remote.link
    if not (remote.curve.known and local.curve.known) or link.goodput_bytes_per_s <= 0:
        return None
    if max(remote.load.age_s, link.age_s, local.load.age_s) > snapshot.max_age_s:
        return None
    decode_s = arrival_seconds(request, snapshot)
    return as_estimate(remote, remote_parts(request, snapshot, remote, decode_s, import_s_per_byte))


Parts = tuple[float, float, float, float, float, int]
"""TTFT, then of it queue, prefill, transfer and decode (the rest is the round trip), and the tokens
P computes: an estimate in the making, as many are thrown away."""


def remote_parts(
    request: RequestFacts,
    snapshot: Snapshot,
    remote: RemoteInstance,
    decode_s: float,
    import_s_per_byte: float,
) -> Parts:
    """`remote_estimate` of an instance whose inputs are known. `decode_s`: `arrival_seconds`."""
    link, load, curve = remote.link, remote.load, remote.curve
    want = request.prompt_tokens - 1
    cached = remote.matched_tokens
    uncached_at_p = want - cached if want > cached else 0
    uncached_at_d = want - snapshot.local.matched_tokens
    if uncached_at_d < 0:
        uncached_at_d = 0
    queue_s = queue_seconds(load, curve)
    computed_s = queue_s + _served_seconds(load, curve, uncached_at_p, cached)

    # The fixed state is never packed lossily, and follows when the last chunk is computed.
    state_bytes = snapshot.state_bytes
    token_bytes = snapshot.token_bytes
    ratio, goodput = link.wire_ratio, link.goodput_bytes_per_s
    wire_token_bytes = token_bytes / (ratio if ratio > 1e-9 else 1e-9)
    tail = uncached_at_d if uncached_at_d < curve.chunk_tokens else curve.chunk_tokens
    ahead_s = link.in_flight_bytes / goodput
    carried_s = (ahead_s if ahead_s > queue_s else queue_s) + (
        wire_token_bytes * uncached_at_d + state_bytes
    ) / goodput
    arrived_s = computed_s + (wire_token_bytes * tail * TAIL_SHARE + state_bytes) / goodput
    if carried_s > arrived_s:
        arrived_s = carried_s
    arrived_s += import_s_per_byte * (token_bytes * uncached_at_d + state_bytes)
    return (
        link.rtt_s + arrived_s + decode_s,
        queue_s,
        computed_s - queue_s,
        arrived_s - computed_s,
        decode_s,
        uncached_at_p,
    )


def as_estimate(remote: RemoteInstance, parts: Parts) -> Estimate:
    """The parts under the names that log lines have."""
    ttft_s, queue_s, prefill_s, transfer_s, decode_s, uncached = parts
    return Estimate(
        f"{remote.peer}/{remote.instance}",
        ttft_s,
        queue_s,
        prefill_s,
        transfer_s,
        remote.link.rtt_s,
        decode_s,
        uncached,
    )


def arrival_seconds(request: RequestFacts, snapshot: Snapshot) -> float:
    """From KV that is imported at D to the first token."""
    local = snapshot.local
    return _chunk_wait_seconds(local.load, local.curve) + _last_token_seconds(request, snapshot)


def _served_seconds(load: EngineLoad, curve: PrefillCurve, uncached: float, cached: int) -> float:
    if uncached <= 0:
        return 0.0
    whole = int(uncached + 0.5)
    base_s = curve.base_s + load.decode_step_s if load.running > 0 else curve.base_s
    # As `PrefillCurve.seconds`, with a decode step for each chunk.
    return (
        base_s * -(-whole // curve.chunk_tokens)
        + curve.token_s * whole
        + curve.token_context_s * whole * (cached + whole / 2)
    )


def _last_token_seconds(request: RequestFacts, snapshot: Snapshot) -> float:
    local = snapshot.local
    if local.load.decode_step_s > 0:
        return local.load.decode_step_s
    return local.curve.seconds(1, request.prompt_tokens)


def _chunk_wait_seconds(load: EngineLoad, curve: PrefillCurve) -> float:
    """Half a chunk where D is prefilling: what arrives then waits for the chunk to end."""
    tokens = load.queue_tokens + load.sent_tokens
    if tokens <= 0:
        return 0.0
    return curve.seconds(min(tokens, curve.chunk_tokens)) / 2
