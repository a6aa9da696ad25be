"""Chat prompts equal those of transformers; what a template refuses is the caller's error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from prfaas.chat_template import ChatTemplate
from prfaas.errors import ConfigError, InvalidRequest
from prfaas.tokens import Tokenizer

transformers.utils.logging.disable_progress_bar()

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'Say <b>"hi"</b> & é\n'},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": [1]}}]},
    {"role": "tool", "content": "{}"},
    {"role": "user", "content": "Again?"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
TEMPLATES = {
    "white space": "{%- for m in messages %}\n    {% if m.content is defined %}\n{{ m.role }}:"
    " {{ m.content | trim }}\n    {% endif %}\n{% endfor %}\n",
    "json": "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}|"
    "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls[0].arguments | tojson }}"
    "{% endif %}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index0 == 0 %}{% continue %}{% endif %}"
    "{{ m.role }}{% if loop.index0 == 3 %}{% break %}{% endif %}{% endfor %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{% set x = 'said' %}{{ x }}{% endgeneration %}{{ x }}"
    "{% else %}{{ m.role }}{% endif %}{% endfor %}",
    "special tokens": "{{ bos_token }}{{ messages[1].content }}{{ eos_token }}"
    "{% if documents is not none %}D{% endif %}{% if unknown is defined %}U{% endif %}",
    "tools": "{% if tools is not none %}{{ tools | tojson }}{% else %}none{% endif %}"
    "{% if add_generation_prompt %}>{% endif %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}{{ messages[::-1][0].role.split('s')[0].startswith('u') }}",
    "date": "{{ strftime_now('%Y-%m-%d') }}",
}


def directory_with(template: Any, source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    path = target / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return target


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_equal_those_of_transformers(
    tiny_model_dir: Path, tmp_path: Path, name: str, tools: Any
) -> None:
    directory = directory_with(TEMPLATES[name], tiny_model_dir, tmp_path / "model")
    reference = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer = Tokenizer.load(directory)
    for prompt in (True, False):
        want = reference.apply_chat_template(
            CHAT, tools=tools, tokenize=False, add_generation_prompt=prompt
        )
        assert tokenizer.render_chat(CHAT, tools, prompt) == want
    assert tokenizer.encode_chat(CHAT, tools) == tokenizer.encode(
        tokenizer.render_chat(CHAT, tools)
    )


def test_a_template_file_wins_and_a_tool_template_serves_requests_with_tools(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    directory = directory_with(named, tiny_model_dir, tmp_path / "model")
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.render_chat(CHAT) == "plain"
    assert tokenizer.render_chat(CHAT, TOOLS) == "tools"
    (directory / "chat_template.jinja").write_text("file {{ extra }}")
    assert Tokenizer.load(directory).render_chat(CHAT, TOOLS, extra=1) == "file 1"


@pytest.mark.parametrize(
    ("sources", "takes"),
    [
        ({"default": "{% if tools %}{{ tools }}{% endif %}"}, "default"),
        ({"default": "{% if not tools is defined %}{% set tools = none %}{% endif %}"}, "default"),
        ({"default": "plain", "tool_use": "{{ tools | length }}"}, "tool_use"),
        ({"default": "{{ tools }}", "rag": "{{ tools }}"}, "default"),
        ({"default": "no tools, {{ messages[0].tools }}"}, None),
        ({"default": "plain", "rag": "{{ tools }}"}, None),
        ({}, None),
    ],
)
def test_a_template_that_would_leave_tools_out_is_known(
    sources: dict[str, str], takes: str | None
) -> None:
    template = ChatTemplate(sources, {})
    assert template.tool_source == (None if takes is None else sources[takes])


def test_text_parts_are_joined_and_other_parts_are_refused() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}]) == "a\nb"
    with pytest.raises(InvalidRequest, match="'image_url' is not text") as caught:
        template.render([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "cannot render"),
        ("{{ messages[7].content.x }}", "cannot render"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{{ ''.__class__.__mro__ }}", "cannot render"),
        ("{% for i in range(10**9) %}x{% endfor %}", "cannot render"),
    ],
)
def test_what_a_template_refuses_is_an_invalid_request(source: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        ChatTemplate({"default": source}, {}).render([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


def test_template_arguments_cannot_replace_the_messages() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}{{ bos_token }}"}, {})
    message = {"role": "user", "content": "x"}
    assert template.render([message], bos_token="<b>") == "x<b>"
    with pytest.raises(TypeError):
        template.render([message], messages=[])


def test_a_model_without_a_template_refuses_chats() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTemplate({}, {}).render([{"role": "user", "content": "x"}])


def test_a_template_that_does_not_compile_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="'default' does not compile"):
        ChatTemplate({"default": "{% for %}"}, {})


@pytest.mark.parametrize("template", [7, [{"name": "default"}]])
def test_a_template_of_another_type_is_a_config_error(
    tiny_model_dir: Path, tmp_path: Path, template: Any
) -> None:
    directory = directory_with(template, tiny_model_dir, tmp_path / "model")
    with pytest.raises(ConfigError, match="chat_template"):
        Tokenizer.load(directory)
