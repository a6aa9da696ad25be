from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from local_engine.paced_profile import PacedProfile, load_profile
from prfaas.errors import ConfigError
from prfaas.tokens import Tokenizer

PROFILES = Path(__file__).parents[2] / "deploy" / "profiles"
SHIPPED = sorted(PROFILES.glob("*.yaml"))
GOOD = {
    "name": "test",
    "source": "made up",
    "tokenizer": "byte-tokenizer",
    "model": {
        "layers": 2,
        "kv_heads": 2,
        "head_dim": 4,
        "dtype": "float32",
        "max_context": 64,
    },
    "prefill": {"base_s": 0.1, "token_s": 0.01, "chunk_tokens": 16},
    "decode": {"step_s": 0.02, "max_batch": 4},
}


def write(path: Path, **changes: object) -> Path:
    data = {**GOOD, **changes}
    path.write_text(yaml.safe_dump({k: v for k, v in data.items() if v is not None}))
    return path


def test_a_good_profile_is_read(tmp_path: Path) -> None:
    profile = load_profile(write(tmp_path / "p.yaml"))
    assert profile.tokenizer == tmp_path / "byte-tokenizer"
    assert profile.layout.token_bytes == 2 * 2 * 2 * 4 * 4
    assert profile.time_scale == 1.0


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"name": None}, "name"),
        ({"name": "two words"}, "name"),
        ({"source": ""}, "source"),
        ({"extra": 1}, "extra"),
        ({"time_scale": 0}, "time_scale"),
        ({"model": {**GOOD["model"], "dtype": "int8"}}, "model.dtype"),
        ({"model": {**GOOD["model"], "layers": 0}}, "model.layers"),
        ({"model": {**GOOD["model"], "layers": "2"}}, "model.layers"),
        ({"model": {**GOOD["model"], "heads": 2}}, "model.heads"),
        ({"prefill": {**GOOD["prefill"], "token_s": 0.0}}, "prefill.token_s"),
        ({"prefill": {**GOOD["prefill"], "base_s": -1.0}}, "prefill.base_s"),
        ({"decode": {**GOOD["decode"], "step_s": "fast"}}, "decode.step_s"),
        ({"decode": {"step_s": 0.1}}, "decode.max_batch"),
    ],
)
def test_a_bad_value_is_an_error_that_names_file_and_key(
    tmp_path: Path, changes: dict, key: str
) -> None:
    path = write(tmp_path / "p.yaml", **changes)
    with pytest.raises(ConfigError) as caught:
        load_profile(path)
    assert str(path) in caught.value.message
    assert f"{key}:" in caught.value.message


@pytest.mark.parametrize("content", ["a: [", "- 1", "", "\xff"])
def test_a_file_that_is_no_mapping_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"p\.yaml"):
        load_profile(path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_profile(tmp_path / "none.yaml")


def test_times_do_not_change_the_identity_and_kv_does(tmp_path: Path) -> None:
    profile = load_profile(write(tmp_path / "a.yaml"))
    faster = load_profile(write(tmp_path / "b.yaml", name="other", time_scale=0.5))
    other = load_profile(write(tmp_path / "c.yaml", model={**GOOD["model"], "seed": 1}))
    assert profile.config_digest == faster.config_digest
    assert profile.config_digest != other.config_digest


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_profiles_load_with_their_tokenizer_and_name_their_source(path: Path) -> None:
    profile = load_profile(path)
    assert profile.source
    assert Tokenizer.load(profile.tokenizer).encode("hi") == [104, 105]


def test_there_are_two_shipped_profiles_at_least() -> None:
    assert len(SHIPPED) >= 2


@pytest.mark.parametrize("tokens", [1000, 8192, 32768])
def test_the_paper_profile_takes_the_times_of_the_paper(tokens: int) -> None:
    curve = _paper().prefill.curve
    expected = 0.469 + 1.300e-4 * tokens + 2.94e-10 * tokens**2
    assert curve.seconds(tokens) == pytest.approx(expected)


def test_the_paper_profile_has_the_papers_decode_step_and_kv() -> None:
    profile = _paper()
    assert profile.decode.max_batch == 20
    assert profile.decode.seconds(20, 500_000) == 0.025
    assert profile.layout.token_bytes == 17_280


def _paper() -> PacedProfile:
    return load_profile(PROFILES / "prfaas-paper-h20.yaml")
