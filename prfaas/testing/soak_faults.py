"""Faults of a soak, one after the other: chosen and timed by a seed, undone before the next."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable

from prfaas.testing.link import LinkShape, Way
from prfaas.testing.stack import RunningStack

PROCESSES = ("p-agent", "p-engine", "d-agent")
PAUSE_S = (0.5, 4.0)
"""Between two faults: at times one begins before all have recovered from the last."""


class Faults:
    """Owns the thread that breaks things; `stop` ends it. `quiet` keeps it from beginning more.

    D's engine and the gateway are stopped at times, and never killed: what they have answered
    cannot be taken back, so no fault here excuses a broken answer.
    """

    def __init__(self, stack: RunningStack, shape: LinkShape, *, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.failure = ""
        self.quiet = threading.Lock()
        self._stack = stack
        self._shape = shape
        self._rng = random.Random(f"{seed}/faults")
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="faults")
        self._kinds: dict[str, tuple[int, Callable[[], None]]] = {
            "kill": (5, self._kill),
            "drain": (1, self._drain),
            "stop": (4, self._stop),
            "cut": (3, self._cut),
            "cut one lane": (3, self._cut_lane),
            "cut later": (2, self._cut_later),
            "stall": (3, self._stall),
            "blackhole": (3, self._blackhole),
            "forget idle": (1, self._forget),
            "corrupt": (5, self._corrupt),
            "refuse": (2, self._refuse),
            "thin link": (3, self._thin),
            "long link": (2, self._long),
        }

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns once the last fault is undone."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        names = list(self._kinds)
        weights = [weight for weight, _ in self._kinds.values()]
        while not self._stopping.wait(self._rng.uniform(*PAUSE_S)):
            with self.quiet:
                name = self._rng.choices(names, weights)[0]
                try:
                    self._kinds[name][1]()
                except Exception as exc:
                    self.failure = f"{name}: {exc!r}"
                    return

    def _hold(self, name: str, low_s: float, high_s: float) -> None:
        self.counts[name] += 1
        self._stopping.wait(self._rng.uniform(low_s, high_s))

    # --- processes ---

    def _kill(self) -> None:
        name = self._rng.choice(PROCESSES)
        self._stack.kill(name)
        self._hold(f"kill {name}", 0.0, 2.0)
        self._stack.restart(name)

    def _drain(self) -> None:
        name = self._rng.choice(("p-agent", "d-agent"))
        self.counts[f"drain {name}"] += 1
        status = self._stack.terminate(name)
        if status != 0:
            raise AssertionError(f"{name} ended with status {status} when told to drain")
        self._stack.restart(name)

    def _stop(self) -> None:
        name = self._rng.choice((*PROCESSES, "d-engine", "gateway"))
        self._stack.signal(name, signal.SIGSTOP)
        try:
            self._hold(f"stop {name}", 0.1, 3.0 if name in PROCESSES else 1.0)
        finally:
            self._stack.signal(name, signal.SIGCONT)

    # --- link ---

    def _cut(self) -> None:
        self.counts["cut"] += 1
        self._stack.bend(lambda link: link.drop_connections())

    def _stall(self) -> None:
        self._stack.bend(lambda link: link.stall(True))
        self._hold("stall", 0.1, 3.0)
        self._stack.bend(lambda link: link.stall(False))

    def _cut_lane(self) -> None:
        self.counts["cut one lane"] += 1
        self._stack.bend(lambda link: link.drop_busiest())

    def _cut_later(self) -> None:
        nbytes = self._rng.randrange(1, 2_000_000)
        self.counts["cut later"] += 1
        self._stack.bend(lambda link: link.cut_after(nbytes))

    def _blackhole(self) -> None:
        way = self._rng.choice(list(Way))
        self._stack.bend(lambda link: link.blackhole(True, way))
        self._hold(f"blackhole {way}", 0.1, 2.0)
        self._stack.bend(lambda link: link.blackhole(False))

    def _forget(self) -> None:
        self._stack.bend(lambda link: link.forget_idle(0.5))
        self._hold("forget idle", 1.0, 3.0)
        self._stack.bend(lambda link: link.forget_idle(0.0))

    def _corrupt(self) -> None:
        chunks = self._rng.choice((1, 1, 3))
        self.counts["corrupt"] += 1
        self._stack.bend(lambda link: link.corrupt_down(chunks))
        time.sleep(0.2)

    def _refuse(self) -> None:
        self._stack.bend(lambda link: link.refuse(True))
        self._stack.bend(lambda link: link.drop_connections())
        self._hold("refuse", 0.1, 2.0)
        self._stack.bend(lambda link: link.refuse(False))

    def _thin(self) -> None:
        rate = self._rng.choice((2e6, 5e6))
        self._bent("thin link", LinkShape(rate, self._shape.rtt_s))

    def _long(self) -> None:
        rtt_s = self._rng.choice((0.08, 0.2))
        self._bent("long link", LinkShape(self._shape.rate_bits_per_s, rtt_s))

    def _bent(self, name: str, shape: LinkShape) -> None:
        self._stack.bend(lambda link: link.set_shape(shape))
        self._hold(name, 0.5, 4.0)
        self._stack.bend(lambda link: link.set_shape(self._shape))
