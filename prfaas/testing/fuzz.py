"""Time-boxed fuzzing: mutated valid inputs, a closed list of errors, a ceiling on memory and time.

A run is seeded by its name, so what it finds it finds again; `PRFAAS_FUZZ_S` makes it longer.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import psutil

T = TypeVar("T")

DEFAULT_FUZZ_S = 0.7
SLOWEST_S = 2.0
"""One input may take so long on a busy machine; more is a hang."""
HEADROOM_BYTES = 256 << 20

_WORDS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1, 1 << 63)
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 1 << 31, 1 << 63, -(1 << 63) - 1, 10**40, 0.5, -0.0, 1e308,
    float("nan"), float("inf"), "", "\x00", "é\U0001f600", "\ud800", "x" * 2000, "127.0.0.1:1",
    [], {}, [[]], {"": None}, [0] * 500,
)  # fmt: skip


def fuzz_seconds() -> float:
    """How long one fuzzer runs."""
    return float(os.environ.get("PRFAAS_FUZZ_S", DEFAULT_FUZZ_S))


def fuzz(
    name: str,
    target: Callable[[T], object],
    make: Callable[[random.Random], T],
    allowed: tuple[type[BaseException], ...],
) -> int:
    """Feed `target` with what `make` makes until the time is up; how many inputs it took.

    Raises AssertionError with the input for any other error, for one that is too slow, and for one
    that takes memory out of proportion.
    """
    rng = random.Random(name)
    deadline = time.monotonic() + fuzz_seconds()
    count = accepted = 0
    with memory_ceiling(HEADROOM_BYTES):
        while time.monotonic() < deadline:
            value = make(rng)
            started = time.monotonic()
            try:
                target(value)
                accepted += 1
            except allowed:
                pass
            except Exception as exc:
                raise AssertionError(
                    f"{name}: input {count} let {exc!r} out: {value!r:.2000}"
                ) from exc
            took_s = time.monotonic() - started
            assert took_s < SLOWEST_S, f"{name}: {took_s:.1f} s for input {count}: {value!r:.2000}"
            count += 1
    assert 0 < accepted < count, f"{name}: {accepted} of {count} inputs were accepted"
    return count


@contextlib.contextmanager
def memory_ceiling(headroom_bytes: int) -> Iterator[None]:
    """More than so much memory beyond what is mapped now is a MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (mapped + headroom_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def mutate_bytes(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """`data` with some of its bits, words or stretches changed, cut, doubled or swapped."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        at = rng.randrange(len(changed) + 1)
        end = min(len(changed), at + rng.choice((1, 2, 4, 8, 32)))
        match rng.randrange(7):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << rng.randrange(8)
            case 1:
                size = rng.choice((1, 2, 4, 8))
                word = rng.choice(_WORDS) & ((1 << 8 * size) - 1)
                changed[at : at + size] = word.to_bytes(size, rng.choice(("little", "big")))
            case 2:
                del changed[at:]
            case 3:
                del changed[at:end]
            case 4:
                changed[at:at] = changed[at:end] * rng.choice((1, 2, 50))
            case 5:
                changed[at:at] = rng.randbytes(rng.choice((1, 4, 64)))
            case _:
                other = rng.choice(others) if others else b""
                start = rng.randrange(len(other) + 1)
                changed[at:end] = other[start : start + rng.choice((4, 16, 64, 256))]
    return bytes(changed)


def mutate_json(value: Any, rng: random.Random) -> Any:
    """`value` with some of its nodes replaced, dropped, doubled or wrapped."""
    root = [copy.deepcopy(value)]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        holder, key = _random_node(root, rng)
        match rng.randrange(6):
            case 0 | 1 | 2:
                holder[key] = copy.deepcopy(rng.choice(_VALUES))
            case 3 if isinstance(holder, dict):
                del holder[key]
            case 4 if isinstance(holder, dict):
                name = rng.choice(("extra", "", "address", "é"))
                holder[name] = copy.deepcopy(rng.choice(_VALUES))
            case 4 if holder is not root:
                holder.append(copy.deepcopy(holder[key]))
            case _:
                for _ in range(rng.choice((1, 2, 40))):
                    holder[key] = rng.choice(([holder[key]], {"a": holder[key]}))
    return root[0]


def _random_node(root: list[Any], rng: random.Random) -> tuple[Any, Any]:
    """A container below `root` and a key of it: any place is as likely to be reached."""
    places: list[tuple[Any, Any]] = [(root, 0)]
    stack: list[Any] = [root[0]]
    while stack:
        node = stack.pop()
        keys: Any = range(len(node)) if isinstance(node, list) else node
        if isinstance(node, list | dict):
            places.extend((node, key) for key in keys)
            stack.extend(node[key] for key in keys)
    return rng.choice(places)
