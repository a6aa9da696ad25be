"""Quality classes: what may become of KV on its way."""

from __future__ import annotations

import enum
from collections.abc import Iterable


class Quality(enum.StrEnum):
    """What a codec may change, best first; docs/codecs.md has the bounds."""

    EXACT = "exact"
    NEAR = "near"
    COMPACT = "compact"
    TIGHT = "tight"

    @property
    def allowed(self) -> tuple[Quality, ...]:
        """The classes that a request of this class may be served with: it and all better ones."""
        return _ORDER[: self.rank + 1]

    @property
    def rank(self) -> int:
        """0 for the best."""
        return _ORDER.index(self)

    @classmethod
    def worst(cls, classes: Iterable[Quality]) -> Quality:
        """The class of what was made with all of these."""
        return max(classes, key=lambda each: each.rank, default=cls.EXACT)


_ORDER = tuple(Quality)
