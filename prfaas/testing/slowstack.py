"""A stack that sends everything to P over a slow link, with short limits: for faults midway."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prfaas.settings import load_settings
from prfaas.testing.asking import Asker, make_prompt
from prfaas.testing.footprint import wait_nothing_held
from prfaas.testing.link import LinkShape
from prfaas.testing.stack import RunningStack, running_stack, wait_until

CHUNK = 64
TOKENS = 1500
"""1.3 MB on the wire, so 1.3 s on this link."""
MANY_TOKENS = 3900
"""So many that P still computes when the first chunks are at D: what its kernel has in its buffers
when it is killed arrives all the same.
"""
LINK = LinkShape(8e6, 0.01)
FAST_LINK = LinkShape(200e6, 0.01)
"""So fast that P's engine is what takes time: what has come down tells how far it is."""
PROGRESS_S, FIRST_FRAME_S, LEASE_S = 1.5, 2.0, 3.0
"""On a machine that others use a process may not run for a second."""
RECOVERY_S = 15.0
"""gRPC notices a dead connection within twice its keepalive of 5 s."""
STAGED = 'prfaas_agent_fetches_total{reason="",status="staged"}'
BUDGET_TOKENS = 4 * TOKENS
LIMITS = {
    "connect_timeout_s": 1.0,
    "first_frame_timeout_s": FIRST_FRAME_S,
    "progress_timeout_s": PROGRESS_S,
    "control_timeout_s": 1.0,
    "lease_s": LEASE_S,
    "drain_timeout_s": 6.0,
    "fallback_budget_tokens": BUDGET_TOKENS,
}
BATCH = 8
ENGINE = {
    "max_batch": BATCH,
    "chunk_tokens": CHUNK,
    "kv_memory_bytes": 16 << 20,
    "max_context": 4096,
    "kv_dtype": "float32",
}


@contextmanager
def slow_stack(directory: Path, model: Path) -> Iterator[RunningStack]:
    """Everything goes to P over a slow link; every import is read back and compared."""
    with running_stack(
        directory / "stack",
        model,
        base=load_settings(overrides={"limits": LIMITS}),
        gateway={"policy": {"name": "always_remote"}, "short_body_bytes": 0},
        agent={"verify_import": True, "probe_bytes": 0, "codecs": ["planes-zstd", "raw"]},
        d_engine={**ENGINE, "block_tokens": 64},
        p_engine={**ENGINE, "block_tokens": 16},
        link=LINK,
    ) as stack:
        yield stack
        assert_imports_were_whole(stack)


@contextmanager
def fast_link(stack: RunningStack) -> Iterator[None]:
    """P's engine is slower than the link meanwhile, so that a fault there is in its midst."""
    stack.bend(lambda link: link.set_shape(FAST_LINK))
    try:
        yield
    finally:
        stack.bend(lambda link: link.set_shape(LINK))


def assert_imports_were_whole(stack: RunningStack) -> None:
    """No import ever read back other bytes than were staged."""
    assert "digest_mismatch" not in stack.log("d-agent")
    assert "read back other bytes" not in stack.log("d-agent")


def is_recovered(stack: RunningStack, asker: Asker, seed: object) -> None:
    """The pair is made again, the next transfer comes whole, and nothing is held."""
    tries = iter(range(1000))

    def staged() -> bool:
        # A fault may be noticed only once it is over; until the pair is made anew, D serves.
        prompt = make_prompt(200, f"after/{seed}/{next(tries)}")
        answer = asker.ask(prompt)
        assert answer.status == 200, answer.body
        assert answer.token_ids == asker.right(prompt)
        return stack.metrics("d-agent").get(STAGED, 0) > before

    before = stack.metrics("d-agent").get(STAGED, 0)
    wait_until(staged, RECOVERY_S, "a transfer that comes whole")
    wait_nothing_held(stack)
