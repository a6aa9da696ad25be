"""Policy files: read back as written, and every mistake answered with what was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.parameters import SPANS, parameters_of
from policies.policy_file import Made, PolicyFile, is_policy_file, load_policy_file, to_yaml
from policies.priced import Priced
from policies.registry import POLICIES, make_policy
from prfaas.errors import ConfigError
from prfaas.queue_settings import QueueSettings
from prfaas.settings import PolicySettings

GOOD = "policy_version: 1\npolicy: priced\nparameters: {length_price_s: 2.5}\n"


def written(path: Path, text: str) -> Path:
    file = path / "policy.yaml"
    file.write_text(text)
    return file


def test_every_policy_has_its_parameters_listed_and_they_are_settings() -> None:
    assert set(SPANS) == set(POLICIES)
    for name in SPANS:
        assert set(parameters_of(name)) <= set(PolicySettings.model_fields)
    listed = {key for name in SPANS for key in parameters_of(name)}
    assert listed == set(PolicySettings.model_fields) - {"name", "file", "queue"}


def test_it_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    made = Made(study="s", objective="rate", trials=3, trained=1.5)
    file = PolicyFile(
        policy_version=1,
        policy="priced",
        parameters={"length_price_s": 2.5, "move_gain_s": None},
        queue=QueueSettings(name="srpt", ageing=0.5),
        made=made,
    )
    path = written(tmp_path, to_yaml(file))
    assert load_policy_file(path) == file
    assert is_policy_file(path)
    assert file.settings() == PolicySettings(
        name="priced", length_price_s=2.5, move_gain_s=None, queue=file.queue
    )


def test_a_setting_makes_the_policy_of_the_file(tmp_path: Path) -> None:
    policy = make_policy(PolicySettings(file=written(tmp_path, GOOD)))
    assert isinstance(policy, Priced)
    assert policy._length_price_s == 2.5


def test_a_file_and_other_keys_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="remove name, surge_s"):
        make_policy(PolicySettings(file=written(tmp_path, GOOD), name="paper", surge_s=1.0))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("policy: priced\n", "policy_version: Field required"),
        ("policy_version: 2\npolicy: priced\n", "policy_version: Input should be 1"),
        ("policy_version: 1\npolicy: prices\n", "no policy 'prices'; did you mean priced?"),
        ("policy_version: 1\npolicy: xyz\n", "there are always_local"),
        ("policy_version: 1\npolicy: priced\nparamters: {}\n", "did you mean parameters?"),
        (
            "policy_version: 1\npolicy: priced\nparameters: {link_budget: 3}\n",
            "parameters.link_budget: the unit is missing; did you mean link_budget_s?",
        ),
        (
            "policy_version: 1\npolicy: priced\nparameters: {lenght_price_s: 3}\n",
            "parameters.lenght_price_s: unknown key; did you mean length_price_s?",
        ),
        (
            "policy_version: 1\npolicy: priced\nparameters: {surge_s: 3}\n",
            "parameters.surge_s: policy priced does not read it",
        ),
        (
            "policy_version: 1\npolicy: priced\nparameters: {link_budget_s: -3}\n",
            "parameters.link_budget_s: Input should be greater than 0",
        ),
        ("policy_version: 1\npolicy: priced\nparameters: {link_budget_s: soon}\n", "parameters"),
        ("policy_version: 1\npolicy: priced\nqueue: {name: lifo}\n", "queue.name"),
        ("policy_version: 1\npolicy: priced\nqueue: {deadline: 3}\n", "queue.deadline"),
        ("- 1\n", "a policy file is a mapping"),
        ("a: [\n", "is not YAML"),
    ],
)
def test_a_mistake_names_file_key_and_what_was_meant(tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_policy_file(path)
    assert said in caught.value.message
    assert str(path) in caught.value.message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none.yaml"):
        load_policy_file(tmp_path / "none.yaml")
