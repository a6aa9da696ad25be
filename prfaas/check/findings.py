"""What a check found: one line for each thing, with how to mend it where it is not well."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field


class Level(enum.StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    """It works, and will not for long or not as well as it could."""
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing: its setting or place, what was found, and what to do about it."""

    level: Level
    what: str
    found: str
    mend: str = ""


@dataclass(slots=True)
class Findings:
    """Collects findings in order; nothing to close."""

    items: list[Finding] = field(default_factory=list)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.items)

    def ok(self, what: str, found: str) -> None:
        self.items.append(Finding(Level.OK, what, found))

    def warn(self, what: str, found: str, mend: str) -> None:
        self.items.append(Finding(Level.WARN, what, found, mend))

    def fail(self, what: str, found: str, mend: str) -> None:
        self.items.append(Finding(Level.FAIL, what, found, mend))

    def add(self, others: Findings) -> None:
        self.items += others.items

    def count(self, level: Level) -> int:
        return sum(each.level is level for each in self.items)

    def failed(self) -> list[Finding]:
        return [each for each in self.items if each.level is Level.FAIL]

    def to_text(self) -> str:
        """Lines for people; what is wrong has how to mend it below."""
        lines = []
        for each in self.items:
            lines.append(f"{each.level.value:5} {each.what}: {each.found}")
            if each.mend:
                lines.append(f"      -> {each.mend}")
        failed, warned = self.count(Level.FAIL), self.count(Level.WARN)
        lines.append(f"{self.count(Level.OK)} ok, {warned} to look at, {failed} wrong")
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        return {
            "ok": not self.count(Level.FAIL),
            "findings": [
                {
                    "level": each.level.value,
                    "what": each.what,
                    "found": each.found,
                    "mend": each.mend or None,
                }
                for each in self.items
            ],
        }
