"""What every store of cluster state does: an implementation's test is a subclass and a factory."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from prfaas.cluster_state import (
    PREFIX_BATCHES,
    PREFIX_READ,
    BucketKey,
    ClusterStore,
    LinkSample,
    Load,
    Member,
    PrefixDelta,
    Report,
    Sent,
    Shared,
    Spend,
)
from prfaas.testing.waiting import eventually

TOKENS: BucketKey = ("acme", "tokens_per_minute")
SLOW_S = 1e6
"""A period in which nothing to speak of comes back while a test runs."""


def spend(spent: float, *, level: float = 100.0, **fields: Any) -> Spend:
    return Spend(
        **{
            "key": TOKENS, "capacity": 100.0, "period_s": SLOW_S, "spent": spent, "level": level,
            **fields,
        }
    )  # fmt: skip


class Gateway:
    """What a gateway keeps between two exchanges."""

    def __init__(self, store: ClusterStore, name: str, ttl_s: float = 60.0) -> None:
        self.store = store
        self.name = name
        self.ttl_s = ttl_s
        self.heard: Shared | None = None
        self.policy_version = 0

    async def tell(
        self,
        *spends: Spend,
        publish: str | None = None,
        prefixes: tuple[PrefixDelta, ...] = (),
        hears: bool = True,
        **fields: Any,
    ) -> Shared:
        before = self.heard
        report = Report(
            Member(self.name, **fields),
            self.ttl_s,
            spends,
            before.epoch if before is not None else "",
            before.seq if before is not None else 0,
            self.policy_version,
            publish,
            prefixes,
            (before.prefixes_seq if before is not None else 0) if hears else None,
        )
        self.heard = await self.store.exchange(report)
        if self.heard.policy is not None:
            self.policy_version = self.heard.policy.version
        return self.heard


class ClusterStateContract:
    """Subclasses have a fixture `store`, and `let_pass` for a clock of their own."""

    async def let_pass(self, seconds: float) -> None:
        """Time goes by for the store."""
        await asyncio.sleep(seconds)

    async def forget(self, store: ClusterStore) -> None:
        """It loses all it knows."""
        raise NotImplementedError

    async def test_gateways_see_each_other_and_what_each_says(self, store: ClusterStore) -> None:
        link = LinkSample("d-0", "p", "p-0", 1e6, 0.01, 1.5, 0.1)
        a, b = Gateway(store, "a"), Gateway(store, "b")
        await a.tell(
            address="10.0.0.1:8000",
            claims={"acme": 3},
            sent={"d-0": Load(5, 1, 0, 0, 2, 70)},
            sent_seq=3,
            links=(link,),
        )
        heard = await b.tell()
        found = {member.id: member for member in heard.members}
        assert set(found) == {"a", "b"}
        assert found["a"].address == "10.0.0.1:8000"
        assert found["a"].claims == {"acme": 3}
        assert found["a"].sent == {"d-0": Load(5, 1, 0, 0, 2, 70)}
        assert found["a"].sent_seq == 3
        assert found["a"].links == (link,)
        assert found["b"].claims == {}
        await a.tell(claims={"acme": 1})
        heard = await b.tell()
        assert {m.id: m.claims for m in heard.members} == {"a": {"acme": 1}, "b": {}}

    async def test_what_was_just_sent_is_heard_in_order_without_an_exchange(
        self, store: ClusterStore
    ) -> None:
        heard: list[Sent] = []
        hearing = asyncio.create_task(store.hear_sent(heard.append))
        first = Sent("teller", 1, {"p/p-0": Load(500, 1, 5000, 4000), "d-0": Load(transfers=1)})

        async def begun() -> bool:
            await store.tell_sent(first)
            return bool(heard)

        await eventually(begun)
        later = [Sent("teller", seq, {"p/p-0": Load(seq)}) for seq in range(2, 30)]
        for sent in later:
            await store.tell_sent(sent)
        await eventually(lambda: heard[-1:] == later[-1:])
        assert heard[0] == first
        assert [sent for sent in heard if sent.seq > 1] == later
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
        await store.tell_sent(first)
        assert heard[-1:] == later[-1:]

    async def test_who_leaves_is_gone_at_once(self, store: ClusterStore) -> None:
        a, b = Gateway(store, "a"), Gateway(store, "b")
        await a.tell()
        await store.leave("a")
        await store.leave("never there")
        assert [member.id for member in (await b.tell()).members] == ["b"]

    async def test_who_says_nothing_is_gone_after_its_time(self, store: ClusterStore) -> None:
        brief, b = Gateway(store, "brief", ttl_s=0.2), Gateway(store, "b")
        await brief.tell()

        async def gone() -> bool:
            await self.let_pass(0.05)
            return [member.id for member in (await b.tell()).members] == ["b"]

        await eventually(gone)
        assert {m.id for m in (await brief.tell()).members} == {"brief", "b"}, "it may come back"

    async def test_all_spend_from_one_budget(self, store: ClusterStore) -> None:
        a, b = Gateway(store, "a"), Gateway(store, "b")
        assert (await a.tell(spend(30))).levels[TOKENS] == pytest.approx(70, abs=0.1)
        assert (await b.tell(spend(50))).levels[TOKENS] == pytest.approx(20, abs=0.1)
        assert (await a.tell(spend(40))).levels[TOKENS] == pytest.approx(-20, abs=0.1)
        assert (await b.tell(spend(-30))).levels[TOKENS] == pytest.approx(10, abs=0.1)

    async def test_only_what_has_changed_is_told(self, store: ClusterStore) -> None:
        a, b = Gateway(store, "a"), Gateway(store, "b")
        other: BucketKey = ("zeta", "requests_per_minute")
        await a.tell(spend(10), spend(20, key=other))
        assert set((await b.tell()).levels) == {TOKENS, other}
        assert (await b.tell()).levels == {}
        assert (await a.tell()).levels == {}, "it has heard of its own spends with the answer"
        await a.tell(spend(1, key=other))
        assert set((await b.tell()).levels) == {other}

    async def test_what_nobody_remembers_begins_where_the_gateway_says(
        self, store: ClusterStore
    ) -> None:
        a, b = Gateway(store, "a"), Gateway(store, "b")
        assert (await a.tell(spend(5, level=40))).levels[TOKENS] == pytest.approx(35, abs=0.1)
        heard = await b.tell(spend(0, level=100))
        assert heard.levels[TOKENS] == pytest.approx(35, abs=0.1), "somebody remembers"
        rich: BucketKey = ("rich", "tokens_per_minute")
        heard = await b.tell(spend(0, key=rich, level=1e9))
        assert heard.levels[rich] == pytest.approx(100, abs=0.1)

    async def test_budgets_come_back_at_their_rate_and_no_further(
        self, store: ClusterStore
    ) -> None:
        a, b = Gateway(store, "a"), Gateway(store, "b")
        await a.tell(spend(100, period_s=0.5))
        levels = []

        async def full() -> bool:
            await self.let_pass(0.05)
            levels.append((await a.tell(spend(0, period_s=0.5))).levels[TOKENS])
            return levels[-1] == pytest.approx(100)

        await eventually(full, within_s=20)
        assert levels == sorted(levels)
        assert all(low < high for low, high in itertools.pairwise(levels))
        await self.let_pass(0.3)
        assert (await b.tell()).levels[TOKENS] == pytest.approx(100)

    async def test_a_smaller_budget_holds_from_now_on(self, store: ClusterStore) -> None:
        a = Gateway(store, "a")
        await a.tell(spend(10))
        heard = await a.tell(spend(1, capacity=50))
        assert heard.levels[TOKENS] == pytest.approx(49, abs=0.1)

    async def test_figures_of_any_size_come_through(self, store: ClusterStore) -> None:
        a = Gateway(store, "a")
        heard = await a.tell(spend(0.001, capacity=3e12, level=3e12, period_s=86400.0))
        assert heard.levels[TOKENS] == pytest.approx(3e12)
        tiny: BucketKey = ("tiny", "requests_per_minute")
        heard = await a.tell(spend(0, key=tiny, capacity=1e-3, level=1e-3))
        assert heard.levels[tiny] == pytest.approx(1e-3, rel=0.01)

    async def test_the_newest_policy_reaches_all(self, store: ClusterStore) -> None:
        a, b, c = (Gateway(store, name) for name in "abc")
        first = await a.tell(publish="policy: one # \u00fc")
        assert first.policy is not None
        assert first.policy.text == "policy: one # \u00fc"
        heard = await b.tell()
        assert heard.policy == first.policy
        assert (await b.tell()).policy is None
        assert (await a.tell(publish="policy: one # \u00fc")).policy is None, "nothing new"
        second = await b.tell(publish="policy: two")
        assert second.policy is not None
        assert second.policy.version > first.policy.version
        assert (await a.tell()).policy == second.policy
        assert (await c.tell()).policy == second.policy

    async def test_nobody_has_a_policy_at_first(self, store: ClusterStore) -> None:
        assert (await Gateway(store, "a").tell()).policy is None

    async def test_a_loss_is_seen_and_made_good(self, store: ClusterStore) -> None:
        a, b = Gateway(store, "a"), Gateway(store, "b")
        await a.tell(spend(60), publish="policy: one")
        before = await b.tell()
        await self.forget(store)
        after = await b.tell(spend(0, level=40), publish="policy: one")
        assert after.epoch != before.epoch
        assert after.levels[TOKENS] == pytest.approx(40, abs=0.1)
        assert after.policy is not None
        heard = await a.tell()
        assert heard.epoch == after.epoch
        assert heard.levels[TOKENS] == pytest.approx(40, abs=0.1), "all of them, on a new epoch"
        assert heard.policy == after.policy
        assert {member.id for member in heard.members} == {"a", "b"}

    async def test_exchanges_at_once_lose_nothing(self, store: ClusterStore) -> None:
        gateways = [Gateway(store, f"g{number}") for number in range(4)]

        async def use(gateway: Gateway) -> None:
            for _ in range(10):
                await gateway.tell(spend(1))

        await asyncio.gather(*map(use, gateways))
        assert (await gateways[0].tell(spend(0))).levels[TOKENS] == pytest.approx(60, abs=0.1)

    async def test_prefixes_reach_the_others_once_and_in_order(self, store: ClusterStore) -> None:
        a, b, deaf = (Gateway(store, name) for name in ("a", "b", "deaf"))
        first = (PrefixDelta("d-0", bytes(range(256))), PrefixDelta("d-1", b"", True))
        second = (PrefixDelta("d-1", b"|1|2|%\x00\n"),)
        assert (await a.tell(prefixes=first)).prefixes == (), "it knows what it said"
        await a.tell(prefixes=second)
        heard = await b.tell()
        assert [batch.sender for batch in heard.prefixes] == ["a", "a"]
        assert [batch.deltas for batch in heard.prefixes] == [first, second]
        assert not heard.prefixes_gap
        assert (await b.tell()).prefixes == ()
        assert (await deaf.tell(hears=False)).prefixes == ()
        await b.tell(prefixes=first)
        assert [batch.deltas for batch in (await a.tell()).prefixes] == [first]

    async def test_prefixes_are_as_old_as_they_are(self, store: ClusterStore) -> None:
        a, b = Gateway(store, "a"), Gateway(store, "b")
        await a.tell(prefixes=(PrefixDelta("d-0", b"8 bytes."),))
        await self.let_pass(0.3)
        [batch] = (await b.tell()).prefixes
        assert 0.29 < batch.age_s < 60

    async def test_who_starts_late_hears_the_newest_prefixes_and_not_too_many_at_once(
        self, store: ClusterStore
    ) -> None:
        a, slow = Gateway(store, "a"), Gateway(store, "slow")
        await slow.tell()
        told = PREFIX_BATCHES + 10
        for number in range(told):
            await a.tell(prefixes=(PrefixDelta("d-0", number.to_bytes(8, "little")),))
        late = Gateway(store, "late")
        heard = await late.tell()
        assert not heard.prefixes_gap, "it knew nothing that could be wrong"
        numbers: list[int] = []
        while heard.prefixes:
            assert len(heard.prefixes) <= PREFIX_READ
            numbers += [int.from_bytes(b.deltas[0].names, "little") for b in heard.prefixes]
            heard = await late.tell()
        assert numbers == list(range(10, told))
        assert (await slow.tell()).prefixes_gap
        assert not (await slow.tell()).prefixes_gap, "once"

    async def test_a_loss_takes_the_prefixes_too(self, store: ClusterStore) -> None:
        a, b = Gateway(store, "a"), Gateway(store, "b")
        delta = PrefixDelta("d-0", b"8 bytes.")
        await a.tell(prefixes=(delta,))
        await b.tell()
        await self.forget(store)
        heard = await b.tell()
        assert (heard.prefixes, heard.prefixes_seq, heard.prefixes_gap) == ((), 0, False)
        await a.tell(prefixes=(delta,))
        assert [batch.deltas for batch in (await b.tell()).prefixes] == [(delta,)]
