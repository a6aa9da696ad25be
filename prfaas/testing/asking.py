"""Asking a running stack: what the right tokens are, requests in the background, rude clients."""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from prfaas.testing.stack import Answer, RunningStack, wait_until

VOCABULARY = 600
"""Prompts take ids from 10 up to this: any tiny model has them, none is special."""
_WORKERS = 16


def make_prompt(length: int, seed: object = 1) -> list[int]:
    """Random token ids, the same for the same arguments."""
    return random.Random(f"{length}/{seed}").choices(range(10, VOCABULARY), k=length)


def local_only(stack: RunningStack, prompt: Sequence[int], *, max_tokens: int) -> Answer:
    """What D's engine says alone: no gateway, no agent, its cache kept out by a salt."""
    answer = stack.complete(
        list(prompt),
        url=stack.stack.d_engine_url,
        max_tokens=max_tokens,
        cache_salt=f"alone-{len(prompt)}-{hash(tuple(prompt))}",
    )
    assert answer.status == 200, answer.body
    return answer


class Asker:
    """Asks a stack from threads of its own and knows the right answers; close with `with`.

    What is right is what D's engine says alone: no gateway, no agent, no cached prefix.
    """

    def __init__(self, stack: RunningStack, *, max_tokens: int = 8, salt: str = "asker") -> None:
        self.stack = stack
        self.max_tokens = max_tokens
        self.salt = salt
        self._right: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._pool = ThreadPoolExecutor(_WORKERS)

    def __enter__(self) -> Asker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def right(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Tokens of a local-only run; asked for once, while D's engine is up and left alone."""
        key = tuple(prompt)
        if key not in self._right:
            answer = local_only(self.stack, prompt, max_tokens=self.max_tokens)
            self._right[key] = answer.token_ids
        return self._right[key]

    def ask(self, prompt: Sequence[int], **fields: Any) -> Answer:
        """Through the gateway, now."""
        fields = {"max_tokens": self.max_tokens, "cache_salt": self.salt, **fields}
        return self.stack.complete(list(prompt), **fields)

    def start(self, prompt: Sequence[int], **fields: Any) -> Future[Answer]:
        """The same in the background; its right answer is found out first."""
        self.right(prompt)
        return self._pool.submit(self.ask, prompt, **fields)

    def check(self, prompt: Sequence[int], answer: Answer) -> dict[str, Any]:
        """It is exactly right; what the gateway remembers of it."""
        assert answer.status == 200, answer.body
        assert answer.token_ids == self.right(prompt), self.stack.record(answer.request_id)
        return self.stack.record(answer.request_id)

    def outcome(self, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
        """Ask, check, and what became of the transfer."""
        outcome: dict[str, Any] = self.check(prompt, self.ask(prompt, **fields))["outcome"]
        return outcome

    def wait_moving(self, nbytes: int, *, timeout_s: float = 20.0) -> None:
        """Until so many more bytes have come down the link."""
        began = self.stack.bend(lambda link: link.stats()).down_bytes
        wait_until(
            lambda: self.stack.bend(lambda link: link.stats()).down_bytes >= began + nbytes,
            timeout_s,
            f"{nbytes} bytes to come down the link",
        )


class Caller:
    """A client that may leave at any moment; owns one connection, `leave` or `with` closes it."""

    def __init__(
        self,
        url: str,
        body: dict[str, Any],
        *,
        path: str = "/v1/completions",
        receive_bytes: int = 0,
    ) -> None:
        """`receive_bytes`: what the kernel may hold of the answer; 0: as much as it likes."""
        data = json.dumps(body).encode()
        where = urlsplit(url)
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n\r\n"
        )
        self._sock = socket.socket()
        self._sock.settimeout(30)
        if receive_bytes:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self._sock.connect((where.hostname, where.port))
        self._sock.sendall(head.encode() + data)

    def __enter__(self) -> Caller:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.leave()

    def read_some(self, nbytes: int = 1) -> bytes:
        """At least so many bytes of the answer, or all there are until it ends."""
        got = b""
        while len(got) < nbytes and (part := self._sock.recv(65536)):
            got += part
        return got

    def read_all(self, timeout_s: float = 30.0) -> bytes:
        """Until the other side closes, or the last chunk of a chunked answer is there."""
        deadline = time.monotonic() + timeout_s
        got = b""
        while not got.endswith(b"\r\n0\r\n\r\n"):
            self._sock.settimeout(max(0.1, deadline - time.monotonic()))
            part = self._sock.recv(65536)
            if not part:
                break
            got += part
        return got

    def leave(self, *, reset: bool = False) -> None:
        """Close, politely or with a reset. Idempotent."""
        if reset and self._sock.fileno() >= 0:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()
