"""Every wait and every queue of prfaas on one page. README has the table; a test holds the two
together.
"""

from __future__ import annotations

from pydantic import Field

from prfaas.section import Section


class Limits(Section):
    """Bounds of one process. Times in seconds, sizes in bytes."""

    max_body_bytes: int = Field(8 << 20, gt=0, description="Largest HTTP request body.")
    max_answer_bytes: int = Field(
        64 << 20, gt=0, description="Largest answer of an engine that is not streamed."
    )
    max_event_bytes: int = Field(
        1 << 20, gt=0, description="Largest event of a streamed answer, and held before the commit."
    )
    engine_head_bytes: int = Field(
        64 << 10, gt=0, description="Headers of an engine's answer; trailers and the like as well."
    )
    engine_idle_connections: int = Field(
        256, ge=0, description="Connections a gateway keeps open to an engine for the next request."
    )
    engine_idle_s: float = Field(
        4.0,
        gt=0,
        description="Those are closed after so long: before servers do it, uvicorn's is 5 s.",
    )
    engine_attempts: int = Field(
        2,
        gt=0,
        description="Engines that a request is sent to, one after another, while nothing of an "
        "answer has come.",
    )
    engine_send_timeout_s: float = Field(
        15.0, gt=0, description="An engine that takes nothing of a request for so long is cut."
    )
    engine_silence_timeout_s: float = Field(
        120.0, gt=0, description="Longest silence of an engine within its answer."
    )
    sse_keepalive_s: float = Field(
        15.0,
        gt=0,
        description="A client of a stream hears a comment after so long without an event; the "
        "first one commits.",
    )
    max_prompt_tokens: int = Field(131072, gt=0, description="Longest prompt any process accepts.")
    request_timeout_s: float = Field(
        600.0, gt=0, description="One request from first byte to last."
    )
    gateway_max_in_flight: int = Field(
        1024, gt=0, description="Requests a gateway holds at once; more get 503."
    )
    engine_active_requests: int | None = Field(
        None,
        ge=0,
        description="Requests that a gateway lets one engine have; more wait in the gateway, or "
        "get 503. None: as many as the engine says that it can do; 0: as many as come.",
    )
    engine_queue_s: float = Field(
        5.0,
        gt=0,
        description="An engine gets no more while a prompt would wait longer for those ahead of "
        "it, there and at every peer.",
    )
    gateway_waiting: int = Field(
        256, gt=0, description="Requests waiting in a gateway for an engine; more get 503 at once."
    )
    gateway_wait_s: float = Field(
        30.0, gt=0, description="A request that has waited so long for an engine gets 503."
    )
    tenant_waiting: int = Field(
        64, gt=0, description="Requests of one tenant waiting for their turn; more get 429."
    )
    tenant_wait_s: float = Field(
        10.0, gt=0, description="A request that has waited so long for its turn gets 503."
    )
    engine_max_waiting: int = Field(
        256, gt=0, description="Requests waiting in an engine; more get 503."
    )
    engine_event_queue: int = Field(1024, gt=0, description="Tokens buffered for one slow client.")
    slow_client_timeout_s: float = Field(
        30.0, gt=0, description="A client that reads nothing for so long is dropped."
    )
    connect_timeout_s: float = Field(3.0, gt=0, description="Phase `connect` of a remote prefill.")
    first_frame_timeout_s: float = Field(
        60.0, gt=0, description="Phase `first_frame`: accept to first KV."
    )
    progress_timeout_s: float = Field(15.0, gt=0, description="Longest silence within a transfer.")
    transfer_timeout_s: float = Field(300.0, gt=0, description="One remote prefill in all.")
    control_timeout_s: float = Field(5.0, gt=0, description="One control RPC.")
    staging_timeout_s: float = Field(
        5.0, gt=0, description="A fetch that finds no staging at D within this goes local."
    )
    lease_s: float = Field(
        30.0, gt=0, description="P drops a session whose D is silent for so long."
    )
    agent_max_sessions: int = Field(
        256, gt=0, description="Sessions an agent holds at once; more are refused."
    )
    prefill_queue_sessions: int = Field(
        64, gt=0, description="Sessions waiting for retention at P; more are refused."
    )
    port_send_queue: int = Field(
        4096, gt=0, description="Messages queued on one side of KvPort before it is cut."
    )
    watch_interval_s: float = Field(
        0.25, gt=0, le=0.5, description="Longest time between two Watch events."
    )
    watch_stale_s: float = Field(
        2.0, gt=0, description="Telemetry older than this counts as unknown."
    )
    outcome_history: int = Field(
        1000, gt=0, description="Finished requests a gateway remembers for inspection."
    )
    drain_timeout_s: float = Field(
        30.0, gt=0, description="From SIGTERM to cancelling what still runs."
    )
    fallback_budget_tokens: int = Field(
        16384,
        ge=0,
        description="Uncached tokens of unfinished offloads that may still fall back to D.",
    )
