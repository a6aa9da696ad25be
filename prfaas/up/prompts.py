"""Prompts of the demonstration: real questions about texts that come with every Python."""

from __future__ import annotations

from prfaas.errors import ConfigError

SHORT = "What is the capital of France? Answer in one sentence."

CHATS = (
    "Write a long story about a lighthouse keeper.",
    "Explain step by step how bread is baked.",
    "Describe a walk through a forest in autumn.",
    "Tell me about the history of the bicycle.",
)

_LONG_TOPIC = "objects"
_LONG_QUESTION = "In Python, what three things does every object have? Answer in one sentence."
_QUEUED_TOPIC = "naming"
_WARM_UP_TOPIC = "typesseq-mutable"
_BURST_TOPICS = ("sequence-types", "function", "numeric-types", "identifiers", "async", "raise")
_BURST_CHARS = 2400


def long_prompt() -> str:
    """About 1,100 tokens of the language reference and a question about them."""
    return f"{_topic(_LONG_TOPIC)}\n\n{_LONG_QUESTION}"


def queued_prompt() -> str:
    """About 1,500 tokens that keep D busy."""
    return f"{_topic(_QUEUED_TOPIC)}\n\nSummarise the text above."


def warm_up_prompt() -> str:
    """About 1,500 tokens that no other prompt begins with."""
    return f"{_topic(_WARM_UP_TOPIC)}\n\nSummarise the text above."


def burst_prompts(label: str, count: int) -> list[str]:
    """About 600 tokens each; no two begin alike, so that no prefix cache helps."""
    return [
        f"{label} {number}: {_topic(_BURST_TOPICS[number % len(_BURST_TOPICS)])[:_BURST_CHARS]}"
        "\n\nSummarise the text above."
        for number in range(count)
    ]


def _topic(name: str) -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError as exc:
        raise ConfigError(
            "this Python came without pydoc_data, whose text the demonstration reads"
        ) from exc
    text: str = topics[name]
    return text.strip()
