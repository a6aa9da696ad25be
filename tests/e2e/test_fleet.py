"""`prfaas up --fleet`: several engines and instances serve, also while one of them is killed."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml

from prfaas.testing.small_fleet import MODEL, small_fleet

REQUESTS, WORKERS = 60, 8


def write_fleet(directory: Path) -> Path:
    file = directory / "fleet.yaml"
    faults = [
        {"at_s": 2.0, "do": "kill", "what": "d-0-engine"},
        {"at_s": 2.5, "do": "link", "what": "fra", "drop": True},
    ]
    file.write_text(yaml.safe_dump(small_fleet(faults=faults)))
    return file


def ask(url: str, at: int) -> tuple[str, str]:
    """The last event, and the id by which the gateway remembers the request."""
    prompt = f"{at} " * 400
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.status == 200
        return reply.read().decode().split("\n\n")[-2], reply.headers["x-request-id"]


def test_a_fleet_serves_while_an_engine_dies_and_its_line_is_cut(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tmp_path = tmp_path_factory.mktemp("f")  # addresses of unix sockets are short
    process = subprocess.Popen(
        [sys.executable, "-m", "prfaas", "up", "--fleet", str(write_fleet(tmp_path))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    try:
        said = []
        url = ""
        for line in process.stdout:
            said.append(line)
            if found := re.search(r"ready: model small at (\S+);", line):
                url = found[1]
            if line.startswith("running: "):
                break
        assert url, "".join(said)
        with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
            answers = list(pool.map(lambda at: ask(url, at), range(REQUESTS)))
        records = []
        for last, request_id in answers:
            with urllib.request.urlopen(f"{url}/prfaas/requests/{request_id}") as reply:
                records.append(json.load(reply))
            if last != "data: [DONE]":  # it had begun where it was killed, and says so
                assert '"type":"engine_unavailable"' in last
                assert records[-1]["engine"] == "d-0"
        assert sum(last != "data: [DONE]" for last, _ in answers) <= WORKERS
        assert {name for record in records for name in record["tried"]} == {"d-0", "d-1"}
        assert {record["target"] for record in records} >= {"remote"}
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        assert process.wait(30) == 0, rest
        assert "kill d-0-engine" in rest
        assert "link fra connections reset" in rest
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert not list(tmp_path.glob("prfaas-fleet-*")), "nothing is left"
