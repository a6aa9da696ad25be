"""How long this engine takes: the prefill curve, fitted online, and the mean decode step."""

from __future__ import annotations

from statistics import median

import numpy as np
import numpy.typing as npt

from prfaas.snapshot import PrefillCurve

_Vector = npt.NDArray[np.float64]

# Chunks after which a measurement counts half.
HALF_LIFE_CHUNKS = 64
# How much the warm-up's shape counts against measurements, in chunks: it decides what they leave
# open, such as the share of base time while all chunks have the same size.
_PRIOR_CHUNKS = 2.0
# A measurement further off than this, relative to the estimate, is an outlier and clipped.
_OUTLIER = 0.5
# So many of them in a row are believed: the machine has changed.
_BELIEVE_AFTER = 5
_PACE_WEIGHT = 0.1
# Nothing is for free: a curve that was measured must not look like one that was not.
_MIN_TOKEN_S = 1e-9
_STEP_WEIGHT = 0.1
# Coefficients that may be other than zero. Where measurements do not tell two apart the first wins:
# time goes to tokens rather than to chunks or context.
_SUPPORTS = ((0, 1, 2), (0, 1), (1, 2), (1,), (0, 2), (0,), (2,))


class PrefillFit:
    """Recursive fit of chunk seconds = base + token * u + token_context * u * (c + u / 2).

    u: tokens of the chunk, c: tokens before it. Relative errors count, coefficients are never
    negative, old measurements fade. The first measurements (the warm-up) set the shape; later ones
    correct it, and scale it where they say nothing about it.
    """

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._decay = 0.5 ** (1 / HALF_LIFE_CHUNKS)
        self._gram = np.zeros((3, 3))
        self._moment = np.zeros(3)
        self._prior: _Vector | None = None
        self._pace = 1.0
        self._outliers: list[float] = []
        self._coefficients = np.zeros(3)

    @property
    def curve(self) -> PrefillCurve:
        base, token, context = (float(x) for x in self._coefficients)
        if base or context:
            token = max(token, _MIN_TOKEN_S)
        return PrefillCurve(base, token, context, self._chunk_tokens)

    def observe(self, tokens: int, context: int, seconds: float) -> None:
        """One measured chunk of `tokens` after `context`; no time at all says nothing."""
        if seconds <= 0:
            return
        features = _features(tokens, context)
        if self._prior is not None:
            seconds = self._judge(features, seconds, self._prior)
        weighted = features / seconds
        self._gram = self._decay * self._gram + np.outer(weighted, weighted)
        self._moment = self._decay * self._moment + weighted
        self._solve()

    def finish_warm_up(self) -> None:
        """Take the present fit as the shape that later measurements correct."""
        self._prior = self._coefficients.copy()
        self._forget()

    def _judge(self, features: _Vector, seconds: float, prior: _Vector) -> float:
        """The measurement, clipped if it is an outlier. Several in a row are a change of pace: what
        was measured before is void, and the warm-up's shape holds at the new pace.
        """
        expected = float(features @ self._coefficients)
        ratio = seconds / max(float(features @ prior), 1e-9)
        if abs(seconds - expected) <= _OUTLIER * expected:
            self._outliers.clear()
        else:
            self._outliers.append(ratio)
            if len(self._outliers) < _BELIEVE_AFTER:
                seconds = expected * (1 + _OUTLIER if seconds > expected else 1 - _OUTLIER)
            else:
                self._pace = median(self._outliers)
                self._outliers.clear()
                self._forget()
        self._pace += _PACE_WEIGHT * (seconds / max(float(features @ prior), 1e-9) - self._pace)
        return seconds

    def _forget(self) -> None:
        self._gram[:] = 0
        self._moment[:] = 0

    def _solve(self) -> None:
        gram, moment = self._gram, self._moment
        if self._prior is not None:
            # Stand-ins for measurements on the warm-up's curve, at the machine's present pace.
            target = self._prior * self._pace
            for tokens, context in _anchors(self._chunk_tokens):
                features = _features(tokens, context)
                weighted = features / max(float(features @ target), 1e-9)
                gram = gram + _PRIOR_CHUNKS / 4 * np.outer(weighted, weighted)
                moment = moment + _PRIOR_CHUNKS / 4 * weighted
        self._coefficients = _nonnegative(gram, moment)


class MovingMean:
    """Exponentially weighted mean of seconds; zero while there are none."""

    def __init__(self, weight: float = _STEP_WEIGHT) -> None:
        self._weight = weight
        self.mean_s = 0.0

    def observe(self, seconds: float) -> None:
        if self.mean_s == 0.0:
            self.mean_s = seconds
        else:
            self.mean_s += self._weight * (seconds - self.mean_s)


def _features(tokens: int, context: int) -> _Vector:
    return np.array([1.0, tokens, tokens * (context + tokens / 2)])


def _anchors(chunk_tokens: int) -> list[tuple[int, int]]:
    small = max(1, chunk_tokens // 8)
    return [
        (small, 0),
        (chunk_tokens, 0),
        (small, 8 * chunk_tokens),
        (chunk_tokens, 8 * chunk_tokens),
    ]


def _nonnegative(gram: npt.NDArray[np.float64], moment: _Vector) -> _Vector:
    """Least squares with coefficients of at least zero: the best support."""
    best, best_cost = np.zeros(3), 0.0
    scale = np.sqrt(np.maximum(np.diag(gram), 1e-300))
    tie = 1e-9 * float((moment / scale) @ (moment / scale))
    for support in _SUPPORTS:
        at = np.array(support)
        scaled = gram[np.ix_(at, at)] / np.outer(scale[at], scale[at])
        found = np.linalg.lstsq(scaled, moment[at] / scale[at], rcond=1e-10)[0] / scale[at]
        if (found < 0).any():
            continue
        cost = float(found @ gram[np.ix_(at, at)] @ found - 2 * moment[at] @ found)
        if cost < best_cost - tie:
            best, best_cost = np.zeros(3), cost
            best[at] = found
            if len(support) == 3:
                break  # The unconstrained optimum is one; nothing beats it.
    return best
