"""Text to calibrate on and to evaluate on, from sources that have nothing in common."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from pydoc_data import topics

from prfaas.errors import ConfigError
from prfaas.tokens import Tokenizer

EVALUATION_MODULES = (
    "argparse", "turtle", "doctest", "smtplib", "configparser", "difflib", "statistics",
    "logging.handlers", "unittest.mock", "tarfile", "_pydecimal", "optparse", "zipfile",
)  # fmt: skip
"""Prose and code in turn: docstrings, comments, Python."""


def calibration_text() -> str:
    """The reference manual that comes with Python, reStructuredText prose."""
    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))


def evaluation_texts() -> list[str]:
    """Source files of the standard library, one text each."""
    found = []
    for name in EVALUATION_MODULES:
        try:
            found.append(inspect.getsource(importlib.import_module(name)))
        except (ImportError, OSError):
            continue
    if not found:
        raise ConfigError("this Python has no source of its standard library to evaluate on")
    return found


def read_text(path: Path) -> str:
    """A text file. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read text from {path}: {error}") from error


def cut(tokenizer: Tokenizer, text: str, tokens: int, at_tokens: int = 0) -> list[int]:
    """Tokens [at, at + tokens) of `text`. Raises ConfigError where it is shorter."""
    # Six characters a token is more than any natural text has.
    ids = tokenizer.encode(text[: (at_tokens + tokens) * 6])
    if len(ids) < at_tokens + tokens:
        raise ConfigError(f"a text of {len(ids)} tokens is shorter than {at_tokens + tokens}")
    return list(ids[at_tokens : at_tokens + tokens])
