"""The demo model as a Hugging Face directory, for engines that read no GGUF.

python -m local_engine.demo_safetensors    (prints the directory)
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file

from local_engine.demo_model import fetch_demo_model
from local_engine.loader import gguf_config
from local_engine.models.llama import expected_tensors
from local_engine.weights import GgufSource
from prfaas.errors import PrfaasError
from prfaas.gguf_file import GgufFile
from prfaas.tokens import Tokenizer
from prfaas.up.paths import default_cache_dir

DIRECTORY = "smollm2-135m-instruct"


def demo_model_directory(cache_dir: Path, progress: Callable[[str], None]) -> Path:
    """Path of the demo model's fp32 directory in `cache_dir`, made if it is not there yet.

    Raises ConfigError as `fetch_demo_model` does.
    """
    target = cache_dir / DIRECTORY
    if not target.is_dir():
        gguf = fetch_demo_model(cache_dir, progress)
        progress("writing the demo model as safetensors")
        with tempfile.TemporaryDirectory(prefix=".convert-", dir=cache_dir) as scratch:
            made = Path(scratch) / DIRECTORY
            convert(gguf, made)
            try:
                made.rename(target)
            except OSError:
                if not target.is_dir():  # else another process was faster
                    raise
    return target


def convert(gguf: Path, directory: Path) -> None:
    """Write config, weights (fp32) and tokenizer of a GGUF file of a Llama to a new directory."""
    directory.mkdir(parents=True)
    file = GgufFile(gguf)
    config = gguf_config(file)
    source = GgufSource(file, config)
    weights = {name: source.read(name).float().contiguous() for name in expected_tensors(config)}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer, metadata = Tokenizer.load(gguf), file.scalars()
    special = {
        f"{name}_token_id": metadata[key]
        for name in ("bos", "eos")
        if (key := f"tokenizer.ggml.{name}_token_id") in metadata
    }
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
        "torch_dtype": "float32",
        **special,
    }
    (directory / "config.json").write_text(json.dumps(fields, indent=2))
    (directory / "tokenizer.json").write_text(tokenizer.to_json())
    names = {
        name.removesuffix("_id"): tokenizer.decode([number], skip_special=False)
        for name, number in special.items()
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_context,
        "chat_template": metadata.get("tokenizer.chat_template"),
        **names,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def main() -> int:
    """Print the directory; progress goes to stderr."""
    try:
        made = demo_model_directory(default_cache_dir(), lambda t: print(t, file=sys.stderr))
    except PrfaasError as exc:
        print(exc.message, file=sys.stderr)
        return 1
    print(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
