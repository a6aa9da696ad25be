"""Generated workloads: the paper's lengths, Poisson or bursty arrivals, sessions that grow."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from itertools import repeat
from statistics import NormalDist
from typing import Literal, Self

from pydantic import Field, model_validator

from policies.workload.request import BLOCK_TOKENS, Request
from prfaas.profile import Part

_NORMAL = NormalDist()


class Lengths(Part):
    """Log-normal lengths between two bounds; the defaults are the paper's prompts."""

    mu: float = Field(9.90, description="Mean of the logarithm of tokens.")
    sigma: float = Field(1.00, gt=0, description="Deviation of the logarithm of tokens.")
    low_tokens: int = Field(128, ge=1, description="Shortest.")
    high_tokens: int = Field(131072, ge=1, description="Longest.")

    @model_validator(mode="after")
    def _bounds_hold_some(self) -> Self:
        if self.high_tokens < self.low_tokens:
            raise ValueError("high_tokens must be at least low_tokens")
        # Half a token more and less: what is drawn is rounded, and one length is a fair wish.
        if not self._cdf(self.high_tokens + 0.5) - self._cdf(self.low_tokens - 0.5) > 1e-6:
            raise ValueError(
                f"less than one draw in a million of mu {self.mu:g} and sigma {self.sigma:g} lies "
                f"between {self.low_tokens} and {self.high_tokens} tokens"
            )
        return self

    def quantile(self, share: float) -> float:
        """Tokens that `share` of the draws do not exceed."""
        low, high = self._cdf(self.low_tokens), self._cdf(self.high_tokens)
        return math.exp(self.mu + self.sigma * _normal_quantile(low + share * (high - low)))

    def draw(self, rng: random.Random) -> int:
        tokens = round(self.quantile(rng.random()))
        return min(max(tokens, self.low_tokens), self.high_tokens)

    def _cdf(self, tokens: float) -> float:
        return 0.5 * math.erfc(-(math.log(tokens) - self.mu) / self.sigma / math.sqrt(2))


class Answers(Lengths):
    """Log-normal lengths of answers between two bounds; by default with the mean of a public trace
    of conversations.
    """

    mu: float = Field(5.60, description="Mean of the logarithm of tokens.")
    sigma: float = Field(0.70, gt=0, description="Deviation of the logarithm of tokens.")
    low_tokens: int = Field(1, ge=1, description="Shortest.")
    high_tokens: int = Field(8192, ge=1, description="Longest.")


class Arrivals(Part):
    """When requests come: Poisson, or Poisson whose rate switches between calm and bursts."""

    rate_per_s: float = Field(2.5, gt=0, description="Requests a second, over all.")
    kind: Literal["poisson", "bursty"] = Field("poisson", description="How they come.")
    burst_factor: float = Field(4.0, gt=1, description="Rate in a burst over the rate between.")
    burst_s: float = Field(20.0, gt=0, description="Mean length of a burst.")
    calm_s: float = Field(80.0, gt=0, description="Mean time between two bursts.")

    def times(self, rng: random.Random) -> Iterator[float]:
        """Seconds of arrivals, without end."""
        if self.kind == "poisson":
            now = 0.0
            while True:
                now += rng.expovariate(self.rate_per_s)
                yield now
        burst_share = self.burst_s / (self.burst_s + self.calm_s)
        calm_rate = self.rate_per_s / (1 + burst_share * (self.burst_factor - 1))
        now, bursting = 0.0, False
        while True:
            mean_s = self.burst_s if bursting else self.calm_s
            rate = calm_rate * (self.burst_factor if bursting else 1.0)
            end = now + rng.expovariate(1 / mean_s)
            now += rng.expovariate(rate)
            while now < end:
                yield now
                now += rng.expovariate(rate)
            # Poisson arrivals have no memory: the next phase draws anew.
            now, bursting = end, not bursting


class Sessions(Part):
    """Conversations: each turn's prompt is all that was said before, and more."""

    turns: float = Field(4.0, ge=1, description="Mean turns of a session.")
    system_tokens: int = Field(2048, ge=0, description="Prefix that all sessions share.")
    turn_tokens: Lengths = Field(
        Lengths(mu=6.5, sigma=1.2, low_tokens=16, high_tokens=65536),
        description="What a user adds each turn.",
    )
    think_s: float = Field(30.0, ge=0, description="Mean time from an answer to the next turn.")
    answer_token_s: float = Field(0.03, ge=0, description="Assumed time of a token of an answer.")
    max_tokens: int = Field(131072, ge=1, description="A session ends before a longer prompt.")


class Generator(Part):
    """A generated workload; the same seed gives the same requests."""

    kind: Literal["lengths", "sessions"] = Field("lengths", description="Single or sessions.")
    requests: int = Field(10000, ge=1, description="How many.")
    seed: int = Field(0, ge=0, description="Seed of all draws.")
    arrivals: Arrivals = Field(Arrivals(), description="Of requests, or of sessions' first turns.")
    prompt: Lengths = Field(Lengths(), description="Prompts of single requests.")
    output_tokens: int = Field(
        1024, ge=1, description="Tokens of every answer, where `output` does not say it."
    )
    output: Answers | None = Field(
        None, description="Lengths of answers, where they differ; none: all have `output_tokens`."
    )
    sessions: Sessions = Field(Sessions(), description="For kind `sessions`.")

    @model_validator(mode="after")
    def _one_kind_of_answers(self) -> Self:
        if self.output is not None and "output_tokens" in self.model_fields_set:
            raise ValueError("output and output_tokens: give one of them, not both")
        return self

    def stream(self) -> Iterator[Request]:
        """The requests, in order of arrival."""
        return self._single() if self.kind == "lengths" else self._in_sessions()

    def _single(self) -> Iterator[Request]:
        rng, lengths = random.Random(self.seed), random.Random(f"lengths {self.seed}")
        times, answers = self.arrivals.times(rng), self._answers()
        for number in range(self.requests):
            yield Request(number, next(times), self.prompt.draw(lengths), next(answers))

    def _in_sessions(self) -> Iterator[Request]:
        rng, shape = random.Random(self.seed), random.Random(f"sessions {self.seed}")
        spec, starts, answers = self.sessions, self.arrivals.times(rng), self._answers()
        waiting: list[tuple[float, int, tuple[int, ...], int, int]] = []
        next_start, session, made = next(starts), 0, 0
        system = tuple(range(-(spec.system_tokens // BLOCK_TOKENS), 0))
        next_block = 0
        while made < self.requests:
            if not waiting or next_start <= waiting[0][0]:
                tokens = spec.system_tokens + spec.turn_tokens.draw(shape)
                heapq.heappush(waiting, (next_start, session, system, tokens, self._turns(shape)))
                session, next_start = session + 1, next(starts)
                continue
            now, who, shared, tokens, turns = heapq.heappop(waiting)
            if tokens > spec.max_tokens:
                continue
            # Ids of whole blocks stay from turn to turn; a part-filled last one is always new.
            new = -(-tokens // BLOCK_TOKENS) - len(shared)
            blocks = (*shared, *range(next_block, next_block + new))
            next_block += new
            answer = next(answers)
            yield Request(made, now, tokens, answer, blocks)
            made += 1
            if turns > 1:
                pause = rng.expovariate(1 / spec.think_s) if spec.think_s else 0.0
                then = now + answer * spec.answer_token_s + pause
                more = tokens + answer + spec.turn_tokens.draw(shape)
                whole = blocks[: tokens // BLOCK_TOKENS]
                heapq.heappush(waiting, (then, who, whole, more, turns - 1))

    def _answers(self) -> Iterator[int]:
        """Tokens of one answer after the other; drawn apart, so they change nothing else."""
        if self.output is None:
            yield from repeat(self.output_tokens)
        else:
            rng = random.Random(f"answers {self.seed}")
            while True:
                yield self.output.draw(rng)

    def _turns(self, rng: random.Random) -> int:
        """Geometric with the wanted mean."""
        if self.sessions.turns <= 1:
            return 1
        going_on = 1 - 1 / self.sessions.turns
        return 1 + int(math.log(1 - rng.random()) / math.log(going_on))


def _normal_quantile(share: float) -> float:
    """Inverse of the normal distribution function."""
    return _NORMAL.inv_cdf(min(max(share, 1e-15), 1 - 1e-15))
