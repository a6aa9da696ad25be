"""Tests of a real vLLM; those in engine/ run in its own environment, through test_vllm_engine."""

from __future__ import annotations

import importlib.util

collect_ignore = [] if importlib.util.find_spec("vllm") else ["engine"]
