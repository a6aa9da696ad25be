"""What the design assumes of vLLM: a request whose KV is not known yet blocks nobody, and how that
ends. Tested on vLLM itself, before anything is built on it.
"""

from __future__ import annotations

from prfaas.testing.vllm_inprocess import InProcessVllm

PROMPT = [20 + index % 300 for index in range(100)]
OTHER = [400 - index % 300 for index in range(70)]


def test_requests_that_come_after_one_that_waits_are_served(vllm: InProcessVllm) -> None:
    vllm.agent.script.status = ""
    waits = vllm.add(PROMPT)
    vllm.step()
    others = [vllm.add([*OTHER, index + 1], plan=False) for index in range(3)]
    vllm.finish(*others)
    assert vllm.status(waits) == "WAITING"
    assert waits.tokens == []
    assert vllm.blocks(waits) == []
    vllm.abort(waits)


def test_a_request_that_runs_keeps_running_while_another_waits(vllm: InProcessVllm) -> None:
    vllm.agent.script.status = ""
    runs = vllm.add(OTHER, plan=False, max_tokens=30)
    vllm.steps(lambda: runs.tokens)
    waits = vllm.add(PROMPT)
    before = len(runs.tokens)
    for _ in range(10):
        vllm.step()
    assert len(runs.tokens) == before + 10
    vllm.abort(waits)
    vllm.finish(runs)


def test_a_request_that_waits_is_asked_about_in_every_step(vllm: InProcessVllm) -> None:
    asked = []
    inner = vllm.connector.get_num_new_matched_tokens

    def counted(request: object, computed: int) -> object:
        asked.append(computed)
        return inner(request, computed)

    vllm.agent.script.status = ""
    vllm.connector.get_num_new_matched_tokens = counted
    try:
        waits = vllm.add(PROMPT)
        for _ in range(20):
            vllm.step()
        assert asked == [0] * 20
        vllm.abort(waits)
        for _ in range(5):
            vllm.step()
        assert len(asked) == 20
    finally:
        del vllm.connector.get_num_new_matched_tokens


def test_waiting_ends_with_the_answer_and_the_request_goes_its_way(vllm: InProcessVllm) -> None:
    expected = vllm.local_run(PROMPT)
    vllm.agent.script.status = ""
    waits = vllm.add(PROMPT)
    for _ in range(10):
        vllm.step()
    vllm.agent.script.status = "local"
    vllm.agent.answer(vllm.agent.asked[0])
    vllm.finish(waits)
    assert waits.tokens == expected
    assert waits.cached_tokens == 0


def test_waiting_ends_with_an_abort_and_nothing_is_left(vllm: InProcessVllm) -> None:
    vllm.agent.script.status = ""
    free = vllm.free_blocks
    waits = vllm.add(PROMPT)
    for _ in range(3):
        vllm.step()
    vllm.abort(waits)
    vllm.step()
    assert vllm.status(waits) == ""
    assert vllm.free_blocks == free
    vllm.agent.wait_for(lambda agent: agent.asked[0].aborted)


def test_the_engine_does_not_run_hot_while_all_it_has_waits(vllm: InProcessVllm) -> None:
    import time

    vllm.agent.script.status = ""
    waits = vllm.add(PROMPT)
    vllm.step()
    started, busy = time.monotonic(), time.process_time()
    while time.monotonic() - started < 1.0:
        vllm.step()
    used = time.process_time() - busy
    vllm.abort(waits)
    assert used < 0.6
