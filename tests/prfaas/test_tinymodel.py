"""The tiny model is the same everywhere, and its greedy answers are worth comparing."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

from prfaas.testing.tinymodel import make_tiny_model

transformers.utils.logging.disable_progress_bar()


def digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.iterdir())
    }


def test_another_process_writes_the_same_files(tiny_model_dir: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from prfaas.testing.tinymodel import make_tiny_model\n"
        "make_tiny_model(Path(sys.argv[1]))\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=True)
    assert digests(tmp_path) == digests(tiny_model_dir)


def test_the_seed_changes_weights_and_nothing_else(tiny_model_dir: Path, tmp_path: Path) -> None:
    before, after = digests(tiny_model_dir), digests(make_tiny_model(tmp_path, seed=1))
    assert before.pop("model.safetensors") != after.pop("model.safetensors")
    assert before == after


def test_shards_hold_the_same_tensors(tiny_model_dir: Path, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, shards=2)
    merged = {}
    for path in tmp_path.glob("*.safetensors"):
        merged |= load_file(path)
    whole = load_file(tiny_model_dir / "model.safetensors")
    assert merged.keys() == whole.keys()
    assert all(np.array_equal(merged[name], whole[name]) for name in whole)


@torch.no_grad()
def test_greedy_answers_are_varied_clear_and_depend_on_the_whole_prompt(
    tiny_model_dir: Path,
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()
    answers, gaps = [], []
    for start in (3, 4):
        ids = torch.tensor([[start, *range(20, 120)]])
        cache, answer, step = transformers.DynamicCache(), [], ids
        for _ in range(60):
            best = model(step, cache=cache, use_cache=True).logits[0, -1].topk(2)
            gaps.append(float(best.values[0] - best.values[1]))
            answer.append(int(best.indices[0]))
            step = best.indices[:1].reshape(1, 1)
        answers.append(answer)
    assert answers[0] != answers[1]
    assert min(len(set(answer)) for answer in answers) > 20
    assert min(min(answer) for answer in answers) >= 3  # special tokens never win
    assert np.mean(np.array(gaps) > 0.1) > 0.9
