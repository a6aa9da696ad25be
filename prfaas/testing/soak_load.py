"""Clients of a soak: many kinds at once, and every completed answer compared with the right one."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from prfaas.testing.asking import Caller, make_prompt
from prfaas.testing.oracle import NEAR_TIE, Comparison, TopTwoGap
from prfaas.testing.stack import RunningStack

HANG_S = 60.0
"""A request takes longer only if somebody waits for nothing: all phases together are below it."""
ALLOWED_REFUSALS = frozenset({"prefill_unavailable", "overloaded"})
"""What a client may be told, with 503 and Retry-After, while P is away and D has enough to do."""

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt and what D's engine alone answers to it."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str


def make_cases(stack: RunningStack, seed: int, count: int) -> list[Case]:
    """Short, middling and long prompts, a third of them with a prefix that others have too."""
    rng = random.Random(f"cases/{seed}")
    prefixes = [make_prompt(rng.choice((64, 130, 700)), f"prefix/{seed}/{i}") for i in range(4)]
    cases: list[Case] = []
    for number in range(count):
        length = rng.choice((1, 2, rng.randrange(3, 80), rng.randrange(80, 800), 1500, 3000))
        prompt = make_prompt(length, f"case/{seed}/{number}")
        if number % 3 == 0:
            prompt = [*rng.choice(prefixes), *prompt]
        answer = stack.complete(
            prompt,
            url=stack.stack.d_engine_url,
            max_tokens=rng.choice((1, 4, 24, 60)),
            cache_salt=f"expected/{seed}/{number}",
        )
        if answer.status != 200:
            raise AssertionError(f"no right answer for case {number}: {answer.body}")
        text = answer.body["choices"][0]["text"]
        cases.append(Case(tuple(prompt), answer.token_ids, text))
    return cases


class Tally:
    """What clients saw so far; thread-safe. `comparison` has the near ties."""

    def __init__(self, gap: TopTwoGap, decode: Decode) -> None:
        self.requests: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.hangs: list[str] = []
        self.comparison = Comparison(gap)
        self._decode = decode
        self._lock = threading.Lock()

    def ended(self, kind: str, how: str) -> None:
        """One request: `exact`, `refused` or `left`, and for what kind of client."""
        with self._lock:
            self.requests[f"{kind} {how}"] += 1

    def is_wrong(self, what: str) -> None:
        with self._lock:
            self.wrong.append(what)

    def hangs_at(self, what: str) -> None:
        with self._lock:
            self.hangs.append(what)

    def compare_tokens(self, name: str, case: Case, got: Sequence[int]) -> None:
        """A whole answer."""
        with self._lock:
            try:
                self.comparison.add(name, case.prompt, case.tokens, got)
            except AssertionError as exc:
                self.wrong.append(str(exc))

    def compare_text(self, name: str, case: Case, got: str, *, whole: bool) -> None:
        """A streamed answer, which has no ids; not `whole`: its client has left before the end."""
        if got == case.text or (not whole and case.text.startswith(got.rstrip("\ufffd"))):
            return
        with self._lock:
            at = self._first_difference(case, got)
            gap = self.comparison.gap([*case.prompt, *case.tokens[:at]])
            where = f"{name}: token {at} of a stream, top-2 gap {gap:.4f}: {got!r}"
            (self.comparison.near_ties if gap < NEAR_TIE else self.wrong).append(where)

    def _first_difference(self, case: Case, got: str) -> int:
        for at in range(len(case.tokens)):
            if not got.startswith(self._decode(case.tokens[: at + 1]).rstrip("\ufffd")):
                return at
        return len(case.tokens) - 1


class Load:
    """Owns the client threads; `stop` ends them, `pause` waits until none has a request open."""

    def __init__(
        self, stack: RunningStack, cases: list[Case], tally: Tally, *, seed: int, workers: int
    ) -> None:
        self._stack = stack
        self._cases = cases
        self._tally = tally
        self._running = threading.Event()
        self._stopping = False
        self._idle = [threading.Event() for _ in range(workers)]
        self._threads = [
            threading.Thread(target=self._work, args=(n, random.Random(f"{seed}/client/{n}")))
            for n in range(workers)
        ]

    def start(self) -> None:
        self._running.set()
        for thread in self._threads:
            thread.start()

    def pause(self) -> bool:
        """False: some request did not end; it counts as a hang."""
        self._running.clear()
        deadline = time.monotonic() + HANG_S
        ended = [idle.wait(max(0.0, deadline - time.monotonic())) for idle in self._idle]
        if not all(ended):
            self._tally.hangs_at(f"{ended.count(False)} requests at a checkpoint")
        return all(ended)

    def resume(self) -> None:
        for idle in self._idle:
            idle.clear()
        self._running.set()

    def stop(self) -> None:
        self._stopping = True
        self._running.set()
        for thread in self._threads:
            thread.join(HANG_S)

    def _work(self, number: int, rng: random.Random) -> None:
        kinds: list[tuple[Callable[[str, Case, random.Random], None], int]] = [
            (self._whole, 8),
            (self._stream, 5),
            (self._slow_stream, 2),
            (self._leaver, 5),
            (self._stream_leaver, 3),
        ]
        acts, weights = [act for act, _ in kinds], [weight for _, weight in kinds]
        count = 0
        while not self._stopping:
            if not self._running.is_set():
                self._idle[number].set()
                self._running.wait()
                self._idle[number].clear()
                continue
            act = rng.choices(acts, weights)[0]
            name = f"client {number}, request {count}, {act.__name__.strip('_')}"
            began = time.monotonic()
            try:
                act(name, rng.choice(self._cases), rng)
            except TimeoutError:
                self._tally.hangs_at(f"{name}: nothing for {HANG_S:g} s")
            except Exception as exc:
                self._tally.is_wrong(f"{name}: {exc!r}")
            if time.monotonic() - began > HANG_S:
                self._tally.hangs_at(f"{name}: {time.monotonic() - began:.0f} s")
            count += 1
            time.sleep(rng.choice((0, 0, 0.05, 0.3)))
        self._idle[number].set()

    # --- kinds of clients ---

    def _body(self, case: Case, rng: random.Random, **fields: Any) -> dict[str, Any]:
        """Most come under a salt of their own, so that all their KV has to cross."""
        salt = rng.choice((f"own/{rng.random()}", f"own/{rng.random()}", "shared", "other"))
        return {
            "model": "test-model",
            "prompt": list(case.prompt),
            "max_tokens": len(case.tokens),
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": salt,
            **fields,
        }

    def _whole(self, name: str, case: Case, rng: random.Random) -> None:
        body = self._body(case, rng, return_token_ids=True)
        answer = self._stack.post(
            f"{self._stack.stack.gateway_url}/v1/completions", body, timeout_s=HANG_S
        )
        if answer.status == 200:
            self._tally.compare_tokens(name, case, answer.token_ids)
            self._tally.ended("whole", "exact")
        else:
            self._refused(name, "whole", answer.status, answer.body, answer.retry_after)

    def _stream(self, name: str, case: Case, rng: random.Random, pause_s: float = 0.0) -> None:
        with _Stream(self._stack.stack.gateway_url, self._body(case, rng, stream=True)) as stream:
            if stream.status != 200:
                self._refused(name, "stream", stream.status, stream.error(), stream.retry_after)
                return
            text = ""
            for part in stream.parts():
                text += part
                time.sleep(pause_s)
            if not stream.done:
                self._tally.is_wrong(f"{name}: the stream ended without [DONE]: {stream.last!r}")
                return
        self._tally.compare_text(name, case, text, whole=True)
        self._tally.ended("slow stream" if pause_s else "stream", "exact")

    def _slow_stream(self, name: str, case: Case, rng: random.Random) -> None:
        self._stream(name, case, rng, pause_s=rng.choice((0.01, 0.05)))

    def _leaver(self, name: str, case: Case, rng: random.Random) -> None:
        body = self._body(case, rng, stream=rng.random() < 0.5)
        with Caller(self._stack.stack.gateway_url, body) as caller:
            time.sleep(rng.choice((0, 0.02, 0.1, 0.5, 1.0)))
            caller.leave(reset=rng.random() < 0.5)
        self._tally.ended("leaver", "left")

    def _stream_leaver(self, name: str, case: Case, rng: random.Random) -> None:
        events = rng.randrange(1, 30)
        with _Stream(self._stack.stack.gateway_url, self._body(case, rng, stream=True)) as stream:
            if stream.status != 200:
                self._refused(name, "stream", stream.status, stream.error(), stream.retry_after)
                return
            text = ""
            for part, _ in zip(stream.parts(), range(events), strict=False):
                text += part
        self._tally.compare_text(name, case, text, whole=False)
        self._tally.ended("stream leaver", "left")

    def _refused(
        self, name: str, kind: str, status: int, body: Any, retry_after: str | None
    ) -> None:
        error = body.get("error", {}).get("type") if isinstance(body, dict) else None
        if status == 503 and error in ALLOWED_REFUSALS and retry_after:
            self._tally.ended(kind, "refused")
        else:
            self._tally.is_wrong(f"{name}: {status} {body!r:.300} retry-after {retry_after}")


class _Stream:
    """One streamed completion; `done` once [DONE] has come. Closed by `with`."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        where = urlsplit(url)
        self._connection = http.client.HTTPConnection(where.netloc, timeout=HANG_S)
        self.done = False
        self.last = b""
        data, headers = json.dumps(body), {"content-type": "application/json"}
        try:
            self._connection.connect()
            self._connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            self._connection.request("POST", "/v1/completions", data, headers)
            self._response = self._connection.getresponse()
        except BaseException:
            self._connection.close()
            raise
        self.status = self._response.status
        self.retry_after = self._response.headers["retry-after"]

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self._response.close()
        self._connection.close()

    def error(self) -> Any:
        return json.load(self._response)

    def parts(self) -> Iterator[str]:
        """Texts of the events."""
        for line in self._response:
            if not line.startswith(b"data:"):
                continue
            self.last = line[5:].strip()
            if self.last == b"[DONE]":
                self.done = True
                continue
            event = json.loads(self.last)
            if "error" in event:
                return
            yield from (choice["text"] for choice in event["choices"])
