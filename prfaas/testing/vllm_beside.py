"""What a vLLM and the agent beside it are told of each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

Side = Literal["d", "p"]


def vllm_options(directory: Path, side: Side, **connector: Any) -> tuple[str, ...]:
    """Options of vLLM: our connector to the agent of its side, and its KV events.

    `connector`: of `kv_connector_extra_config`, besides the socket.
    """
    transfer = {
        "kv_connector": "PrfaasConnector",
        "kv_connector_module_path": "prfaas_connect.vllm.connector",
        "kv_role": "kv_producer" if side == "p" else "kv_consumer",
        **({"kv_load_failure_policy": "fail"} if side == "d" else {}),
        "kv_connector_extra_config": {"socket": str(directory / f"{side}.sock"), **connector},
    }
    endpoint, replay = _events(directory, side)
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint,
        "replay_endpoint": replay,
    }
    return (
        *("--kv-transfer-config", json.dumps(transfer)),
        *("--kv-events-config", json.dumps(events)),
    )


def agent_settings(url: str, directory: Path, side: Side) -> dict[str, Any]:
    """Settings of the agent, `agent` or `prefill`, beside the vLLM at `url`."""
    endpoint, replay = _events(directory, side)
    vllm = {"url": url, "kv_events": endpoint, "kv_events_replay": replay}
    return {"engine": "vllm", "vllm": vllm}


def _events(directory: Path, side: Side) -> tuple[str, str]:
    return f"ipc://{directory}/{side}-events", f"ipc://{directory}/{side}-replay"
