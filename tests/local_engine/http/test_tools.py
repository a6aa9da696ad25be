"""Tools over HTTP: into the template as transformers has it, and calls out of the answer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from prfaas.tokens import Tokenizer

CHAT = "/v1/chat/completions"
BYTE_TOKENIZER = Path(__file__).parents[3] / "deploy" / "profiles" / "byte-tokenizer"
TOOL = {
    "type": "function",
    "function": {
        "name": "add", "description": "Adds <a> & <b>",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}  # fmt: skip
# Short, for the byte tokenizer's context of 200; after the manner of Qwen's.
TEMPLATE = (
    "{%- if tools %}T{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
    "<tool_call></tool_call>\n{% endif %}"
    "{%- for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]"
    "{%- endfor %}\n{% endfor %}"
    "{%- if add_generation_prompt %}a:{% endif %}"
)
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "1+2"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": "é"}'}},
    ]},
    {"role": "tool", "tool_call_id": "c", "content": "3"},
]  # fmt: skip
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("tools") / "tokenizer"
    shutil.copytree(BYTE_TOKENIZER, target)
    path = target / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return target


@pytest.fixture(scope="module")
def byte_tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


async def test_the_prompt_is_the_one_transformers_renders(server, says, directory: Path) -> None:
    server.core.script = says("ok")
    status, answer, _ = await server.post(CHAT, {"messages": MESSAGES, "tools": [TOOL]})
    assert status == 200, answer
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"), chat_template=TEMPLATE
    )
    parsed = json.loads(json.dumps(MESSAGES))
    parsed[1]["content"] = ""
    parsed[1]["tool_calls"][0]["function"]["arguments"] = {"a": "é"}
    want = theirs.apply_chat_template(
        parsed, tools=[TOOL], tokenize=False, add_generation_prompt=True
    )
    assert bytes(server.core.requests[0].prompt_tokens).decode() == want
    assert want.startswith("Tadd<tool_call>")
    assert '[add {"a": "é"}]' in want
    _, tokens, _ = await server.post("/tokenize", {"messages": MESSAGES, "tools": [TOOL]})
    assert tuple(tokens["tokens"]) == server.core.requests[0].prompt_tokens


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL], "tool_choice": "none"}])
async def test_without_tools_the_model_sees_none_and_tags_are_text(server, says, fields) -> None:
    server.core.script = says(CALL)
    _, answer, _ = await server.post(CHAT, {"messages": MESSAGES[:1], **fields})
    assert not bytes(server.core.requests[0].prompt_tokens).startswith(b"T")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": CALL, "refusal": None}
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("text", ["", "Let me see."])
async def test_a_call_comes_as_a_call(server, says, text: str) -> None:
    body = {"messages": MESSAGES[:1], "tools": [TOOL], "tool_choice": "auto"}
    server.core.script = says(f"{text}\n{CALL}\n{CALL}")
    _, answer, _ = await server.post(CHAT, body)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == (text or None)
    calls = choice["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [{"name": "add", "arguments": '{"a": 1}'}] * 2
    assert {call["type"] for call in calls} == {"function"}
    assert calls[0]["id"] != calls[1]["id"]

    events = [json.loads(e)["choices"][0] for e in (await server.stream(CHAT, body))[:-1]]
    deltas = [event["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == text
    streamed = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in streamed] == [0, 1]
    assert [call["function"] for call in streamed] == [call["function"] for call in calls]
    assert events[-1]["finish_reason"] == "tool_calls"


async def test_an_answer_that_is_cut_in_a_call_is_text_and_says_length(server, says) -> None:
    from local_engine.requests import FinishReason

    server.core.script = says(CALL[:-4], FinishReason.LENGTH)
    _, answer, _ = await server.post(CHAT, {"messages": MESSAGES[:1], "tools": [TOOL]})
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == CALL[:-4]
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "length"
