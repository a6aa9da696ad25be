from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FrameBytes(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LayerGroup(_message.Message):
    __slots__ = ("kind", "layers", "kv_heads", "head_dim", "dtype", "state_dim")
    KIND_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    STATE_DIM_FIELD_NUMBER: _ClassVar[int]
    kind: str
    layers: _containers.RepeatedScalarFieldContainer[int]
    kv_heads: int
    head_dim: int
    dtype: str
    state_dim: int
    def __init__(self, kind: _Optional[str] = ..., layers: _Optional[_Iterable[int]] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., state_dim: _Optional[int] = ...) -> None: ...

class Fingerprint(_message.Message):
    __slots__ = ("wire_major", "model_identity", "config_digest", "tokenizer_digest", "adapters", "groups")
    WIRE_MAJOR_FIELD_NUMBER: _ClassVar[int]
    MODEL_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    CONFIG_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    wire_major: int
    model_identity: str
    config_digest: str
    tokenizer_digest: str
    adapters: _containers.RepeatedScalarFieldContainer[str]
    groups: _containers.RepeatedCompositeFieldContainer[LayerGroup]
    def __init__(self, wire_major: _Optional[int] = ..., model_identity: _Optional[str] = ..., config_digest: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., adapters: _Optional[_Iterable[str]] = ..., groups: _Optional[_Iterable[_Union[LayerGroup, _Mapping]]] = ...) -> None: ...

class HandshakeRequest(_message.Message):
    __slots__ = ("client", "model", "wire_major", "wire_minor", "features", "fingerprint", "codecs", "link")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WIRE_MAJOR_FIELD_NUMBER: _ClassVar[int]
    WIRE_MINOR_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    client: str
    model: str
    wire_major: int
    wire_minor: int
    features: int
    fingerprint: Fingerprint
    codecs: _containers.RepeatedScalarFieldContainer[str]
    link: bytes
    def __init__(self, client: _Optional[str] = ..., model: _Optional[str] = ..., wire_major: _Optional[int] = ..., wire_minor: _Optional[int] = ..., features: _Optional[int] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., codecs: _Optional[_Iterable[str]] = ..., link: _Optional[bytes] = ...) -> None: ...

class HandshakeReply(_message.Message):
    __slots__ = ("server", "model", "wire_major", "wire_minor", "features", "fingerprint", "codecs", "chunk_tokens", "max_tokens", "instance", "engine_epoch", "paced", "link")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WIRE_MAJOR_FIELD_NUMBER: _ClassVar[int]
    WIRE_MINOR_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PACED_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    server: str
    model: str
    wire_major: int
    wire_minor: int
    features: int
    fingerprint: Fingerprint
    codecs: _containers.RepeatedScalarFieldContainer[str]
    chunk_tokens: int
    max_tokens: int
    instance: str
    engine_epoch: str
    paced: bool
    link: bytes
    def __init__(self, server: _Optional[str] = ..., model: _Optional[str] = ..., wire_major: _Optional[int] = ..., wire_minor: _Optional[int] = ..., features: _Optional[int] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., codecs: _Optional[_Iterable[str]] = ..., chunk_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., instance: _Optional[str] = ..., engine_epoch: _Optional[str] = ..., paced: bool = ..., link: _Optional[bytes] = ...) -> None: ...

class SessionOpen(_message.Message):
    __slots__ = ("transfer_id", "model", "tokens", "send_from", "salt", "use_cache", "quality", "codecs", "deadline_s", "lease_s", "hold_until_sealed", "engine_epoch", "tenant", "link", "credit_bytes", "on_demand", "traceparent")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEND_FROM_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    USE_CACHE_FIELD_NUMBER: _ClassVar[int]
    QUALITY_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    HOLD_UNTIL_SEALED_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ON_DEMAND_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    model: str
    tokens: bytes
    send_from: int
    salt: str
    use_cache: bool
    quality: str
    codecs: _containers.RepeatedScalarFieldContainer[str]
    deadline_s: float
    lease_s: float
    hold_until_sealed: bool
    engine_epoch: str
    tenant: str
    link: bytes
    credit_bytes: int
    on_demand: bool
    traceparent: str
    def __init__(self, transfer_id: _Optional[str] = ..., model: _Optional[str] = ..., tokens: _Optional[bytes] = ..., send_from: _Optional[int] = ..., salt: _Optional[str] = ..., use_cache: bool = ..., quality: _Optional[str] = ..., codecs: _Optional[_Iterable[str]] = ..., deadline_s: _Optional[float] = ..., lease_s: _Optional[float] = ..., hold_until_sealed: bool = ..., engine_epoch: _Optional[str] = ..., tenant: _Optional[str] = ..., link: _Optional[bytes] = ..., credit_bytes: _Optional[int] = ..., on_demand: bool = ..., traceparent: _Optional[str] = ...) -> None: ...

class SessionResume(_message.Message):
    __slots__ = ("link", "ack")
    LINK_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    link: bytes
    ack: SessionAck
    def __init__(self, link: _Optional[bytes] = ..., ack: _Optional[_Union[SessionAck, _Mapping]] = ...) -> None: ...

class LaneAttach(_message.Message):
    __slots__ = ("link", "lane")
    LINK_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    link: bytes
    lane: int
    def __init__(self, link: _Optional[bytes] = ..., lane: _Optional[int] = ...) -> None: ...

class SessionAccept(_message.Message):
    __slots__ = ("chunk_tokens", "queue_position", "retained_bytes", "lease_s")
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    RETAINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    chunk_tokens: int
    queue_position: int
    retained_bytes: int
    lease_s: float
    def __init__(self, chunk_tokens: _Optional[int] = ..., queue_position: _Optional[int] = ..., retained_bytes: _Optional[int] = ..., lease_s: _Optional[float] = ...) -> None: ...

class SessionSeal(_message.Message):
    __slots__ = ("frames", "raw_bytes", "wire_bytes", "root_digest", "cached_tokens", "computed_tokens", "queue_s", "compute_s", "wire_bytes_before_last_layer", "last_layer_s")
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROOT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_BEFORE_LAST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAST_LAYER_S_FIELD_NUMBER: _ClassVar[int]
    frames: int
    raw_bytes: int
    wire_bytes: int
    root_digest: bytes
    cached_tokens: int
    computed_tokens: int
    queue_s: float
    compute_s: float
    wire_bytes_before_last_layer: int
    last_layer_s: float
    def __init__(self, frames: _Optional[int] = ..., raw_bytes: _Optional[int] = ..., wire_bytes: _Optional[int] = ..., root_digest: _Optional[bytes] = ..., cached_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., wire_bytes_before_last_layer: _Optional[int] = ..., last_layer_s: _Optional[float] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("kind", "message", "field", "phase", "retry_after_s", "param", "frames")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    field: str
    phase: str
    retry_after_s: float
    param: str
    frames: int
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., phase: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., param: _Optional[str] = ..., frames: _Optional[int] = ...) -> None: ...

class SessionAck(_message.Message):
    __slots__ = ("next_sequence", "verified", "held", "missing", "credit_bytes", "lanes", "lanes_opened", "receive_bytes_per_s", "sealed", "wanted", "report")
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    LANES_OPENED_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    next_sequence: int
    verified: _containers.RepeatedScalarFieldContainer[int]
    held: _containers.RepeatedScalarFieldContainer[int]
    missing: _containers.RepeatedScalarFieldContainer[int]
    credit_bytes: int
    lanes: _containers.RepeatedScalarFieldContainer[int]
    lanes_opened: int
    receive_bytes_per_s: float
    sealed: bool
    wanted: _containers.RepeatedScalarFieldContainer[int]
    report: ReceiverReport
    def __init__(self, next_sequence: _Optional[int] = ..., verified: _Optional[_Iterable[int]] = ..., held: _Optional[_Iterable[int]] = ..., missing: _Optional[_Iterable[int]] = ..., credit_bytes: _Optional[int] = ..., lanes: _Optional[_Iterable[int]] = ..., lanes_opened: _Optional[int] = ..., receive_bytes_per_s: _Optional[float] = ..., sealed: bool = ..., wanted: _Optional[_Iterable[int]] = ..., report: _Optional[_Union[ReceiverReport, _Mapping]] = ...) -> None: ...

class ReceiverReport(_message.Message):
    __slots__ = ("busy_share", "held_bytes", "free_staging_bytes", "rtt_s", "queueing_s", "goodput_age_s")
    BUSY_SHARE_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    RTT_S_FIELD_NUMBER: _ClassVar[int]
    QUEUEING_S_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    busy_share: float
    held_bytes: int
    free_staging_bytes: int
    rtt_s: float
    queueing_s: float
    goodput_age_s: float
    def __init__(self, busy_share: _Optional[float] = ..., held_bytes: _Optional[int] = ..., free_staging_bytes: _Optional[int] = ..., rtt_s: _Optional[float] = ..., queueing_s: _Optional[float] = ..., goodput_age_s: _Optional[float] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sessions: _Optional[_Iterable[int]] = ...) -> None: ...

class CancelReply(_message.Message):
    __slots__ = ("cancelled",)
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    cancelled: int
    def __init__(self, cancelled: _Optional[int] = ...) -> None: ...

class PingRequest(_message.Message):
    __slots__ = ("probe_bytes",)
    PROBE_BYTES_FIELD_NUMBER: _ClassVar[int]
    probe_bytes: int
    def __init__(self, probe_bytes: _Optional[int] = ...) -> None: ...

class PingReply(_message.Message):
    __slots__ = ("padding", "last", "server_s", "engine_epoch")
    PADDING_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    SERVER_S_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    padding: bytes
    last: bool
    server_s: float
    engine_epoch: str
    def __init__(self, padding: _Optional[bytes] = ..., last: bool = ..., server_s: _Optional[float] = ..., engine_epoch: _Optional[str] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("gateway",)
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    gateway: str
    def __init__(self, gateway: _Optional[str] = ...) -> None: ...

class PrefillCurve(_message.Message):
    __slots__ = ("base_s", "token_s", "token_context_s", "chunk_tokens")
    BASE_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_CONTEXT_S_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    base_s: float
    token_s: float
    token_context_s: float
    chunk_tokens: int
    def __init__(self, base_s: _Optional[float] = ..., token_s: _Optional[float] = ..., token_context_s: _Optional[float] = ..., chunk_tokens: _Optional[int] = ...) -> None: ...

class EngineState(_message.Message):
    __slots__ = ("name", "ready", "draining", "queue_tokens", "waiting", "running", "context_tokens", "free_blocks", "total_blocks", "decode_step_s", "curve", "model", "block_tokens", "token_bytes", "epoch", "paced", "free_staging_bytes", "free_retention_bytes", "roles", "waiting_kv", "max_running")
    NAME_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_S_FIELD_NUMBER: _ClassVar[int]
    CURVE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PACED_FIELD_NUMBER: _ClassVar[int]
    FREE_STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_RETENTION_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    WAITING_KV_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    name: str
    ready: bool
    draining: bool
    queue_tokens: int
    waiting: int
    running: int
    context_tokens: int
    free_blocks: int
    total_blocks: int
    decode_step_s: float
    curve: PrefillCurve
    model: str
    block_tokens: int
    token_bytes: int
    epoch: str
    paced: bool
    free_staging_bytes: int
    free_retention_bytes: int
    roles: _containers.RepeatedScalarFieldContainer[str]
    waiting_kv: int
    max_running: int
    def __init__(self, name: _Optional[str] = ..., ready: bool = ..., draining: bool = ..., queue_tokens: _Optional[int] = ..., waiting: _Optional[int] = ..., running: _Optional[int] = ..., context_tokens: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., decode_step_s: _Optional[float] = ..., curve: _Optional[_Union[PrefillCurve, _Mapping]] = ..., model: _Optional[str] = ..., block_tokens: _Optional[int] = ..., token_bytes: _Optional[int] = ..., epoch: _Optional[str] = ..., paced: bool = ..., free_staging_bytes: _Optional[int] = ..., free_retention_bytes: _Optional[int] = ..., roles: _Optional[_Iterable[str]] = ..., waiting_kv: _Optional[int] = ..., max_running: _Optional[int] = ...) -> None: ...

class KvIndexDelta(_message.Message):
    __slots__ = ("engine", "epoch", "cleared", "stored", "removed")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    engine: str
    epoch: str
    cleared: bool
    stored: bytes
    removed: bytes
    def __init__(self, engine: _Optional[str] = ..., epoch: _Optional[str] = ..., cleared: bool = ..., stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ...) -> None: ...

class LinkSample(_message.Message):
    __slots__ = ("peer", "instance", "link_class", "ready", "detail", "goodput_bytes_per_s", "rtt_s", "in_flight_bytes", "wire_ratio", "age_s", "sessions", "goodput_age_s", "agent", "limit", "rate_bytes_per_s", "queueing_s", "stalled_s", "stalls", "retransmitted_bytes", "under_way_bytes", "held_bytes", "free_staging_bytes")
    PEER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    LINK_CLASS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    RTT_S_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    WIRE_RATIO_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    RATE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    QUEUEING_S_FIELD_NUMBER: _ClassVar[int]
    STALLED_S_FIELD_NUMBER: _ClassVar[int]
    STALLS_FIELD_NUMBER: _ClassVar[int]
    RETRANSMITTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNDER_WAY_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    peer: str
    instance: str
    link_class: str
    ready: bool
    detail: str
    goodput_bytes_per_s: float
    rtt_s: float
    in_flight_bytes: int
    wire_ratio: float
    age_s: float
    sessions: int
    goodput_age_s: float
    agent: str
    limit: str
    rate_bytes_per_s: float
    queueing_s: float
    stalled_s: float
    stalls: int
    retransmitted_bytes: int
    under_way_bytes: int
    held_bytes: int
    free_staging_bytes: int
    def __init__(self, peer: _Optional[str] = ..., instance: _Optional[str] = ..., link_class: _Optional[str] = ..., ready: bool = ..., detail: _Optional[str] = ..., goodput_bytes_per_s: _Optional[float] = ..., rtt_s: _Optional[float] = ..., in_flight_bytes: _Optional[int] = ..., wire_ratio: _Optional[float] = ..., age_s: _Optional[float] = ..., sessions: _Optional[int] = ..., goodput_age_s: _Optional[float] = ..., agent: _Optional[str] = ..., limit: _Optional[str] = ..., rate_bytes_per_s: _Optional[float] = ..., queueing_s: _Optional[float] = ..., stalled_s: _Optional[float] = ..., stalls: _Optional[int] = ..., retransmitted_bytes: _Optional[int] = ..., under_way_bytes: _Optional[int] = ..., held_bytes: _Optional[int] = ..., free_staging_bytes: _Optional[int] = ...) -> None: ...

class OutcomeEvent(_message.Message):
    __slots__ = ("transfer_id", "status", "reason", "peer", "instance", "have_tokens", "want_tokens", "received_tokens", "remote_cached_tokens", "raw_bytes", "wire_bytes", "hidden_wire_bytes", "phases", "tried", "quality", "codecs", "tried_reasons")
    class PhasesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class CodecsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    HAVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WANT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REMOTE_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    TRIED_FIELD_NUMBER: _ClassVar[int]
    QUALITY_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    TRIED_REASONS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    status: str
    reason: str
    peer: str
    instance: str
    have_tokens: int
    want_tokens: int
    received_tokens: int
    remote_cached_tokens: int
    raw_bytes: int
    wire_bytes: int
    hidden_wire_bytes: int
    phases: _containers.ScalarMap[str, float]
    tried: _containers.RepeatedScalarFieldContainer[str]
    quality: str
    codecs: _containers.ScalarMap[str, int]
    tried_reasons: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, transfer_id: _Optional[str] = ..., status: _Optional[str] = ..., reason: _Optional[str] = ..., peer: _Optional[str] = ..., instance: _Optional[str] = ..., have_tokens: _Optional[int] = ..., want_tokens: _Optional[int] = ..., received_tokens: _Optional[int] = ..., remote_cached_tokens: _Optional[int] = ..., raw_bytes: _Optional[int] = ..., wire_bytes: _Optional[int] = ..., hidden_wire_bytes: _Optional[int] = ..., phases: _Optional[_Mapping[str, float]] = ..., tried: _Optional[_Iterable[str]] = ..., quality: _Optional[str] = ..., codecs: _Optional[_Mapping[str, int]] = ..., tried_reasons: _Optional[_Iterable[str]] = ...) -> None: ...

class WatchEvent(_message.Message):
    __slots__ = ("seq", "full", "agent", "engines", "kv", "links", "outcomes", "started")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    seq: int
    full: bool
    agent: str
    engines: _containers.RepeatedCompositeFieldContainer[EngineState]
    kv: _containers.RepeatedCompositeFieldContainer[KvIndexDelta]
    links: _containers.RepeatedCompositeFieldContainer[LinkSample]
    outcomes: _containers.RepeatedCompositeFieldContainer[OutcomeEvent]
    started: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, seq: _Optional[int] = ..., full: bool = ..., agent: _Optional[str] = ..., engines: _Optional[_Iterable[_Union[EngineState, _Mapping]]] = ..., kv: _Optional[_Iterable[_Union[KvIndexDelta, _Mapping]]] = ..., links: _Optional[_Iterable[_Union[LinkSample, _Mapping]]] = ..., outcomes: _Optional[_Iterable[_Union[OutcomeEvent, _Mapping]]] = ..., started: _Optional[_Iterable[str]] = ...) -> None: ...
