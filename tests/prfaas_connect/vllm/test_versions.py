"""The connector on several versions of vLLM's interface: a fake engine makes their calls in their
order, against a real KvPort with an agent that is all script.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from prfaas.testing.fake_vllm import VERSIONS, FakeVersion, installed
from prfaas.testing.fake_vllm_engine import (
    BLOCK,
    FakeEngine,
    FakeRequest,
    cpu_writer,
    formula_kv,
)
from prfaas.testing.staging_agent import StagingAgent
from prfaas_connect.port.layout import LayoutError
from prfaas_connect.vllm.features import UnsupportedVllm

DECODING = ("0.13", "0.21", "0.32")


def wait_until(what: Any, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


class Bench:
    """An agent and engines of one version; the test's fixture closes them."""

    def __init__(self, version: FakeVersion, path: Path, stack: ExitStack) -> None:
        self.version = version
        self.path = path
        self._stack = stack
        self.module = stack.enter_context(installed(version))
        half = __import__("prfaas_connect.vllm.worker_half", fromlist=["x"])
        half.cache_writer = lambda config, name, cache: cpu_writer
        self.agent = stack.enter_context(StagingAgent(path))
        self.agent.script.kv = formula_kv
        self.agent.script.chunk_tokens = 8

    def engine(self, **options: Any) -> FakeEngine:
        engine = FakeEngine(self.module, self.version, str(self.path), **options)
        self._stack.callback(engine.close)
        port = engine.scheduler._scheduler._port
        wait_until(lambda: port.connected)
        return engine


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=DECODING)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(VERSIONS[request.param], tmp_path / "port", stack)


def prompt(name: str, tokens: int = 30, first: int = 0, plan: bool = True) -> FakeRequest:
    ids = [(first + 7 * index) % 997 for index in range(tokens)]
    return FakeRequest(name, ids, {"transfer_id": f"t-{name}"} if plan else None)


def steps_until(engine: FakeEngine, what: Any, limit: int = 3000) -> None:
    for _ in range(limit):
        if what():
            return
        engine.step()
        time.sleep(0.0002)  # the port's threads want to run as well
    raise AssertionError("waited in vain")


def test_remote_kv_reaches_its_blocks_and_only_the_last_token_is_computed(bench: Bench) -> None:
    engine = bench.engine()
    one = engine.add(prompt("a"))
    one.max_tokens = 2
    steps_until(engine, lambda: one.status == "running")
    found = engine.kv(one, 29)
    np.testing.assert_array_equal(found, formula_kv(np.array(one.prompt_token_ids))[:, :, :29])
    engine.run(one)
    assert one.status == "done"
    (asked,) = bench.agent.asked
    bench.agent.wait_for(lambda _: asked.released)
    assert asked.released is not None
    assert (asked.released.result, asked.released.imported_tokens) == ("imported", 29)
    assert bool(asked.released.digest) == bench.version.worker_meta
    assert (asked.fetch.have, asked.fetch.want) == (0, 29)


def test_a_waiting_request_keeps_nobody_from_being_served(bench: Bench) -> None:
    engine = bench.engine()
    bench.agent.script.status = ""
    waits = engine.add(prompt("waits"))
    engine.step()
    others = [engine.add(prompt(f"o{i}", first=100 * i + 1, plan=False)) for i in range(3)]
    engine.run(*others)
    assert {each.status for each in others} == {"done"}
    assert waits.status == "waiting"
    assert ("waits", None) in engine.asked
    bench.agent.script.status = "staged"
    bench.agent.answer(bench.agent.wait_for(lambda agent: agent.asked)[0])
    engine.run(waits)
    assert waits.status == "done"


def test_what_d_has_cached_is_not_asked_for(bench: Bench) -> None:
    engine = bench.engine()
    first = engine.add(prompt("first", tokens=17, plan=False))
    engine.run(first)
    second = engine.add(prompt("second", tokens=30))
    engine.run(second)
    (asked,) = bench.agent.asked
    assert (asked.fetch.have, asked.fetch.want) == (16, 29)


def test_a_part_that_came_is_used_and_the_rest_computed(bench: Bench) -> None:
    engine = bench.engine()
    bench.agent.script.status, bench.agent.script.token_end = "partial", 22
    one = engine.add(prompt("a"))
    one.max_tokens = 2
    steps_until(engine, lambda: one.status == "running")
    assert ("a", 20) in engine.asked
    np.testing.assert_array_equal(engine.kv(one, 30), formula_kv(np.array(one.prompt_token_ids)))
    engine.run(one)
    assert one.status == "done"


def test_what_the_agent_leaves_to_d_is_computed_there(bench: Bench) -> None:
    engine = bench.engine()
    bench.agent.script.status, bench.agent.script.reason = "local", "peer_unavailable"
    one = engine.add(prompt("a"))
    engine.run(one)
    assert one.status == "done"


def test_what_the_agent_refuses_ends_with_an_error_and_gives_its_block_back(bench: Bench) -> None:
    engine = bench.engine()
    free = len(engine.pool.free)
    bench.agent.script.status = "refused"
    one = engine.add(prompt("a"))
    engine.run(one)
    assert one.status == "error"
    engine.step()
    assert len(engine.pool.free) == free
    (asked,) = bench.agent.asked
    assert asked.released is None
    assert not asked.aborted


@pytest.mark.parametrize("when", ["fetched", "staged", "loading"])
def test_a_client_that_leaves_frees_blocks_and_staging(bench: Bench, when: str) -> None:
    engine = bench.engine(import_bytes_per_step=64)
    free = len(engine.pool.free)
    if when == "fetched":
        bench.agent.script.status = ""
    one = engine.add(prompt("a"))
    if when == "loading":
        steps_until(engine, lambda: one.status == "loading")
        engine.step()
    else:
        engine.step()
        bench.agent.wait_for(lambda agent: agent.asked)
    engine.abort(one)
    (asked,) = bench.agent.asked
    steps_until(engine, lambda: asked.released or asked.aborted)
    assert asked.aborted == (asked.released is None)
    if asked.released is not None:
        assert asked.released.result == "aborted"
    assert len(engine.pool.free) == free
    other = engine.add(prompt("b", first=3, plan=False))
    engine.run(other)
    assert other.status == "done"


def test_no_late_byte_reaches_blocks_that_belong_to_another_by_now(bench: Bench) -> None:
    # Room for one request only, so that the second gets the very blocks of the first.
    engine = bench.engine(blocks=9, import_bytes_per_step=64)
    one = engine.add(prompt("a"))
    steps_until(engine, lambda: one.status == "loading")
    for _ in range(3):
        engine.step()
    taken = list(one.blocks)
    engine.abort(one)
    other = engine.add(prompt("b", first=3, plan=False))
    other.max_tokens = 20
    steps_until(engine, lambda: other.status == "running")
    assert set(other.blocks) & set(taken)
    for _ in range(10):
        engine.step()
    expected = formula_kv(np.array(other.prompt_token_ids))
    np.testing.assert_array_equal(engine.kv(other, 30), expected)


def test_two_loads_in_a_pool_of_one_and_a_half_come_one_after_the_other(bench: Bench) -> None:
    engine = bench.engine(blocks=13, import_bytes_per_step=512)
    requests = [engine.add(prompt("a")), engine.add(prompt("b", first=3))]
    engine.run(*requests)
    assert [each.status for each in requests] == ["done", "done"]
    bench.agent.wait_for(lambda agent: all(asked.released for asked in agent.asked))
    assert [a.released.result for a in bench.agent.asked if a.released] == ["imported"] * 2


def test_when_the_agent_dies_requests_go_on_alone_and_later_ones_use_the_next(
    bench: Bench,
) -> None:
    engine = bench.engine()
    bench.agent.script.status = ""
    one = engine.add(prompt("a"))
    steps_until(engine, lambda: bench.agent.asked)
    bench.agent.stop()
    engine.run(one)
    assert one.status == "done"
    bench.agent.start()
    wait_until(lambda: engine.scheduler._scheduler._port.connected)
    bench.agent.script.status = "staged"
    two = engine.add(prompt("b", first=3))
    two.max_tokens = 2
    steps_until(engine, lambda: two.status == "running")
    assert ("b", 29) in engine.asked
    expected = formula_kv(np.array(two.prompt_token_ids))
    np.testing.assert_array_equal(engine.kv(two, 29), expected[:, :, :29])


def test_a_load_under_way_outlives_its_agent(bench: Bench) -> None:
    engine = bench.engine(import_bytes_per_step=64)
    one = engine.add(prompt("a"))
    one.max_tokens = 2
    decode = engine.worker._worker._decode
    steps_until(engine, lambda: decode._jobs and decode._jobs[0].staged is not None)
    bench.agent.stop()
    wait_until(lambda: not engine.worker._worker._port.port)
    assert one.status == "loading"
    steps_until(engine, lambda: one.status == "running")
    expected = formula_kv(np.array(one.prompt_token_ids))
    np.testing.assert_array_equal(engine.kv(one, 29), expected[:, :, :29])


def test_the_engine_tells_what_it_is(bench: Bench) -> None:
    bench.engine()
    conn = bench.agent.wait_for(lambda agent: agent.conn)
    assert conn is not None
    hello = conn.hello
    assert hello.engine == f"vllm {bench.version.name}"
    assert (hello.roles, hello.block_tokens, hello.chunk_tokens) == (["decode"], BLOCK, 8)
    assert (hello.model_identity, hello.config_digest, hello.tokenizer_digest) == ("m", "c", "t")


class Multi:
    """vLLM's MultiConnector in short: the first that has tokens brings them, all hear of it."""

    other_tokens = 0

    def __init__(self, make: Any, *args: Any) -> None:
        self._ours = make(*args)
        self._chosen: dict[str, bool] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ours, name)

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        found, later = self._ours.get_num_new_matched_tokens(request, computed)
        if found is None:
            return None, False
        self._chosen[request.request_id] = not self.other_tokens
        return (0, False) if self.other_tokens else (found, later)

    def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None:
        ours = self._chosen.get(request.request_id, False)
        self._ours.update_state_after_alloc(request, blocks, tokens if ours else 0)

    def update_connector_output(self, output: Any) -> None:
        # Others' requests are in there as well.
        received = {*(output.finished_recving or ()), "of-another-connector"}
        everything = SimpleNamespace(**{**vars(output), "finished_recving": received})
        self._ours.update_connector_output(everything)


@pytest.mark.parametrize("others", [False, True])
def test_it_works_beside_other_connectors(bench: Bench, others: bool) -> None:
    def make(*args: Any) -> Multi:
        multi = Multi(bench.module.PrfaasConnector, *args)
        multi.other_tokens = int(others)
        return multi

    engine = bench.engine(wrap=make)
    one = engine.add(prompt("a"))
    engine.run(one)
    assert one.status == "done"
    (asked,) = bench.agent.asked
    bench.agent.wait_for(lambda _: asked.released)
    assert asked.released is not None
    assert asked.released.result == ("aborted" if others else "imported")


@pytest.mark.parametrize(
    ("name", "sentence"), [("0.11", "kv_load_failure_policy"), ("0.9", "answer None")]
)
def test_a_version_that_lacks_what_decode_needs_is_refused_at_start(
    tmp_path: Path, name: str, sentence: str
) -> None:
    with ExitStack() as stack:
        module = stack.enter_context(installed(VERSIONS[name]))
        with pytest.raises(UnsupportedVllm, match=sentence) as caught:
            FakeEngine(module, VERSIONS[name], str(tmp_path / "port"))
        assert name in str(caught.value)


def test_recompute_is_refused_at_start(tmp_path: Path) -> None:
    with installed(VERSIONS["0.32"]) as module, pytest.raises(UnsupportedVllm, match="fail"):
        FakeEngine(module, VERSIONS["0.32"], str(tmp_path / "port"), policy="recompute")


@pytest.mark.parametrize(
    ("options", "name"),
    [({"socket_path": "x"}, "socket_path"), ({"chunk_tokens": "8"}, "chunk_tokens")],
)
def test_an_unknown_or_wrong_option_is_refused_by_name(
    tmp_path: Path, options: dict[str, Any], name: str
) -> None:
    with installed(VERSIONS["0.32"]) as module, pytest.raises(LayoutError, match=name):
        FakeEngine(module, VERSIONS["0.32"], str(tmp_path / "port"), **options)


def test_a_backend_that_stores_kv_otherwise_is_refused_at_start(tmp_path: Path) -> None:
    def scrambled(key: Any, value: Any, cache: Any, slots: Any) -> None:
        cpu_writer(key.flip(-1), value, cache, slots)

    with installed(VERSIONS["0.32"]) as module:
        half = __import__("prfaas_connect.vllm.worker_half", fromlist=["x"])
        half.cache_writer = lambda config, name, cache: scrambled
        with pytest.raises(LayoutError, match="no known layout"):
            FakeEngine(module, VERSIONS["0.32"], str(tmp_path / "port"))


def test_a_new_version_without_the_optional_parts_still_works(tmp_path: Path) -> None:
    version = replace(
        VERSIONS["0.32"], name="1.0", request_hook=False, block_pool=False, worker_meta=False
    )
    with ExitStack() as stack:
        bench = Bench(version, tmp_path / "port", stack)
        engine = bench.engine()
        one = engine.add(prompt("a"))
        engine.run(one)
        assert one.status == "done"
