"""Engine and pair on CUDA: prefill and decode rates, remote prefill, and equal tokens.

The model has random weights of a realistic size, so nothing needs to be downloaded. Both engines
share one GPU and the link is loopback, so the pair's figures show what the path costs, not what a
second cluster gains.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from bench.harness import RESULTS, Report, Samples
from bench.prompts import PromptSource, natural_text
from bench.site import remote_answer
from prfaas.codecs.native import native
from prfaas.errors import PrfaasError
from prfaas.settings import load_settings
from prfaas.testing.tinymodel import make_tiny_model
from prfaas.up.client import OpenAIClient, StreamedAnswer
from prfaas.up.cluster import paired, wait_cluster
from prfaas.up.stack import Stack, StackPlan
from prfaas.up.supervisor import Supervisor

_READY_TIMEOUT_S = 240.0
_REQUEST_TIMEOUT_S = 120.0
_BUDGET_S = 540.0
"""No step begins later than this: the whole has ten minutes."""
_ROUNDS = 5
_EXACT_PROMPTS = 5
_DECODE_TOKENS = 64
_SEED = 7


@dataclass(frozen=True, slots=True)
class Size:
    """What is measured; `tiny` is for trying the script where there is no GPU."""

    model: dict[str, Any]
    prefill_tokens: tuple[int, ...]
    batches: tuple[int, ...]
    remote_tokens: tuple[int, ...]
    dtype: str
    kv_bytes: int


FULL = Size(
    model={
        "layers": 16,
        "hidden": 2048,
        "heads": 16,
        "kv_heads": 8,
        "head_dim": 128,
        "intermediate": 5632,
        "vocab_size": 8192,
        "max_context": 16384,
    },
    prefill_tokens=(512, 2048, 8192),
    batches=(1, 8, 32),
    remote_tokens=(2048, 8192),
    dtype="bfloat16",
    kv_bytes=4 << 30,
)
TINY = Size(
    model={"max_context": 4096},
    prefill_tokens=(128, 512),
    batches=(1, 4),
    remote_tokens=(512,),
    dtype="float32",
    kv_bytes=64 << 20,
)


class GpuBench:
    """Runs the steps against a running stack and adds their rows."""

    def __init__(
        self,
        size: Size,
        report: Report,
        device: str,
        d_engine: OpenAIClient,
        remote: OpenAIClient,
        prompts: PromptSource,
    ) -> None:
        self._size = size
        self._report = report
        self._device = device
        self._d_engine = d_engine
        self._remote = remote
        self._prompts = prompts

    async def prefill(self) -> None:
        """Tokens a second of the engine alone, by prompt length."""
        for tokens in self._size.prefill_tokens:
            found = [await self._ttft(self._d_engine, tokens) for _ in range(_ROUNDS)]
            rates = Samples(tuple(tokens / seconds for seconds in found))
            self._add(f"prefill.{tokens}", rates.median, "tokens/s", rates.spread)

    async def decode(self) -> None:
        """Median ITL and tokens a second of running batches."""
        for batch in self._size.batches:
            answers = await asyncio.gather(
                *(
                    self._d_engine.complete(
                        self._prompts.cut(64), max_tokens=_DECODE_TOKENS, ignore_eos=True
                    )
                    for _ in range(batch)
                )
            )
            step_s = statistics.median(gap for answer in answers for gap in answer.itl_s)
            self._add(f"decode_itl.{batch}", step_s * 1e3, "ms", f"{batch} sequences")
            self._add(f"decode.{batch}", batch / step_s, "tokens/s", f"{batch} sequences")

    async def pair(self) -> None:
        """Remote prefill over loopback: TTFT, KV rate, what was hidden."""
        for tokens in self._size.remote_tokens:
            found = []
            for _ in range(_ROUNDS):
                answer = await self._remote.complete(
                    self._prompts.cut(tokens), max_tokens=2, ignore_eos=True
                )
                found.append(await remote_answer(self._remote, answer))
            ttft = Samples(tuple(one.answer.ttft_s for one in found))
            self._add(f"remote_ttft.{tokens}", ttft.median, "s", ttft.spread)
            rate = Samples(tuple(one.raw_bytes / one.answer.ttft_s / 1e9 for one in found))
            self._add(f"remote_kv_rate.{tokens}", rate.median, "GB/s", f"raw KV; {rate.spread}")
            ratio = Samples(tuple(one.raw_bytes / one.wire_bytes for one in found))
            self._add(f"remote_wire_ratio.{tokens}", ratio.median, "ratio", ratio.spread)
            hidden = Samples(tuple(one.hidden_wire_bytes / one.wire_bytes for one in found))
            self._add(f"remote_hidden.{tokens}", hidden.median, "share", hidden.spread)

    async def exact(self) -> None:
        """Remote and local answers to the same prompts are the same text."""
        equal = 0
        for number in range(_EXACT_PROMPTS):
            prompt = self._prompts.cut(200 + 331 * number)
            texts = [
                (
                    await place.complete(
                        prompt, max_tokens=16, ignore_eos=True, cache_salt=f"exact-{salt}"
                    )
                ).text
                for salt, place in (("local", self._d_engine), ("remote", self._remote))
            ]
            equal += texts[0] == texts[1]
        self._add("exact", equal / _EXACT_PROMPTS, "share", f"of {_EXACT_PROMPTS} prompts equal")
        if equal != _EXACT_PROMPTS:
            raise PrfaasError(f"only {equal} of {_EXACT_PROMPTS} remote answers equal local ones")

    async def codecs(self) -> None:
        """What the GPU does of the codecs' work, and that it makes the CPU's bytes."""
        import torch

        from bench.gpu_codecs import measure

        if native is None:
            self._report.say("codecs: the C extension was not built, no rows")
            return
        tiny = self._size is TINY
        if tiny:
            self._report.say("codecs: stand-ins of streams and events, not a measurement")
        measure(native, torch.device("cpu" if tiny else "cuda:0"), self._add)

    async def _ttft(self, place: OpenAIClient, tokens: int) -> float:
        answer: StreamedAnswer = await place.complete(
            self._prompts.cut(tokens), max_tokens=1, ignore_eos=True
        )
        return answer.ttft_s

    def _add(self, name: str, value: float, unit: str, note: str) -> None:
        self._report.add(name, value, unit, f"{self._device}, {self._size.dtype}; {note}")
        self._report.say(f"{name}: {value:.5g} {unit} ({note})")


async def _run(size: Size, device: str, device_name: str) -> None:
    started = time.monotonic()
    report = Report("gpu", command="bench/gpu.sh")
    async with AsyncExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prfaas-gpu-")))
        report.say("making a model with random weights")
        model = make_tiny_model(root / "model", **size.model)
        plan = Stack.create(_plan(size, device, model), root)
        supervisor = await stack.enter_async_context(Supervisor(stop_grace_s=15.0))
        report.say(f"loading it twice on {device_name}")
        await supervisor.start(
            plan.engines_and_agents(agent={"probe_bytes": 0, "slower_by": 0}), _READY_TIMEOUT_S
        )
        always = {**dict(plan.plan.base.gateway.policy), "name": "always_remote"}
        gateway = plan.gateway(settings={"policy": always, "short_body_bytes": 0})
        await supervisor.start((gateway,), _READY_TIMEOUT_S)
        d_engine, remote = [
            await stack.enter_async_context(OpenAIClient(url, timeout_s=_REQUEST_TIMEOUT_S))
            for url in (plan.d_engine_url, plan.gateway_url)
        ]
        await wait_cluster(remote, "P to be paired", paired, 60.0)
        tokens = await d_engine.post("/tokenize", {"prompt": natural_text()})
        prompts = PromptSource(tokens["tokens"], _SEED)
        bench = GpuBench(size, report, device_name, d_engine, remote, prompts)
        try:
            for step in (
                bench.codecs,
                bench.prefill,
                bench.decode,
                bench.exact,
                bench.pair,
            ):
                if time.monotonic() - started > _BUDGET_S:
                    raise PrfaasError(f"out of time before {step.__name__}")
                await step()
        finally:
            # A trial leaves no figures behind.
            report.finish(directory=root if size is TINY else RESULTS)


def _plan(size: Size, device: str, model: Path) -> StackPlan:
    engine = {
        "device": device,
        "dtype": size.dtype,
        "kv_dtype": size.dtype,
        "kv_memory_bytes": size.kv_bytes,
        "chunk_tokens": 1024 if size is FULL else 128,
    }
    base = load_settings(
        overrides={
            "engine": engine,
            "agent": {"staging_bytes": 2 << 30, "ring_bytes": 256 << 20},
            "prefill": {"retention_bytes": 4 << 30, "ring_bytes": 256 << 20, "codec_threads": 4},
        }
    )
    return StackPlan(base, model, "random", threads=4, pin=False)


@click.command()
@click.option("--tiny", is_flag=True, help="Try the script on this machine's CPU.")
def main(tiny: bool) -> None:
    """Measure and write bench/results/gpu.json."""
    try:
        if tiny:
            asyncio.run(_run(TINY, "cpu", "CPU (not a GPU: only to try the script)"))
        else:
            import torch

            asyncio.run(_run(FULL, "cuda:0", torch.cuda.get_device_name(0)))
    except PrfaasError as exc:
        click.echo(f"bench gpu: {exc.message}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
