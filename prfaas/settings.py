"""All settings: one YAML file and environment (`PRFAAS_GATEWAY__PORT=9000`), strict and frozen.

Each default is stated once, here. Unknown keys, wrong types and bad values are errors that name
the key.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import (
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from prfaas.discovery_settings import AgentDiscoverySettings, PassedApiName
from prfaas.discovery_settings import DiscoverySettings as DiscoverySettings
from prfaas.errors import ConfigError
from prfaas.limits import Limits
from prfaas.logs import LogFormat
from prfaas.policy_settings import PolicySettings as PolicySettings
from prfaas.queue_settings import QueueSettings
from prfaas.section import Name, Section
from prfaas.tracing_settings import TracingSettings
from prfaas.yaml_text import parse_yaml

CodecName = Literal[
    "tight-basis", "compact-basis", "near-basis", "near-channels", "int8", "exponent",
    "planes-zstd", "raw",
]  # fmt: skip
CODECS: tuple[CodecName, ...] = (
    "tight-basis", "compact-basis", "near-basis", "near-channels", "int8", "exponent",
    "planes-zstd", "raw",
)  # fmt: skip
QualityName = Literal["exact", "near", "compact", "tight"]


class TlsSettings(Section):
    """Mutual TLS of one process: files that are read again when they change.

    Serving and dialling use the same pair, so one process has one identity.
    """

    cert: Path = Field(description="PEM file: this process's certificate, then intermediates.")
    key: Path = Field(description="PEM file: the private key of `cert`, not encrypted.")
    ca: Path = Field(description="PEM file: the CAs that sign the other side's certificates.")
    peers: tuple[str, ...] = Field(
        (),
        description="DNS or URI names, one of which a client's certificate must carry; "
        "empty: any certificate of the CA.",
    )

    @field_validator("peers")
    @classmethod
    def _names_that_tell_peers_apart(cls, peers: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(_identity, peers))


class AuthorisedClient(Section):
    """A client that may open sessions at P, and for what; `*` stands for all."""

    identity: str = Field(description="DNS or URI name in its certificate.")
    models: tuple[str, ...] = Field(
        ("*",), min_length=1, description="Models it may have prefilled."
    )
    tenants: tuple[str, ...] = Field(
        ("*",),
        min_length=1,
        description="Tenants it may act for; the empty name: none in particular.",
    )
    max_sessions: int | None = Field(
        None, gt=0, description="Sessions it may have open; none: limits.agent_max_sessions."
    )

    @field_validator("identity")
    @classmethod
    def _a_name_that_tells_it_apart(cls, identity: str) -> str:
        return _identity(identity)


class VllmSettings(Section):
    """How an agent reaches the vLLM beside it, apart from KvPort."""

    url: str = Field("http://127.0.0.1:8000", description="Base URL of its OpenAI server.")
    api_key: SecretStr = Field(SecretStr(""), description="Its API key, where it asks for one.")
    kv_events: str = Field(
        "tcp://127.0.0.1:5557",
        description="ZMQ endpoint of its KV events (`--kv-events-config`); empty: none, and its "
        "prefix cache is unknown.",
    )
    kv_events_replay: str = Field(
        "", description="ZMQ endpoint that replays events; empty: none, a gap voids the index."
    )
    poll_s: float = Field(0.5, gt=0, le=1, description="Time between two readings of /metrics.")


class EngineEndpoint(Section):
    """A decode engine the gateway relays to, and its agent."""

    name: Name = Field(description="Unique engine name.")
    url: str = Field(description="Base URL of its OpenAI server, `http://host:port`.")
    agent: str | None = Field(
        None, description="Watch address `host:port` of its agent; none: never offloads."
    )
    tls_name: str | None = Field(
        None, description="Name its certificate must carry; none: the host of `agent`."
    )
    api_key: SecretStr | None = Field(
        None,
        description="Sent to it as `Authorization: Bearer ...`; none: it gets what the client "
        "sent, or nothing where that is a tenant's key.",
    )
    apis: tuple[PassedApiName, ...] | None = Field(
        None, description="What it has beyond chat and completions; none: the engine is asked."
    )
    max_running: int | None = Field(
        None,
        ge=1,
        description="Sequences that it decodes at once (vLLM: `--max-num-seqs`), where no agent "
        "says it; none: 256.",
    )


class PeerEndpoint(Section):
    """A prefill instance the gateway may choose; names match the agent's own configuration."""

    peer: Name = Field(description="Peer (prefill cluster) name.")
    instance: Name = Field(description="Instance name within the peer.")
    watch: str = Field(description="Watch address `host:port` of the instance's agent.")
    tls_name: str | None = Field(
        None, description="Name its certificate must carry; none: the host of `watch`."
    )
    link_class: Literal["lan", "wan"] = Field("wan", description="Class of the link to it.")


class TenancySettings(Section):
    """Who may call a gateway (docs/tenants.md)."""

    file: Path | None = Field(
        None,
        description="File of tenants (`prfaas tenants`), read again when it changes; none: no key "
        "is asked for and all are served alike.",
    )
    audit_log: Path | None = Field(
        None, description="File that gets a line for each request, without anything of its prompt."
    )
    active_requests: int = Field(
        0,
        ge=0,
        description="Requests sent to engines at once; others wait for their turn, by priority and "
        "weight of their tenants; 0: nobody waits.",
    )


class StateSettings(Section):
    """What several gateways share (docs/state.md)."""

    redis: SecretStr | None = Field(
        None,
        description="URL of Redis, `redis://USER:PASSWORD@HOST:PORT/DB`, `rediss://` with TLS, "
        "`unix://`, or `redis+sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/NAME/DB` (`rediss+...`) "
        "for the primary that Sentinels name; none: this gateway is alone.",
    )
    redis_sentinel_password: SecretStr = Field(
        SecretStr(""), description="Password of the Sentinels, if they ask for one."
    )
    redis_ca: Path | None = Field(
        None, description="PEM file of the CAs of its certificate; none: the system's."
    )
    redis_cert: Path | None = Field(None, description="PEM file: our certificate, if it asks.")
    redis_key: Path | None = Field(None, description="PEM file: the private key of that.")
    prefix: str = Field(
        "prfaas",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="Gateways with one prefix share; its keys are `{PREFIX}:...`.",
    )
    interval_s: float = Field(
        0.1, ge=0.01, le=10, description="Between two exchanges with the others."
    )
    sent_interval_s: float = Field(
        0.02,
        ge=0,
        le=10,
        description="What was just sent to engines and peers is told to the others at once, and "
        "not again for so long; 0: with the exchanges only.",
    )
    timeout_s: float = Field(0.5, gt=0, description="An exchange that takes longer has failed.")
    member_ttl_s: float = Field(
        3.0, gt=0, description="A gateway that is not heard of for so long is gone."
    )
    expected_gateways: int = Field(
        2, ge=1, description="So many share each budget, for a gateway that hears of none."
    )
    share_policy: bool = Field(
        False,
        description="A policy file that changes at one gateway while it runs is taken over by all.",
    )
    share_prefixes: bool = Field(
        True,
        description="Tell each other which prefixes of prompts were sent to which engine; needs "
        "the same `gateway.cache_secret` at all.",
    )


class GatewaySettings(Section):
    """`prfaas gateway`."""

    host: str = Field("127.0.0.1", description="Listen address.")
    port: int = Field(8000, ge=0, le=65535, description="Listen port; 0 picks one.")
    workers: int = Field(
        1,
        ge=1,
        le=64,
        description="Processes that serve on this port together; from 2 on, another one keeps "
        "their state (docs/operations.md).",
    )
    worker_dir: Path | None = Field(
        None,
        description="Directory in which they make a private one for their sockets; none: the "
        "system's for temporary files.",
    )
    model: str = Field("default", description="Model name served to clients.")
    tokenizer: Path | None = Field(
        None,
        description="Model directory or GGUF whose tokenizer and chat template estimate prompts.",
    )
    engines: tuple[EngineEndpoint, ...] = Field((), description="Decode engines.")
    peers: tuple[PeerEndpoint, ...] = Field((), description="Prefill instances.")
    discovery: DiscoverySettings = Field(
        DiscoverySettings(), description="Engines and peers that are found while it runs."
    )
    policy: PolicySettings = Field(PolicySettings(), description="Routing policy.")
    queue: QueueSettings = Field(
        QueueSettings(), description="Order of requests that wait in the gateway for an engine."
    )
    canary: PolicySettings | None = Field(
        None, description="Another policy that decides for `canary_share` of the requests."
    )
    canary_share: float = Field(
        0.05, ge=0, le=1, description="Share of requests that the canary decides for."
    )
    shadow: PolicySettings | None = Field(
        None, description="A policy that is asked too and not followed: what it would have saved."
    )
    offload: bool = Field(
        True, description="False: everything stays local, counted as `offload_off`."
    )
    on_failure: Literal["local", "reject"] = Field(
        "local",
        description="What D does when every planned instance failed (within the budget).",
    )
    transfer_key: SecretStr = Field(
        SecretStr(""), description="Key shared with the agents that signs `kv_transfer_params`."
    )
    cache_secret: SecretStr = Field(
        SecretStr(""), description="Key of the HMAC that makes cache salts."
    )
    state: StateSettings = Field(StateSettings(), description="What several gateways share.")
    tenants: TenancySettings = Field(TenancySettings(), description="Tenants and their keys.")
    trust_client_transfer_params: bool = Field(
        False, description="Relay `kv_transfer_params` sent by clients instead of stripping them."
    )
    kv_quality: QualityName = Field(
        "exact",
        description="Class of the KV that requests get from peers where they name none "
        "(`x-prfaas-kv-quality`).",
    )
    kv_quality_limit: QualityName = Field(
        "compact", description="The worst class that a request may name; `tight` is opt-in."
    )
    short_body_bytes: int = Field(
        1024, ge=0, description="Bodies up to this size stay local without being tokenised."
    )
    native_events: bool = Field(
        True,
        description="Relay the events of a stream in C where the gateway was built with a "
        "compiler; false: in Python, byte for byte the same.",
    )
    tokenize_check_every: int = Field(
        500,
        ge=0,
        description="Compare with the engine's /tokenize every so many requests; 0: start only.",
    )
    transfer_ttl_s: float = Field(30.0, gt=0, description="Life of signed transfer parameters.")
    tls: TlsSettings | None = Field(None, description="Mutual TLS of Watch; none: loopback only.")

    @model_validator(mode="after")
    def _the_default_is_allowed(self) -> Self:
        order = get_args(QualityName)
        if order.index(self.kv_quality) > order.index(self.kv_quality_limit):
            raise ValueError(f"kv_quality {self.kv_quality} is worse than kv_quality_limit")
        return self


class EngineSettings(Section):
    """`prfaas engine`: the embedded torch engine."""

    host: str = Field("127.0.0.1", description="Listen address.")
    port: int = Field(8001, ge=0, le=65535, description="Listen port; 0 picks one.")
    model: Path | None = Field(None, description="Hugging Face directory or GGUF file.")
    served_model_name: str = Field(
        "", description="Name in the API; default: the directory's name."
    )
    model_identity: str = Field(
        "", description="Identity for the fingerprint; default: computed digest."
    )
    device: str = Field("cpu", description="torch device.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Compute dtype."
    )
    kv_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="KV pool dtype."
    )
    threads: int = Field(0, ge=0, description="torch threads; 0: torch's default.")
    block_tokens: int = Field(16, ge=1, le=1024, description="Tokens of one KV block.")
    kv_blocks: int = Field(0, ge=0, description="Blocks in the pool; 0: from kv_memory_bytes.")
    kv_memory_bytes: int = Field(512 << 20, gt=0, description="Size of the KV pool.")
    state_memory_bytes: int = Field(
        64 << 20,
        gt=0,
        description="Size of the state pool of a model with recurrent layers: one state for each "
        "running sequence, the rest for cached prefixes.",
    )
    chunk_tokens: int = Field(
        256, ge=1, description="Prefill chunk; chunks lie on an absolute grid."
    )
    max_batch: int = Field(32, ge=1, description="Sequences in one decode step.")
    max_context: int = Field(0, ge=0, description="Longest context; 0: the model's.")
    prefix_cache: bool = Field(True, description="Keep KV of finished requests for reuse.")
    import_bytes_per_step: int = Field(
        16 << 20, gt=0, description="KV copied from staging between two decode steps."
    )
    port_socket: Path | None = Field(
        None, description="KvPort unix socket of its agent; none: no offload."
    )
    roles: tuple[Literal["prefill", "decode"], ...] = Field(
        ("prefill", "decode"), description="What the engine offers on KvPort."
    )
    codec_calibration: Path | None = Field(
        None,
        description="File that its agent has too, for KV that an accelerator prepares; not used "
        "where KV lies in host memory.",
    )
    paced: Path | None = Field(None, description="Profile whose step times replace computing.")
    idle_measure_s: float = Field(
        30.0,
        ge=0,
        description="Idle time after which one chunk and decode step are timed anew; 0: never.",
    )
    debug_endpoints: bool = Field(False, description="Serve /debug/integrity and cache reset.")


class InstanceAddress(Section):
    """Where an agent dials one prefill instance."""

    name: Name = Field(description="Instance name.")
    address: str = Field(description="`host:port` of its prefill service.")
    tls_name: str | None = Field(
        None, description="Name its certificate must carry; none: the host of `address`."
    )


class AgentPeer(Section):
    """A peer as an agent knows it."""

    name: Name = Field(description="Peer name.")
    link_class: Literal["lan", "wan"] = Field("wan", description="Class of the link.")
    channels: int = Field(4, ge=1, le=64, description="Warm data channels to each instance.")
    instances: tuple[InstanceAddress, ...] = Field((), description="Prefill instances.")


class EngineAgentSettings(Section):
    """What an agent has at either side: its engine, its metrics and its codecs."""

    engine: Literal["embedded", "vllm"] = Field(
        "embedded", description="Engine beside it; `vllm` is also asked over HTTP and ZMQ."
    )
    vllm: VllmSettings = Field(VllmSettings(), description="Where `engine` is `vllm`.")
    ring_bytes: int = Field(64 << 20, gt=0, description="Shared memory for KV leaving the engine.")
    codecs: tuple[CodecName, ...] = Field(
        CODECS,
        min_length=1,
        description="Codecs this agent speaks, as far as it was built with them.",
    )
    codec_calibration: Path | None = Field(
        None,
        description="File from `prfaas calibrate-kv`, the same at D and P; none: exact codecs "
        "alone.",
    )
    metrics_host: str = Field(
        "127.0.0.1", description="Prometheus listen address; plain HTTP that asks for nothing."
    )
    metrics_port: int = Field(0, ge=0, le=65535, description="Prometheus port; 0: none.")


class AgentSettings(EngineAgentSettings):
    """`prfaas agent`: the agent beside a decode engine."""

    name: str = Field("agent", description="Name of this agent.")
    socket: Path = Field(Path("/tmp/prfaas-agent.sock"), description="KvPort unix socket.")
    host: str = Field("127.0.0.1", description="Watch listen address; loopback only without TLS.")
    port: int = Field(8101, ge=0, le=65535, description="Watch listen port; 0 picks one.")
    tls: TlsSettings | None = Field(
        None, description="Mutual TLS of Watch and of the channels to P; none: loopback only."
    )
    staging_bytes: int = Field(
        512 << 20, gt=0, description="Shared memory for KV arriving for the engine."
    )
    transfer_keys: tuple[SecretStr, ...] = Field(
        (),
        max_length=2,
        description="Keys that may have signed `kv_transfer_params`; two while rotating.",
    )
    peers: tuple[AgentPeer, ...] = Field((), description="Peers this agent may dial.")
    discovery: AgentDiscoverySettings = Field(
        AgentDiscoverySettings(), description="Peers that are found while it runs."
    )
    probe_tolerance: float = Field(
        1e-3,
        gt=0,
        description="Largest normalised mean squared error of any tensor in the numeric probe.",
    )
    probe_bytes: int = Field(
        1 << 20, ge=0, description="Burst that measures an idle link; 0: none."
    )
    probe_interval_s: float = Field(
        10.0, gt=0, description="Idle time after which the link is probed."
    )
    codec_threads: int = Field(1, ge=1, description="Threads that decode.")
    window_bytes: int = Field(
        64 << 20,
        ge=1 << 20,
        description="KV under way to this agent, or received and not decoded; sessions share it.",
    )
    verify_import: bool = Field(False, description="Read every import back and compare digests.")
    slower_by: float = Field(
        2.0,
        ge=0,
        description="A transfer that needs so many times as long for what is left as D would to "
        "compute it is given up, where D may; 0: never.",
    )
    hold_until_sealed: bool = Field(
        False, description="Baseline for benchmarks: no layer pipelining."
    )


class PrefillSettings(EngineAgentSettings):
    """`prfaas prefill`: the agent beside a prefill engine, and its gRPC service."""

    peer: str = Field("peer", description="Peer name.")
    instance: str = Field("prefill-0", description="Instance name.")
    socket: Path = Field(Path("/tmp/prfaas-prefill.sock"), description="KvPort unix socket.")
    host: str = Field("127.0.0.1", description="Listen address; loopback only without TLS.")
    port: int = Field(8201, ge=0, le=65535, description="Listen port; 0 picks one.")
    tls: TlsSettings | None = Field(
        None, description="Mutual TLS of the service; none: loopback only."
    )
    retention_bytes: int = Field(
        1 << 30, gt=0, description="Encoded KV kept until it is acknowledged."
    )
    codec_threads: int = Field(1, ge=1, description="Threads that encode.")
    congestion: str = Field(
        "bbr",
        description="TCP congestion control of connections to this agent, where the kernel has it; "
        "empty: the system's.",
    )
    zstd_level: int = Field(1, ge=1, le=19, description="Level of the lossless codec.")
    authorised: tuple[AuthorisedClient, ...] = Field(
        (), description="Clients that may open sessions; needed with TLS, where nobody else may."
    )


class Settings(BaseSettings):
    """The whole configuration file."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix="PRFAAS_", env_nested_delimiter="__"
    )

    config_version: Literal[1] = Field(1, description="Version of this file's format.")
    limits: Limits = Field(Limits(), description="Every wait and queue.")
    gateway: GatewaySettings = Field(GatewaySettings(), description="`prfaas gateway`.")
    engine: EngineSettings = Field(EngineSettings(), description="`prfaas engine`.")
    agent: AgentSettings = Field(AgentSettings(), description="`prfaas agent`.")
    prefill: PrefillSettings = Field(PrefillSettings(), description="`prfaas prefill`.")
    tracing: TracingSettings = Field(TracingSettings(), description="OpenTelemetry traces.")
    log_format: LogFormat = Field(
        "text", description="Lines on stderr, for people or as JSON objects."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Environment wins over the file."""
        return env_settings, init_settings


def load_settings(path: Path | None = None, overrides: dict[str, Any] | None = None) -> Settings:
    """Settings from a YAML file, the environment and overrides (strongest last is the environment).

    Raises ConfigError naming the key, or the file's line where it is not YAML.
    """
    data: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = parse_yaml(path.read_bytes(), path)
        except OSError as exc:
            raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc
        if loaded is not None and not isinstance(loaded, dict):
            raise ConfigError(f"{path}: the top level must be a mapping")
        data = loaded or {}
    merged = _merge(data, overrides or {})
    try:
        return Settings(**merged)
    except ValidationError as exc:
        raise ConfigError(validation_message(exc)) from exc


def validation_message(exc: ValidationError, prefix: str = "") -> str:
    """Each problem with the key it is about (below `prefix`), on one line."""
    start = (prefix,) if prefix else ()
    return "; ".join(
        f"{'.'.join(str(part) for part in (*start, *error['loc']))}: {error['msg']}"
        for error in exc.errors()
    )


def _identity(name: str) -> str:
    if not name or name.lower() == "localhost" or "*" in name or _is_address(name):
        raise ValueError(f"{name!r} identifies nobody; give a DNS or URI name")
    return name if ":" in name else name.lower()


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value)
        else:
            merged[key] = value
    return merged
