from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from local_engine.http.tool_calls import ToolCall, ToolCallReader, writes_tool_calls

CALL = '<tool_call>\n{"name": "f", "arguments": {"a":  1}}\n</tool_call>'
OTHER = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'


def read(*parts: str) -> tuple[str, list[ToolCall]]:
    reader, content, calls = ToolCallReader(), "", []
    for part in parts:
        more, new = reader.push(part)
        content += more
        calls += new
    assert reader.calls == len(calls)
    return content + reader.finish(), calls


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("plain text, no call", "plain text, no call", []),
        (CALL, "", ["f"]),
        (f"I look it up. \n{CALL}\n", "I look it up.", ["f"]),
        (f"{CALL}\n{OTHER}\n\n", "", ["f", "g"]),
        (f"a {CALL} b {OTHER} c", "abc", ["f", "g"]),
        ("text \n ", "text \n ", []),
        ("<tool_call>not json</tool_call> x", "<tool_call>not json</tool_call> x", []),
        (f"<tool_call>[]</tool_call> \n{CALL}", "<tool_call>[]</tool_call>", ["f"]),
        ("<tool_call>" + '{"name": "f"}' + "</tool_call>", None, []),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', None, []),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', None, []),
        ('a  <tool_call>{"name": "f", "argum', None, []),
        ("a < b <tool", None, []),
    ],
)
def test_calls_are_read_and_the_rest_is_content(
    text: str, content: str | None, names: list[str]
) -> None:
    got, calls = read(text)
    assert got == (text if content is None else content)
    assert [call.name for call in calls] == names
    assert [call.number for call in calls] == list(range(len(names)))


def test_arguments_are_what_the_model_wrote_and_ids_are_each_its_own() -> None:
    _, calls = read(CALL + CALL)
    assert [call.arguments for call in calls] == ['{"a":  1}'] * 2
    assert calls[0].id != calls[1].id
    assert calls[0].id.startswith("call_")


def test_arguments_nested_beyond_measure_are_text() -> None:
    deep = '<tool_call>{"name": "f", "arguments": {"a": %s}}</tool_call>'
    text = deep % ("[" * 5000 + "]" * 5000)
    assert read(text) == (text, [])
    assert json.loads(read(deep % "[[1]]")[1][0].arguments) == {"a": [[1]]}


PARTS = ["<tool_call>", "</tool_call>", CALL, OTHER, " ", "\n", "text", "<", "tool_", '{"name"']


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=8), st.lists(st.integers(0, 400), max_size=10))
def test_split_never_changes_what_comes_out(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    marks = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    content, calls = read(*(text[a:b] for a, b in pairwise(marks)))
    whole, whole_calls = read(text)
    assert content == whole
    assert [(c.number, c.name, c.arguments) for c in calls] == [
        (c.number, c.name, c.arguments) for c in whole_calls
    ]


def test_text_without_a_tag_is_not_held_back() -> None:
    reader = ToolCallReader()
    assert reader.push("one two")[0] == "one two"
    assert reader.push(" <") == ("", ())
    assert reader.push("3 is true")[0] == " <3 is true"


def test_the_form_is_known_by_the_template() -> None:
    assert writes_tool_calls("... within <tool_call></tool_call> tags: ...")
    assert not writes_tool_calls("{{ tools | tojson }}")
    assert not writes_tool_calls("<tool_call><function=name></function></tool_call>")
