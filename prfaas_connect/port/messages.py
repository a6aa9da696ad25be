"""Messages of KvPort: who says what over the unix socket, and how it is framed.

A message is `u32 header_bytes | u32 blob_bytes | JSON header | blob`, little endian. The blob
carries token ids (little-endian int32). KV bytes never pass here: they lie in the shared-memory
segments whose file descriptors come with `Welcome`. Sizes are checked before anything is read;
unknown types and fields are errors.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import types
import typing
from dataclasses import dataclass, field
from typing import Any, ClassVar

PORT_VERSION = 1
PREFIX = struct.Struct("<II")
MAX_HEADER_BYTES = 4 << 20
MAX_BLOB_BYTES = 16 << 20


class PortError(Exception):
    """A message that breaks the KvPort protocol."""


@dataclass(frozen=True, slots=True)
class PortMessage:
    """Base of all messages; `TYPE` is the name on the wire."""

    TYPE: ClassVar[str] = ""


# --- both roles, engine to agent ---


@dataclass(frozen=True, slots=True)
class Hello(PortMessage):
    """First message of an engine: what it is and what its KV looks like."""

    TYPE: ClassVar[str] = "hello"
    version: int
    engine: str
    """Engine name and version, for people ("embedded 0.1.0")."""
    roles: list[str]
    """Subset of ["prefill", "decode"]."""
    model: str
    """Served model name."""
    layout: dict[str, Any]
    """`KvLayout.to_dict()`."""
    chunk_tokens: int
    block_tokens: int
    max_tokens: int
    """Longest context."""
    vocab_size: int
    model_identity: str
    config_digest: str
    tokenizer_digest: str
    ranks: list[list[int]]
    """[head_start, head_end) of each TP rank."""
    epoch: str
    """Random at each engine start; KV events of another epoch are void."""
    paced: bool = False
    max_running: int = 0
    """Sequences that it decodes at once; 0: it does not say."""
    encodes: list[str] = field(default_factory=list)
    """Codecs that its accelerator can prepare records for, with their calibration's digest."""


@dataclass(frozen=True, slots=True)
class Join(PortMessage):
    """First message of another process of an engine that is connected: a rank that holds KV.

    Answered by Welcome with a ring of this rank's own and the engine's staging. The engine's
    connection takes its ranks' with it when it ends.
    """

    TYPE: ClassVar[str] = "join"
    version: int
    connection: str
    """`Welcome.connection` of the engine."""
    rank: int


@dataclass(frozen=True, slots=True)
class Stats(PortMessage):
    """Load of the engine, sent when it changes and at least every 250 ms."""

    TYPE: ClassVar[str] = "stats"
    queue_tokens: int
    """Prompt tokens admitted and not yet computed (waiting and half-done prefills)."""
    waiting: int
    running: int
    """Sequences in the decode batch."""
    context_tokens: int
    """Tokens of KV that the decode batch reads in each step."""
    free_blocks: int
    total_blocks: int
    decode_step_s: float
    """Moving mean of a decode step at the present batch; 0 while unknown."""
    prefill_base_s: float
    """Measured curve, see `prfaas.snapshot.PrefillCurve`; all zero while unknown."""
    prefill_token_s: float
    prefill_token_context_s: float
    draining: bool = False
    waiting_kv: int = 0
    """Of `waiting`: those whose KV is brought by the agent, so that nothing of them waits to be
    computed."""


@dataclass(frozen=True, slots=True)
class KvEvents(PortMessage):
    """Prefix-cache changes; hashes in hex. `cleared` empties the index before `stored` applies.

    An engine that publishes sends one right after Welcome, even if its cache is empty: without it
    the cache counts as unknown and nothing is offloaded.
    """

    TYPE: ClassVar[str] = "kv_events"
    epoch: str
    seq: int
    stored: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    cleared: bool = False


# --- decode role ---


@dataclass(frozen=True, slots=True)
class Fetch(PortMessage):
    """Engine to agent: bring KV of tokens [have, want) for this request. Blob: all prompt token
    ids, int32.
    """

    TYPE: ClassVar[str] = "fetch"
    session: str
    """Engine's own key of the request, unique per connection."""
    params: dict[str, Any]
    """`kv_transfer_params` exactly as they came in the request."""
    have: int
    """Tokens of the prompt whose KV the engine has (prefix cache)."""
    want: int
    """Prompt length less one. Equal to `have`: there is nothing to bring, only an outcome to tell,
    and the engine does not wait for the answer."""
    uncached: int
    """Tokens the engine would have to compute itself (want - have)."""


@dataclass(frozen=True, slots=True)
class FetchDone(PortMessage):
    """Agent to engine: the one answer to a Fetch.

    status `staged`: all of [have, want) lies in staging. `partial`: only [have, token_end),
    compute the rest. `local`: nothing came, compute all. `refused`: fail the request with the
    typed 503. After `staged` and `partial` the engine owns the staging extent until it sends
    Release.
    """

    TYPE: ClassVar[str] = "fetch_done"
    session: str
    status: str
    reason: str
    """Why it is not `staged` (a stable word such as `peer_unavailable`), else empty."""
    token_end: int = 0
    staging_offset: int = 0
    chunk_tokens: int = 0
    """Grid of the extent: `KvLayout.extents(have, token_end, chunk_tokens)` gives every tensor's
    place.
    """
    retry_after_s: float = 1.0
    message: str = ""
    quality: str = ""
    """Class of what came (docs/codecs.md); empty: nothing did."""


@dataclass(frozen=True, slots=True)
class Release(PortMessage):
    """Engine to agent: done with the staging extent. `digest`: hex digest read back from the pool,
    or empty.
    """

    TYPE: ClassVar[str] = "release"
    session: str
    result: str
    """`imported`, `aborted` or `failed`."""
    imported_tokens: int = 0
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Abort(PortMessage):
    """Engine to agent: the request is gone; stop the session. No FetchDone follows; no Release is
    needed.
    """

    TYPE: ClassVar[str] = "abort"
    session: str


# --- prefill role ---


@dataclass(frozen=True, slots=True)
class PrefillStart(PortMessage):
    """Agent to engine: compute KV of all tokens in the blob and export [send_from, n). Blob: int32
    token ids.
    """

    TYPE: ClassVar[str] = "prefill_start"
    session: str
    epoch: int
    send_from: int
    salt: str = ""
    use_cache: bool = True
    """False for the numeric probe: neither read nor fill the prefix cache."""


@dataclass(frozen=True, slots=True)
class PrepareFor(PortMessage):
    """Agent to engine: records of this session that are begun from now on may come prepared for
    this codec, one that the engine's Hello names; `codec` empty: as they are.
    """

    TYPE: ClassVar[str] = "prepare_for"
    session: str
    epoch: int
    codec: str


@dataclass(frozen=True, slots=True)
class PrefillCancel(PortMessage):
    """Agent to engine: stop computing and exporting this session. Answered by PrefillEnd."""

    TYPE: ClassVar[str] = "prefill_cancel"
    session: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Record(PortMessage):
    """Engine to agent: one tensor of canonical KV lies in the ring at `offset`.

    Tokens [token_start, token_end) of one chunk, one layer, heads [head_start, head_end). Records
    are freed by RingFree in the order they were sent.
    """

    TYPE: ClassVar[str] = "record"
    session: str
    epoch: int
    chunk: int
    group: int
    layer: int
    token_start: int
    token_end: int
    head_start: int
    head_end: int
    offset: int
    nbytes: int
    cached: bool = False
    """Read from the prefix cache, not computed now."""
    codec: str = ""
    """The bytes are what this codec has to finish, not canonical; one frame's worth of one layer.
    """


@dataclass(frozen=True, slots=True)
class PrefillEnd(PortMessage):
    """Engine to agent: the last message of a session at the prefill engine."""

    TYPE: ClassVar[str] = "prefill_end"
    session: str
    epoch: int
    status: str
    """`done`, `cancelled` or `failed`."""
    records: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    queue_s: float = 0.0
    """From PrefillStart to the first chunk's start."""
    compute_s: float = 0.0
    """From the first chunk's start to the last layer's end."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RingFree(PortMessage):
    """Agent to engine: the oldest `count` records are copied out; their bytes may be reused."""

    TYPE: ClassVar[str] = "ring_free"
    count: int


@dataclass(frozen=True, slots=True)
class Welcome(PortMessage):
    """Agent to engine: answer to Hello, sent with two descriptors (ring, staging) as SCM_RIGHTS."""

    TYPE: ClassVar[str] = "welcome"
    version: int
    agent: str
    ring_bytes: int
    staging_bytes: int
    verify_import: bool = False
    """Ask the engine to read every import back from its pool and send the digest in Release."""
    connection: str = ""
    """Name of the engine's connection, for its other processes to Join; new each time."""


@dataclass(frozen=True, slots=True)
class Refused(PortMessage):
    """Agent to engine: Hello was not acceptable; the connection closes."""

    TYPE: ClassVar[str] = "refused"
    message: str


_TYPES: dict[str, type[PortMessage]] = {
    cls.TYPE: cls
    for cls in (
        Hello, Join, Stats, KvEvents, Fetch, FetchDone, Release, Abort, PrefillStart, PrepareFor,
        PrefillCancel,
        Record, PrefillEnd, RingFree, Welcome, Refused,
    )
}  # fmt: skip
_HINTS = {cls: typing.get_type_hints(cls) for cls in _TYPES.values()}
_NAMES = {cls: tuple(f.name for f in dataclasses.fields(cls)) for cls in _TYPES.values()}
_JSON = json.JSONEncoder(separators=(",", ":"))


def encode(message: PortMessage, blob: bytes | memoryview = b"") -> bytes:
    """One message as bytes, ready for the socket."""
    body: dict[str, object] = {"type": message.TYPE}
    for name in _NAMES[type(message)]:
        body[name] = getattr(message, name)
    header = _JSON.encode(body).encode()
    if len(header) > MAX_HEADER_BYTES or len(blob) > MAX_BLOB_BYTES:
        raise PortError(f"{message.TYPE}: message too large ({len(header)} + {len(blob)} bytes)")
    return b"".join((PREFIX.pack(len(header), len(blob)), header, blob))


def sizes(prefix: bytes | bytearray) -> tuple[int, int]:
    """(header bytes, blob bytes) of the message that follows. Raises PortError before memory is
    taken.
    """
    header_bytes, blob_bytes = PREFIX.unpack(prefix)
    if header_bytes > MAX_HEADER_BYTES or blob_bytes > MAX_BLOB_BYTES:
        raise PortError(f"message claims {header_bytes} + {blob_bytes} bytes")
    return header_bytes, blob_bytes


def decode(header: bytes) -> PortMessage:
    """The message in a JSON header. Raises PortError that names the field."""
    try:
        data = json.loads(header)
    except (ValueError, RecursionError) as exc:
        raise PortError(f"header is not JSON: {exc}") from exc
    if not isinstance(data, dict):
        raise PortError("header is not a JSON object")
    name = data.pop("type", None)
    cls = _TYPES.get(name) if isinstance(name, str) else None
    if cls is None:
        raise PortError(f"unknown message type {name!r}")
    hints = _HINTS[cls]
    for key, value in data.items():
        if _is_plain(value) and hints.get(key) is type(value):
            continue
        if key not in hints or key == "TYPE":
            raise PortError(f"{name}: unknown field {key!r}")
        _check(f"{name}.{key}", value, hints[key])
    try:
        return cls(**data)
    except TypeError as exc:
        raise PortError(f"{name}: {exc}") from exc


def _is_plain(value: object) -> bool:
    """Fine wherever its type is. Most values are: thousands of records come a second."""
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 63
    return type(value) is str and value.isascii()


def _check(where: str, value: object, hint: Any) -> None:
    origin = typing.get_origin(hint)
    if hint is Any:
        return
    if origin in (list, dict):
        if not isinstance(value, origin):
            raise PortError(f"{where} must be a {origin.__name__}")
        if origin is list:
            for item in typing.cast("list[object]", value):
                _check(where, item, typing.get_args(hint)[0])
        return
    if origin in (types.UnionType, typing.Union):  # pragma: no cover - no field uses it yet
        raise PortError(f"{where}: unions are not used on KvPort")
    allowed = (float, int) if hint is float else hint
    if not isinstance(value, allowed) or (hint is not bool and isinstance(value, bool)):
        raise PortError(f"{where} must be {hint.__name__}, not {type(value).__name__}")
    _check_value(where, value)


def _check_value(where: str, value: object) -> None:
    """What JSON can say and the rest of us cannot: no struct, socket or protobuf takes these."""
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise PortError(f"{where} does not fit 64 bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise PortError(f"{where} is not a finite number")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as exc:
            raise PortError(f"{where} is not valid Unicode") from exc
