"""Lets what the connector says go where vLLM's own lines go."""

from __future__ import annotations

import logging

OURS, THEIRS = "prfaas_connect", "vllm"


def join_vllm_log() -> None:
    """Use vLLM's handlers and level, unless the operator has given us some.

    vLLM configures its own loggers only; elsewhere nothing below a warning would be seen.
    """
    ours, theirs = logging.getLogger(OURS), logging.getLogger(THEIRS)
    if ours.handlers or ours.level != logging.NOTSET or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
