"""Public load tools run unchanged against the gateway, and measure what it served.

`make test-clients` builds their environment; the tools are processes from there and speak HTTP.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from prfaas.testing.client_stack import MODEL, ClientStack

ROOT = Path(__file__).parents[2]
BIN = Path(os.environ.get("PRFAAS_CLIENTS_VENV", ROOT / ".venv-clients")) / "bin"
REQUESTS, ANSWER_TOKENS, STREAMS = 12, 8, 3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(320),
    pytest.mark.skipif(
        not (BIN.parent / ".installed-pins").is_file(),
        reason="no load tools here: scripts/clients_env.sh installs them",
    ),
]


def run(tool: str, *arguments: str, cwd: Path) -> str:
    """The tool as a user runs it, to its end."""
    # Told to be offline, aiperf takes no tokenizer from a directory.
    ours = {
        k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    }
    done = subprocess.run(
        [BIN / tool, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=280,
        env=ours | {"COLUMNS": "200", "HF_HUB_DISABLE_TELEMETRY": "1", "HOME": str(cwd)},
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    return done.stdout


def answered(stack: ClientStack) -> Counter[str]:
    """Requests that the gateway has ended, by their status."""
    found: Counter[str] = Counter()
    for line in stack.metrics().splitlines():
        if line.startswith("prfaas_gateway_requests_total{"):
            status = re.search(r'status="(\d+)"', line)
            assert status is not None
            found[status[1]] += int(float(line.rpartition(" ")[2]))
    return found


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_aiperf(stack: ClientStack, tmp_path: Path, endpoint: str) -> None:
    before = answered(stack)
    run(
        "aiperf", "profile",
        "--model", MODEL,
        "--url", stack.gateway,
        "--endpoint-type", endpoint,
        "--streaming",
        "--tokenizer", str(stack.tokenizer),
        "--concurrency", str(STREAMS),
        "--request-count", str(REQUESTS),
        "--synthetic-input-tokens-mean", "64",
        "--output-tokens-mean", str(ANSWER_TOKENS),
        "--use-server-token-count",
        "--random-seed", "1",
        "--ui-type", "none",
        "--output-artifact-dir", str(tmp_path / "out"),
        cwd=tmp_path,
    )  # fmt: skip
    (file,) = (tmp_path / "out").rglob("profile_export_aiperf.json")
    found: dict[str, Any] = json.loads(file.read_text())
    assert found["request_count"]["avg"] == REQUESTS
    assert not (found.get("error_request_count") or {}).get("avg")
    assert found["output_sequence_length"]["avg"] == ANSWER_TOKENS
    assert 0 < found["time_to_first_token"]["avg"] <= found["request_latency"]["avg"]
    assert answered(stack) - before == {"200": REQUESTS}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(stack: ClientStack, tmp_path: Path, path: str) -> None:
    before = answered(stack)
    out = tmp_path / "report.json"
    run(
        "guidellm", "run",
        "--backend", f"kind=openai_http,target={stack.gateway},model={MODEL},request_format={path}",
        "--profile", f"kind=concurrent,streams={STREAMS}",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=hf_auto,model={stack.tokenizer}",
        "--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={ANSWER_TOKENS}",
        "--output", f"kind=json,path={out}",
        "--disable-console-interactive",
        cwd=tmp_path,
    )  # fmt: skip
    (benchmark,) = json.loads(out.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert not requests["errored"], requests["errored"][0]["info"]["error"]
    assert len(requests["successful"]) == REQUESTS
    assert {each["output_metrics"]["text_tokens"] for each in requests["successful"]} == {
        ANSWER_TOKENS
    }
    statuses = answered(stack) - before
    assert statuses.total() == REQUESTS
    # Each of its streams hangs up at the last [DONE], before the end of the answer's HTTP.
    assert set(statuses) <= {"200", "499"}
    assert statuses["499"] <= STREAMS


def test_the_tools_have_brought_nothing_into_our_environment() -> None:
    """Theirs are for them alone: ours has none of their packages, and the torch of its pins."""
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"torch=={version('torch').partition('+')[0]}" in pins
    for tool in ("aiperf", "guidellm"):
        with pytest.raises(PackageNotFoundError):
            version(tool)
