"""The numeric probe: the same fixed tokens prefilled by both engines must give the same KV.

A fingerprint compares what the two sides say; this compares what they compute, so other weights,
another rope or a broken kernel under the same name are found before any request is offloaded.
"""

from __future__ import annotations

import asyncio

import numpy as np
import numpy.typing as npt

from prfaas.errors import EngineUnavailable, IncompatibleLayout, PrefillTimeout
from prfaas.kvport import EngineConn
from prfaas.layout import KvLayout
from prfaas.ledger import Ledger, piece_digest
from prfaas.placement import StagingMap
from prfaas.session_messages import SessionOpen
from prfaas_connect.port.messages import Hello, PrefillEnd
from remote_prefill.exports import ExportHub, RecordView

PROBE_TOKENS = 64


def probe_tokens(vocab_size: int, max_tokens: int) -> npt.NDArray[np.int32]:
    """The fixed tokens for a vocabulary: spread over all of it, the same everywhere."""
    index = np.arange(1, min(PROBE_TOKENS, max_tokens) + 1, dtype=np.uint64)
    return ((index * np.uint64(2654435761)) % np.uint64(vocab_size)).astype(np.int32)


def is_probe(request: SessionOpen, hello: Hello) -> bool:
    """Whether a session asks for the probe's own KV and nothing else, on behalf of nobody."""
    tokens = probe_tokens(hello.vocab_size, hello.max_tokens).astype("<i4").tobytes()
    return request.tokens == tokens and not (request.use_cache or request.salt or request.tenant)


def probe_map(layout: KvLayout, tokens: int) -> StagingMap:
    """Memory for a probe's KV, one span whatever the chunks of either side."""
    buffer = np.zeros(layout.session_bytes(0, tokens), dtype=np.uint8)
    return StagingMap(layout, 0, tokens, tokens, buffer)


async def local_probe(conn: EngineConn, hub: ExportHub, timeout_s: float) -> StagingMap:
    """KV of the probe tokens as the engine beside this agent computes it.

    Raises EngineUnavailable or PrefillTimeout.
    """
    hello = conn.hello
    if "prefill" not in hello.roles and not hub.submits:
        raise EngineUnavailable(
            "the decode engine does not offer prefill, so the pair cannot be probed"
        )
    tokens = probe_tokens(hello.vocab_size, hello.max_tokens)
    found = probe_map(conn.layout, len(tokens))
    ledger = Ledger(conn.layout, 0, len(tokens), hello.chunk_tokens)
    data = tokens.astype("<i4").tobytes()
    export = hub.start(data, epoch=1, send_from=0, salt="", use_cache=False)
    try:
        async with asyncio.timeout(timeout_s):
            while not isinstance(event := await export.next(), PrefillEnd):
                try:
                    _keep(event, found, ledger)
                finally:
                    event.done()
    except TimeoutError:
        raise PrefillTimeout("the decode engine did not answer the probe", phase="probe") from None
    finally:
        export.cancel()
    if event.status != "done" or not ledger.whole:
        raise EngineUnavailable(
            f"the decode engine failed the probe: {event.status} {event.reason}"
            f" {ledger.describe_missing()}".rstrip()
        )
    return found


def _keep(record: RecordView, found: StagingMap, ledger: Ledger) -> None:
    piece, raw = record.piece, record.raw
    nbytes = ledger.piece_bytes(piece)
    if nbytes == raw.nbytes and ledger.claim(piece):
        found.scatter(piece, raw)
        ledger.commit(piece, piece_digest(raw.data), nbytes)


def compare(mine: StagingMap, theirs: StagingMap, tolerance: float) -> float:
    """Largest normalised mean squared error of any tensor.

    Raises IncompatibleLayout naming the worst one (`layers[7].v`) where it is over `tolerance` or
    not a number.
    """
    worst, where = 0.0, ""
    layout = mine.layout
    for extent in layout.extents(mine.start, mine.end, mine.chunk_tokens):
        group = layout.groups[extent.group]
        dtype = group.dtype
        ours, other = mine.tensor(extent), theirs.tensor(extent)
        parts = (
            (("state", ours, other),)
            if group.keeps_state
            else (("k", ours[0], other[0]), ("v", ours[1], other[1]))
        )
        for name, ours, other in parts:
            error = normalised_error(to_float32(ours, dtype), to_float32(other, dtype))
            if error > worst:
                worst, where = error, f"layers[{extent.layer}].{name}"
    if worst > tolerance:
        raise IncompatibleLayout(
            f"numeric probe failed: {where} differs by {worst:.3g} "
            f"(normalised mean squared error, tolerance {tolerance:g})",
            field=where,
        )
    return worst


def normalised_error(ours: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
    """Mean squared difference over the mean square of `ours`; 0 where both are zero, infinite
    where either is not finite.
    """
    with np.errstate(invalid="ignore"):
        difference = float(np.square(ours.astype(np.float64) - other).mean())
        power = float(np.square(ours, dtype=np.float64).mean())
    if not (np.isfinite(difference) and np.isfinite(power)):
        return float("inf")
    return 0.0 if difference == 0 else difference / power if power else float("inf")


def to_float32(raw: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.float32]:
    """Items of `dtype` in any byte array, as a flat fp32 array."""
    flat = np.ascontiguousarray(raw).reshape(-1)
    if dtype == "bfloat16":
        words = flat.view("<u2").astype("<u4") << np.uint32(16)
        return words.view("<f4").astype(np.float32)
    return flat.view("<f4" if dtype == "float32" else "<f2").astype(np.float32)
