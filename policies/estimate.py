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
    prompts = max(1, load.waiting + load.sent_requests)
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
    want = request.prompt_tokens - 1
    uncached_at_p = max(0, want - remote.matched_tokens)
    uncached_at_d = max(0, want - local.matched_tokens)
    queue_s = queue_seconds(remote.load, remote.curve)
    prefill_s = prefill_seconds(remote.load, remote.curve, uncached_at_p, remote.matched_tokens)

    # The fixed state is never packed lossily, and follows when the last chunk is computed.
    state_bytes = snapshot.state_bytes
    own_bytes = wire_bytes(snapshot, remote, uncached_at_d) + state_bytes
    chunk_bytes = wire_bytes(snapshot, remote, min(uncached_at_d, remote.curve.chunk_tokens))
    goodput = link.goodput_bytes_per_s
    computed_s = queue_s + prefill_s
    carried_s = max(queue_s, link.in_flight_bytes / goodput) + own_bytes / goodput
    tail_bytes = chunk_bytes * TAIL_SHARE + state_bytes
    arrived_s = max(computed_s + tail_bytes / goodput, carried_s)
    import_s = import_s_per_byte * (snapshot.token_bytes * uncached_at_d + state_bytes)
    transfer_s = arrived_s - computed_s + import_s

    decode_s = _chunk_wait_seconds(local.load, local.curve) + _last_token_seconds(request, snapshot)
    return Estimate(
        f"{remote.peer}/{remote.instance}",
        link.rtt_s + computed_s + transfer_s + decode_s,
        queue_s=queue_s,
        prefill_s=prefill_s,
        transfer_s=transfer_s,
        rtt_s=link.rtt_s,
        decode_s=decode_s,
        uncached_tokens=uncached_at_p,
    )


def _served_seconds(load: EngineLoad, curve: PrefillCurve, uncached: float, cached: int) -> float:
    if uncached <= 0:
        return 0.0
    whole = int(uncached + 0.5)
    compute_s = curve.seconds(whole, cached)
    if load.running <= 0:
        return compute_s
    chunks = -(-whole // curve.chunk_tokens)
    return compute_s + chunks * load.decode_step_s


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
