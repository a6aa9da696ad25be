"""The parts of the vLLM benchmark that need no vLLM: copies, CPU time, what it accepts."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import shared_storage, vllm_pair
from bench.__main__ import names
from bench.cpu_time import descendants_cpu_s, process_cpu_s
from bench.harness import Samples
from bench.ttft import PHI_POINT
from bench.vllm_pair import POINTS, QUICK_POINTS, over, require_loaded
from bench.vllm_site import D_BATCH_TOKENS, P_BATCH_TOKENS, vllm_process
from prfaas.errors import PrfaasError, ProtocolError
from prfaas.testing.link import LinkShape
from prfaas.testing.link_process import LinkProcess
from prfaas.up.client import StreamedAnswer

BURN = """
import os, sys, time
child = os.fork()
if not child:
    while time.process_time() < 0.3: pass
print(flush=True)
sys.stdin.read()
"""


def test_it_is_a_benchmark_and_measures_the_point_that_rows_are_named_after() -> None:
    assert "vllm_pair" in names()
    assert PHI_POINT in POINTS
    assert PHI_POINT in QUICK_POINTS
    assert set(QUICK_POINTS) <= {*POINTS}


def test_without_vllm_it_says_so_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm_pair, "vllm_is_here", lambda: False)
    written = (Path(vllm_pair.__file__).parent / "results" / "vllm_pair.json").exists()
    vllm_pair.run(True)
    assert "SKIPPED" in capsys.readouterr().out
    assert (Path(vllm_pair.__file__).parent / "results" / "vllm_pair.json").exists() == written


async def test_a_folder_arrives_as_it_was_over_a_link_no_faster_than_that(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "p", tmp_path / "d"
    content = {f"hash/layer.{i}.safetensors": bytes([i]) * (200_000 + i) for i in range(3)}
    for name, data in content.items():
        (theirs / name).parent.mkdir(parents=True, exist_ok=True)
        (theirs / name).write_bytes(data)
    (theirs / "hash" / "empty").write_bytes(b"")
    ours.mkdir()
    shape = LinkShape(16e6, 0.01)
    async with (
        shared_storage.serving(theirs) as port,
        LinkProcess("127.0.0.1", port, shape) as link,
    ):
        started = time.perf_counter()
        copied = await shared_storage.copy_all(link.port, ours)
        took_s = time.perf_counter() - started
    assert copied == sum(map(len, content.values()))
    assert took_s > 0.9 * copied * 8 / shape.rate_bits_per_s
    found = {p.relative_to(ours).as_posix(): p.read_bytes() for p in ours.rglob("*.safetensors")}
    assert found == content
    assert (ours / "hash" / "empty").read_bytes() == b""
    shared_storage.clear(ours)
    assert list(ours.iterdir()) == []


async def test_a_copy_that_is_cut_short_is_an_error(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "p", tmp_path / "d"
    theirs.mkdir()
    (theirs / "file").write_bytes(bytes(1_000_000))
    async with (
        shared_storage.serving(theirs) as port,
        LinkProcess("127.0.0.1", port, LinkShape(8e6)) as link,
    ):
        await link.cut_after(300_000)
        with pytest.raises((ProtocolError, ConnectionError)):
            await shared_storage.copy_all(link.port, ours)


def test_cpu_time_is_that_of_all_descendants_and_not_of_the_process() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        for _ in range(2):
            process.stdout.readline()
        found, own = descendants_cpu_s(process.pid), process_cpu_s(process.pid)
        process.communicate()
    assert 0.28 < found < 0.6
    assert 0.0 < own < 0.28


def test_a_baseline_that_computed_the_prompt_itself_is_no_baseline() -> None:
    answer = StreamedAnswer("", 0.0)
    answer.usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 96}}
    require_loaded(answer, 100)
    answer.usage["prompt_tokens_details"] = {"cached_tokens": 32}
    with pytest.raises(PrfaasError, match="less than 96 of 100"):
        require_loaded(answer, 100)
    answer.usage["prompt_tokens_details"] = None
    with pytest.raises(PrfaasError):
        require_loaded(answer, 100)


def test_quotients_are_by_round() -> None:
    assert over(Samples((2.0, 9.0)), Samples((4.0, 3.0))).values == (0.5, 3.0)


@pytest.mark.parametrize(
    ("name", "tokens"), [("p-engine", P_BATCH_TOKENS), ("d-alone", D_BATCH_TOKENS)]
)
def test_both_pairs_are_set_up_alike(name: str, tokens: int) -> None:
    spec = vllm_process(name, Path("/model"), 1, 0, ("--more",), Path("/log"))
    assert spec.arguments[-1] == "--more"
    assert spec.arguments[spec.arguments.index("--max-num-batched-tokens") + 1] == str(tokens)
    assert spec.core == 0
