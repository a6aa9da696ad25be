"""SmolLM2-135M over HTTP: the embedded engine reads the GGUF at P, vLLM safetensors at D."""

from __future__ import annotations

import json
import os
import pydoc_data.topics
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas.testing.stack import RunningStack
from prfaas.testing.vllm_decode_stack import vllm_decode_stack
from prfaas.testing.vllm_server import vllm_is_here
from prfaas.tokens import Tokenizer
from prfaas.up.paths import default_cache_dir

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not vllm_is_here(), reason="no vLLM here: scripts/vllm_env.sh builds it"),
]

OUTPUT = 16
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n'"
    " + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def safetensors_dir(demo_model_path: Path) -> Path:
    """The demo model's weights as fp32 safetensors, made once for each cache directory."""
    target = default_cache_dir() / "smollm2-135m-fp32"
    if not target.is_dir():
        scratch = target.with_name(f"{target.name}.{os.getpid()}")
        convert(demo_model_path, scratch)
        try:
            scratch.rename(target)
        except OSError:  # another process was faster
            shutil.rmtree(scratch)
    return target


def convert(gguf: Path, directory: Path) -> None:
    """Write a Hugging Face directory of the same weights and tokenizer."""
    from safetensors.torch import save_file

    from local_engine.loader import gguf_config
    from local_engine.models.llama import expected_tensors
    from local_engine.weights import GgufSource
    from prfaas.gguf_file import GgufFile

    directory.mkdir(parents=True)
    file = GgufFile(gguf)
    config = gguf_config(file)
    source = GgufSource(file, config)
    weights = {name: source.read(name).float().contiguous() for name in expected_tensors(config)}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(fields))
    Tokenizer.load(gguf)._backend.save(str(directory / "tokenizer.json"))
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": CHATML,
        "model_max_length": config.max_context,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))


@pytest.fixture(scope="module")
def stack(
    tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path, safetensors_dir: Path
) -> Iterator[RunningStack]:
    with vllm_decode_stack(
        tmp_path_factory.mktemp("smollm2") / "s",
        demo_model_path,
        safetensors_dir,
        block=32,
        kv_bytes=256 << 20,
        # The two engines and this machine's other work share its cores.
        limits={"first_frame_timeout_s": 60.0, "progress_timeout_s": 30.0},
        p_engine={"kv_memory_bytes": 256 << 20, "chunk_tokens": 128},
    ) as running:
        yield running
        assert "read back other bytes" not in running.log("d-agent")


@pytest.fixture(scope="module")
def text_tokens(demo_model_path: Path) -> list[int]:
    text = "\n".join(pydoc_data.topics.topics.values())[:60_000]
    return Tokenizer.load(demo_model_path).encode(text)


@pytest.mark.parametrize("length", [2, 33, 129, 487, 1000])
def test_natural_text_gives_the_tokens_of_a_local_run(
    stack: RunningStack, text_tokens: list[int], length: int
) -> None:
    start = random.Random(length).randrange(len(text_tokens) - length)
    prompt = text_tokens[start : start + length]
    local = stack.complete(
        prompt,
        url=stack.stack.d_engine_url,
        max_tokens=OUTPUT,
        timeout_s=110,
        cache_salt=f"oracle-{length}",
    )
    got = stack.complete(prompt, max_tokens=OUTPUT, timeout_s=110, cache_salt="remote")
    assert (local.status, got.status) == (200, 200), (local.body, got.body)
    assert got.token_ids == local.token_ids
    found = stack.record(got.request_id)["outcome"]
    assert (found["status"], found["received_tokens"]) == ("staged", length - 1)


def test_a_chat_knows_the_capital_of_france(stack: RunningStack) -> None:
    body = {
        "model": "test-model",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    got = stack.post(f"{stack.stack.gateway_url}/v1/chat/completions", body)
    assert got.status == 200, got.body
    assert "Paris" in got.body["choices"][0]["message"]["content"]
    assert stack.record(got.request_id)["outcome"]["status"] == "staged"
