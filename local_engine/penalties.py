"""What a request does to a token's logits before it is drawn: biases, then penalties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from local_engine.requests import SamplingParams


class History:
    """Which tokens penalties look at: those of a prompt, and each of its answer with its count.

    Its owner tells it of every token of the answer; nothing to close.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._in_prompt = frozenset(prompt)
        self._prompt_ids = torch.tensor(sorted(self._in_prompt), dtype=torch.int64)
        self._counts: Counter[int] = Counter()
        self.answered = 0
        """Tokens of the answer it has been told of."""

    def add(self, tokens: Sequence[int]) -> None:
        """The next tokens of the answer."""
        self._counts.update(tokens)
        self.answered += len(tokens)

    def seen(self) -> Tensor:
        """Ids of prompt and answer, each once, int64 on the CPU."""
        new = [token for token in self._counts if token not in self._in_prompt]
        return torch.cat((self._prompt_ids, torch.tensor(new, dtype=torch.int64)))

    def answer(self) -> tuple[Tensor, Tensor]:
        """Ids of the answer, each once, int64, and how often each came, float32; on the CPU."""
        ids = torch.tensor(list(self._counts), dtype=torch.int64)
        return ids, torch.tensor(list(self._counts.values()), dtype=torch.float32)


def penalises(params: SamplingParams) -> bool:
    """Whether its draws need a history."""
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def adjust(logits: Tensor, params: SamplingParams, history: History | None) -> Tensor:
    """Logits [vocab] after bias and penalties; a new tensor, or the same if there are none.

    The order is that of vLLM and, as far as it has them, transformers. The repetition penalty
    looks at prompt and answer, the others at the answer alone.
    """
    if not params.logit_bias and history is None:
        return logits
    adjusted = logits.clone()
    device = logits.device
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        adjusted[torch.tensor(ids, device=device)] += torch.tensor(
            biases, dtype=logits.dtype, device=device
        )
    if history is None:
        return adjusted
    if params.repetition_penalty != 1.0:
        seen = history.seen().to(device)
        scores, penalty = adjusted[seen], params.repetition_penalty
        adjusted[seen] = torch.where(scores < 0, scores * penalty, scores / penalty)
    if params.presence_penalty or params.frequency_penalty:
        answered, counts = (part.to(device) for part in history.answer())
        adjusted[answered] -= params.presence_penalty + params.frequency_penalty * counts
    return adjusted
