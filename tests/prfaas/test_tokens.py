"""The tokenizer agrees with transformers, whatever file it comes from."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from prfaas.errors import ConfigError, InvalidRequest
from prfaas.testing.tinygguf import write_tiny_gguf
from prfaas.tokens import Tokenizer

# The bars would leave a semaphore behind, which the leak check reports.
transformers.utils.logging.disable_progress_bar()

_SCRIPTS = (
    (0x20, 0x7E),  # ASCII
    (0xA0, 0x17F),  # Latin
    (0x300, 0x36F),  # combining marks
    (0x370, 0x3FF),  # Greek
    (0x400, 0x4FF),  # Cyrillic
    (0x590, 0x6FF),  # Hebrew, Arabic
    (0x900, 0x97F),  # Devanagari
    (0x2000, 0x206F),  # punctuation, zero width, bidi
    (0x3040, 0x30FF),  # kana
    (0x4E00, 0x9FFF),  # CJK
    (0xAC00, 0xD7A3),  # Hangul
    (0x1F300, 0x1FAFF),  # emoji
    (0x10000, 0x10FFFF),  # anything astral
    (0x00, 0x1F),  # control
)
_PIECES = (
    "The quick brown fox",
    "don't, won't, I'LL, we've",
    "def f(x):\n    return x ** 2  # square\n",
    "\tif (a != b) { c += 1; }\r\n",
    "3.14159",
    "1234567890",
    "2024-01-31T23:59:59Z",
    "x=0x7fff_ffff",
    "https://example.org/a?b=c&d=%20",
    "naïve café Ünïcödé",
    "日本語のテキスト",
    "Ελληνικά русский العربية हिन्दी",
    "👩‍👩‍👧‍👦🏳️‍🌈",
    "e\u0301",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_start",
    "\ufffd",
    "\x00",
    "\u2028",
    "\u00a0\u3000",
)


def sample_texts(count: int, seed: int = 0) -> Iterator[str]:
    """Text of every kind: words, code, digits, scripts, special tokens, runs of white space."""
    rng = random.Random(seed)
    yield ""
    for _ in range(count - 1):
        parts = []
        for _ in range(rng.randint(1, 12)):
            kind = rng.random()
            if kind < 0.4:
                parts.append(rng.choice(_PIECES))
            elif kind < 0.6:
                parts.append(rng.choice((" ", "\n", "\t", "\r\n", " \n ")) * rng.randint(1, 9))
            elif kind < 0.7:
                parts.append(str(rng.randint(0, 10 ** rng.randint(1, 12))))
            else:
                low, high = rng.choice(_SCRIPTS)
                length = rng.randint(1, 8)
                parts.append("".join(chr(rng.randint(low, high)) for _ in range(length)))
        yield "".join(parts)


def reference_ids(reference: Any, text: str) -> list[int]:
    ids: list[int] = reference(text, add_special_tokens=False).input_ids
    return ids


@pytest.fixture(scope="module")
def tiny_gguf(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tiny_model_dir, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.mark.real_model
def test_the_demo_model_has_the_ids_of_transformers_on_1500_texts_and_one_digest(
    demo_model_path: Path, tmp_path: Path
) -> None:
    reference = transformers.AutoTokenizer.from_pretrained(
        demo_model_path.parent, gguf_file=demo_model_path.name
    )
    tokenizer = Tokenizer.load(demo_model_path)
    for text in sample_texts(1500):
        ids = tokenizer.encode(text)
        assert ids == reference_ids(reference, text), repr(text)
        # Not the text itself: this vocabulary has no token for some control bytes.
        assert tokenizer.decode(ids, skip_special=False) == reference.decode(ids)
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    want = reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert tokenizer.render_chat(chat) == want
    assert tokenizer.eos_ids == {reference.eos_token_id}
    assert tokenizer.bos_id == reference.bos_token_id
    reference.save_pretrained(tmp_path)
    assert Tokenizer.load(tmp_path).digest == tokenizer.digest


@pytest.mark.parametrize(
    "pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "deepseek-r1-qwen"]
)
def test_ids_from_gguf_equal_those_of_transformers_for_every_pre_tokeniser(
    tiny_model_dir: Path, tmp_path: Path, pre: str
) -> None:
    path = write_tiny_gguf(tiny_model_dir, tmp_path / "tiny.gguf", pre=pre)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    tokenizer = Tokenizer.load(path)
    for text in sample_texts(1000, seed=1):
        assert tokenizer.encode(text) == reference_ids(reference, text), repr(text)


def test_ids_from_a_directory_equal_those_of_transformers(tiny_model_dir: Path) -> None:
    reference = transformers.AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer = Tokenizer.load(tiny_model_dir)
    for text in sample_texts(1000, seed=2):
        ids = tokenizer.encode(text)
        assert ids == reference_ids(reference, text), repr(text)
        assert tokenizer.decode(ids, skip_special=False) == text


def test_directory_and_gguf_have_one_digest_and_the_same_ids(
    tiny_model_dir: Path, tiny_gguf: Path, tmp_path: Path
) -> None:
    directory, gguf = Tokenizer.load(tiny_model_dir), Tokenizer.load(tiny_gguf)
    assert directory.digest == gguf.digest
    assert (directory.vocab_size, directory.bos_id, directory.eos_ids, directory.special_ids) == (
        gguf.vocab_size,
        gguf.bos_id,
        gguf.eos_ids,
        gguf.special_ids,
    )
    text = "  12 <|im_start|>x\n\n"
    assert directory.encode(text) == gguf.encode(text)
    padded = write_tiny_gguf(tiny_model_dir, tmp_path / "padded.gguf", padding_tokens=5)
    assert Tokenizer.load(padded).digest == directory.digest
    assert Tokenizer.load(padded).vocab_size == directory.vocab_size + 5


def test_another_merge_order_or_special_token_is_another_digest(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    before = Tokenizer.load(tiny_model_dir).digest
    raw = json.loads((tiny_model_dir / "tokenizer.json").read_text())
    merges = raw["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    swapped = Tokenizer.load(tmp_path).digest
    merges[0], merges[1] = merges[1], merges[0]
    raw["added_tokens"][0]["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    assert len({before, swapped, Tokenizer.load(tmp_path).digest}) == 3


def test_special_tokens_are_skipped_in_text_unless_asked_for(tiny_model_dir: Path) -> None:
    tokenizer = Tokenizer.load(tiny_model_dir)
    ids = tokenizer.encode("a<|im_end|>b")
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special=False) == "a<|im_end|>b"
    assert [tokenizer.token_is_special(token_id) for token_id in ids] == [False, True, False]


def test_bytes_of_single_tokens_make_up_the_text(tiny_model_dir: Path) -> None:
    tokenizer = Tokenizer.load(tiny_model_dir)
    text = "naïve 日本語 👩‍👩‍👧 <|im_end|>\n\tx"
    ids = tokenizer.encode(text)
    assert b"".join(tokenizer.token_bytes(token) for token in ids) == text.encode()
    assert any(not tokenizer.token_bytes(token).isascii() for token in ids)
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""


def test_bytes_of_tokens_in_a_vocabulary_of_words_and_bytes(tmp_path: Path) -> None:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "h": 257}
    words = tokenizers.models.BPE(vocab=vocab, merges=[], byte_fallback=True)
    backend = tokenizers.Tokenizer(words)
    backend.decoder = tokenizers.decoders.Sequence([
        tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(),
        tokenizers.decoders.Fuse(),
    ])  # fmt: skip
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert [tokenizer.token_bytes(token) for token in (0xE2, 256, 257)] == [b"\xe2", b" ", b"h"]


@pytest.mark.parametrize(("add_bos", "add_eos"), [(True, False), (True, True), (False, True)])
def test_add_special_adds_what_the_files_say(
    tiny_model_dir: Path, tmp_path: Path, add_bos: bool, add_eos: bool
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_model_dir, directory)
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"add_bos_token": add_bos, "add_eos_token": add_eos}
    path.write_text(json.dumps(settings))
    gguf = write_tiny_gguf(
        tiny_model_dir,
        tmp_path / "tiny.gguf",
        metadata={
            "tokenizer.ggml.add_bos_token": add_bos,
            "tokenizer.ggml.add_eos_token": add_eos,
        },
    )
    for tokenizer in (Tokenizer.load(directory), Tokenizer.load(gguf)):
        plain = tokenizer.encode("hello")
        want = [1] * add_bos + plain + [2] * add_eos
        assert tokenizer.encode("hello", add_special=True) == want


def test_post_processor_of_tokenizer_json_counts_where_the_config_is_silent(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    backend.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "model" / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.load(tmp_path / "model")
    plain = tokenizer.encode("one two three four five six")
    assert len(plain) > 4
    assert tokenizer.encode("one two three four five six", add_special=True) == [1, *plain]
    assert len(tokenizer.encode("a")) == 1


def test_every_end_token_a_model_names_ends_an_answer(tiny_model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    assert Tokenizer.load(tmp_path / "model").eos_ids == {0, 2, 7}
    gguf = write_tiny_gguf(
        tiny_model_dir, tmp_path / "t.gguf", metadata={"tokenizer.ggml.eot_token_id": 7}
    )
    assert Tokenizer.load(gguf).eos_ids == {2, 7}


def test_a_lone_surrogate_is_an_invalid_request(tiny_model_dir: Path) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        Tokenizer.load(tiny_model_dir).encode("a\ud800b")


def test_loading_does_not_import_torch_or_transformers(tiny_model_dir: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from prfaas.tokens import Tokenizer\n"
        "Tokenizer.load(Path(sys.argv[1])).encode('hello')\n"
        "print(sorted({'torch', 'transformers', 'safetensors'} & sys.modules.keys()))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tiny_model_dir)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "tokenizer.json does not exist"),
        ({"tokenizer.json": "{"}, "not readable JSON"),
        ({"tokenizer.json": "[]"}, "not a JSON object"),
        ({"tokenizer.json": "{}"}, "is not a tokenizer"),
    ],
)
def test_a_broken_directory_is_named(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        Tokenizer.load(tmp_path)


def test_special_tokens_outside_the_vocabulary_are_named(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(ConfigError, match="'</s>' is not in the vocabulary"):
        Tokenizer.load(tmp_path / "model")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer model 'llama' is not supported"),
        ({"tokenizer.ggml.pre": "bert"}, "pre-tokeniser 'bert' is not supported"),
        ({"tokenizer.ggml.eos_token_id": 100000}, "eos token id 100000 is out of range"),
    ],
)
def test_a_gguf_tokenizer_that_is_not_supported_is_named(
    tiny_model_dir: Path, tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    path = write_tiny_gguf(tiny_model_dir, tmp_path / "t.gguf", metadata=metadata)
    with pytest.raises(ConfigError, match=message):
        Tokenizer.load(path)


def test_a_path_that_is_neither_directory_nor_gguf_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither a model directory nor a \.gguf file"):
        Tokenizer.load(tmp_path / "model.bin")
