"""Site D in the simulator: prefilling and decoding nodes apart, or nodes that do both."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

from policies.scenario import LocalSite, Profiles, QueueOrder
from policies.simulator.colocated import ColocatedNode
from policies.simulator.decode import DecodeNodes
from policies.simulator.events import EventLoop
from policies.simulator.job import Job
from policies.simulator.order import order_key, preempts
from policies.simulator.pool import Load, PrefillPool
from prfaas.errors import ConfigError
from prfaas.profile import Profile

Told = Callable[[Job], None]


class Local(Protocol):
    """What the simulation asks of site D."""

    profile: Profile

    def put(self, job: Job) -> None:
        """A prompt to prefill and decode at D."""
        ...

    def put_arrived(self, job: Job) -> None:
        """A prompt whose KV has arrived, to decode."""
        ...

    def ask(self, job: Job, asked: Told) -> None:
        """KV of a prompt is to be asked for elsewhere: `asked` as soon as D comes to that."""
        ...

    def report(self) -> Load: ...

    def busy_s(self) -> tuple[float, float]:
        """Node seconds spent prefilling, and sequence seconds spent decoding."""
        ...

    def nodes(self) -> tuple[int, int]:
        """How many nodes prefill and decode."""
        ...

    # For late binding:

    def watch(self, watcher: Callable[[], None]) -> None:
        """Be told when a node has nothing to prefill, or a prompt has to wait."""
        ...

    def free(self) -> int:
        """Nodes that have nothing to prefill and could begin."""
        ...

    def waiting(self, most: int) -> list[Job]:
        """The first of the prompts that have not begun, in their order."""
        ...

    def take(self, job: Job) -> None:
        """A prompt that has not begun leaves D's queue."""
        ...

    def ahead_s(self) -> float:
        """Node seconds that what is being prefilled will still take."""
        ...


def make_local(
    loop: EventLoop,
    site: LocalSite,
    profiles: Profiles,
    order: QueueOrder,
    on_start: Told,
    on_prefilled: Told,
    on_imported: Told,
    on_first_token: Callable[[Job, float], None],
    on_finished: Told,
) -> Local:
    """Site D as its scenario describes it. Raises ConfigError where the split is left open."""
    if not site.colocated and site.prefill_instances is None:
        raise ConfigError(
            "local.prefill_instances: say how many nodes prefill (`prfaas plan` finds the best), "
            "or set local.colocated"
        )
    kind = _Colocated if site.colocated else _Split
    return kind(
        loop,
        site,
        profiles,
        order,
        on_start,
        on_prefilled,
        on_imported,
        on_first_token,
        on_finished,
    )


class _Split:
    """A prefill pool with one queue, and decoding nodes that get its KV at once."""

    def __init__(
        self,
        loop: EventLoop,
        site: LocalSite,
        profiles: Profiles,
        order: QueueOrder,
        on_start: Told,
        on_prefilled: Told,
        on_imported: Told,
        on_first_token: Callable[[Job, float], None],
        on_finished: Told,
    ) -> None:
        self._loop = loop
        self.profile = profiles.prefill
        self._prefilling = site.prefill_instances or 0
        self._decoding = site.instances - self._prefilling
        self._on_prefilled, self._on_imported = on_prefilled, on_imported
        self._decode = DecodeNodes(
            loop, profiles.decode, self._decoding, site.kv_tokens, on_first_token, on_finished
        )
        self._pool = PrefillPool(
            loop,
            profiles.prefill,
            self._prefilling,
            order_key(order),
            preempts(order),
            on_start,
            self._prefilled,
        )

    def put(self, job: Job) -> None:
        if not self._prefilling:
            raise ConfigError("local.prefill_instances is 0 and a prompt has to be prefilled at D")
        self._pool.put(job)

    def put_arrived(self, job: Job) -> None:
        job.decode_at = self._loop.now
        self._on_imported(job)
        self._decode.put(job)

    def ask(self, job: Job, asked: Told) -> None:
        asked(job)

    def report(self) -> Load:
        tokens, waiting, _, _, _, free = self._pool.report()
        return tokens, waiting, 0, 0, self._decode.step_s, free

    def busy_s(self) -> tuple[float, float]:
        return self._pool.busy_s, self._decode.busy_s

    def nodes(self) -> tuple[int, int]:
        return self._prefilling, self._decoding

    def watch(self, watcher: Callable[[], None]) -> None:
        self._pool.watcher = watcher

    def free(self) -> int:
        return self._pool.free

    def waiting(self, most: int) -> list[Job]:
        return self._pool.waiting(most)

    def take(self, job: Job) -> None:
        self._pool.take(job)

    def ahead_s(self) -> float:
        return self._pool.ahead_s()

    def _prefilled(self, job: Job) -> None:
        self._on_prefilled(job)
        self._decode.put(job)


class _Colocated:
    """Nodes that do both; a request stays where it came to, which is where least is queued."""

    def __init__(
        self,
        loop: EventLoop,
        site: LocalSite,
        profiles: Profiles,
        order: QueueOrder,
        on_start: Told,
        on_prefilled: Told,
        on_imported: Told,
        on_first_token: Callable[[Job, float], None],
        on_finished: Told,
    ) -> None:
        if profiles.decode != profiles.prefill:
            raise ConfigError("local.decode: colocated nodes have one profile for both")
        self.profile = profiles.prefill
        self._nodes = [
            ColocatedNode(
                loop,
                profiles.prefill,
                order_key(order),
                site.kv_tokens,
                on_start,
                on_prefilled,
                on_imported,
                on_first_token,
                on_finished,
            )
            for _ in range(site.instances)
        ]
        self._coming: dict[Job, ColocatedNode] = {}
        """Where KV that is on its way is to arrive."""

    def put(self, job: Job) -> None:
        self._node_of(job).put(job)

    def put_arrived(self, job: Job) -> None:
        self._node_of(job).put_arrived(job)

    def ask(self, job: Job, asked: Told) -> None:
        node = self._coming[job] = self._node_of(job)
        node.coming += 1
        node.ask(job, asked)

    def report(self) -> Load:
        return (*self._emptiest().report()[:5], self.free())

    def busy_s(self) -> tuple[float, float]:
        return (
            sum(node.prefill_busy_s for node in self._nodes),
            sum(node.decode_busy_s for node in self._nodes),
        )

    def nodes(self) -> tuple[int, int]:
        return len(self._nodes), len(self._nodes)

    def watch(self, watcher: Callable[[], None]) -> None:
        for node in self._nodes:
            node.watcher = watcher

    def free(self) -> int:
        return sum(node.free for node in self._nodes)

    def waiting(self, most: int) -> list[Job]:
        entries = [entry for node in self._nodes for entry in node.waiting()]
        return [job for _, _, job in heapq.nsmallest(most, entries)]

    def take(self, job: Job) -> None:
        entry = (job.key, job.order, job)
        next(node for node in self._nodes if entry in node.waiting()).take(job)

    def ahead_s(self) -> float:
        # A chunk at most for each node, which is little beside a queue.
        return 0.0

    def _node_of(self, job: Job) -> ColocatedNode:
        """Where it is expected, or else the emptiest."""
        node = self._coming.pop(job, None)
        if node is None:
            return self._emptiest()
        node.coming -= 1
        return node

    def _emptiest(self) -> ColocatedNode:
        if len(self._nodes) == 1:
            return self._nodes[0]
        return min(self._nodes, key=_load)


def _load(node: ColocatedNode) -> tuple[int, int]:
    tokens, _, running, *_ = node.report()
    return tokens, running + node.coming
