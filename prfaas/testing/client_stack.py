"""An embedded engine with a tiny model, and a gateway before it, as processes for clients."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from prfaas.testing.tinymodel import make_tiny_model
from prfaas.up.stack import free_ports

MODEL = "tiny"
MAX_CONTEXT = 4096
READY_TIMEOUT_S = 90.0
TEMPLATE_WITH_TOOLS = """\
{% if tools %}<|im_start|>system
Call tools as <tool_call>{"name": ..., "arguments": ...}</tool_call>:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] or '' }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass(frozen=True, slots=True)
class ClientStack:
    """Where the two listen; `tokenizer` is the model's directory."""

    gateway: str
    engine: str
    tokenizer: Path

    @property
    def base_url(self) -> str:
        """What clients of OpenAI's API are given."""
        return f"{self.gateway}/v1"

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.gateway}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
        return text


@contextmanager
def client_stack(directory: Path) -> Iterator[ClientStack]:
    """Both processes, ready, until the context is left. Their output is in `directory`."""
    model = make_tiny_model(directory / MODEL, max_context=MAX_CONTEXT)
    (model / "chat_template.jinja").write_text(TEMPLATE_WITH_TOOLS)
    engine_port, gateway_port = free_ports(2)
    settings = {
        "engine": {
            "port": engine_port, "model": str(model), "threads": 1, "kv_memory_bytes": 16 << 20,
        },
        "gateway": {
            "port": gateway_port,
            "model": MODEL,
            "tokenizer": str(model),
            "engines": [{"name": "d-0", "url": f"http://127.0.0.1:{engine_port}"}],
        },
    }  # fmt: skip
    file = directory / "prfaas.yaml"
    file.write_text(yaml.safe_dump(settings))
    made = ClientStack(f"http://127.0.0.1:{gateway_port}", f"http://127.0.0.1:{engine_port}", model)
    with _process("engine", file, directory), _process("gateway", file, directory):
        for part, url in (("engine", made.engine), ("gateway", made.gateway)):
            _wait_ready(part, url, directory)
        yield made


@contextmanager
def _process(part: str, settings: Path, directory: Path) -> Iterator[None]:
    with (directory / f"{part}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "prfaas", part, "--config", str(settings)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        try:
            yield
        finally:
            process.kill()  # how they stop is tested elsewhere, and takes its time
            process.wait()


def _wait_ready(part: str, url: str, directory: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        with (
            contextlib.suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(f"{url}/ready", timeout=5),
        ):
            return
        time.sleep(0.05)
    raise TimeoutError(f"{part} is not ready:\n" + (directory / f"{part}.log").read_text()[-4000:])
