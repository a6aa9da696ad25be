"""What was just sent counts once: until the feed of its place shows it."""

import random

from gateway.sent import SentLedger, Unshown

D, P, Q = "d-0", "p/p-0", "p/p-1"


def test_a_local_dispatch_counts_until_a_clearly_younger_load() -> None:
    ledger = SentLedger(settle_s=0.25)
    ledger.add_local("r1", D, 500, now=10.0)
    assert ledger.unshown(D) == Unshown(tokens=500, requests=1)
    ledger.load_reported(D, now=10.2)
    assert ledger.unshown(D).tokens == 500
    ledger.load_reported("other", now=11.0)
    assert ledger.unshown(D).tokens == 500
    ledger.load_reported(D, now=10.25)
    assert ledger.unshown(D) == Unshown()
    assert len(ledger) == 0


def test_a_remote_dispatch_counts_at_p_and_on_the_link_apart() -> None:
    ledger = SentLedger(0.25)
    ledger.add_remote("t1", D, P, 500, raw_bytes=5000, wire_bytes=4000)
    assert ledger.unshown(P) == Unshown(500, 1, 5000, 4000)
    assert ledger.unshown(D) == Unshown(transfers=1, staged_bytes=5000)
    ledger.shown_by_d("t1")
    assert ledger.unshown(D) == Unshown()
    assert ledger.unshown(P) == Unshown(tokens=500, requests=1)
    assert ledger.unshown(D).staged_bytes == 0
    ledger.shown_by_p("t1")
    assert ledger.unshown(P) == Unshown()


def test_p_may_show_it_first() -> None:
    ledger = SentLedger(0.25)
    ledger.add_remote("t1", D, P, 500, 5000, 4000)
    ledger.shown_by_p("t1")
    assert ledger.unshown(P) == Unshown(raw_bytes=5000, wire_bytes=4000)
    ledger.finish("t1")
    assert ledger.unshown(P) == Unshown()


def test_eight_dispatches_in_one_interval_add_up_where_they_went() -> None:
    """Case 42: nothing is shown yet, and yet the ninth sees all eight."""
    ledger = SentLedger(0.25)
    for i in range(8):
        ledger.add_remote(f"t{i}", D, P if i % 2 else Q, 100, 1000, 800)
    assert ledger.unshown(P) == Unshown(400, 4, 4000, 3200)
    assert ledger.unshown(Q) == Unshown(400, 4, 4000, 3200)
    assert ledger.unshown(D).staged_bytes == 8000


def test_ids_of_others_and_repeats_change_nothing() -> None:
    ledger = SentLedger(0.25)
    ledger.add_remote("t1", D, P, 500, 5000, 4000)
    for _ in range(2):
        ledger.shown_by_p("t1")
        ledger.shown_by_d("not-ours")
        ledger.finish("unknown")
    assert ledger.unshown(P) == Unshown(raw_bytes=5000, wire_bytes=4000)


def test_the_same_key_again_replaces_the_first() -> None:
    ledger = SentLedger(0.25)
    ledger.add_local("r1", D, 500, now=1.0)
    ledger.add_local("r1", D, 300, now=1.0)
    assert ledger.unshown(D) == Unshown(tokens=300, requests=1)


def test_whatever_happens_the_sums_return_to_nothing() -> None:
    ledger, keys = SentLedger(0.25), [f"k{i}" for i in range(40)]
    for _ in range(2000):
        key, place = random.choice(keys), random.choice([P, Q])
        random.choice([
            lambda k=key: ledger.add_local(k, D, random.randrange(100), random.random()),
            lambda k=key, p=place: ledger.add_remote(k, D, p, random.randrange(100), 10, 8),
            lambda k=key: ledger.shown_by_p(k),
            lambda k=key: ledger.shown_by_d(k),
            lambda: ledger.load_reported(D, random.random()),
            lambda k=key: ledger.finish(k),
        ])()  # fmt: skip
        assert min(ledger.unshown(p).tokens for p in (D, P, Q)) >= 0
    for key in keys:
        ledger.finish(key)
    assert len(ledger) == 0
    assert [ledger.unshown(p) for p in (D, P, Q)] == [Unshown()] * 3


def test_a_place_that_has_told_of_a_request_shows_it() -> None:
    sent = SentLedger(0.5)
    sent.add_local("l", "d", 10, 0.0)
    sent.add_remote("r", "d", "p/0", 10, 100, 100)
    assert not sent.is_shown("l")
    assert not sent.is_shown("r")
    assert not sent.only_d_knows("r")
    sent.shown_by_d("r")
    assert sent.only_d_knows("r")
    sent.shown_by_p("r")
    sent.load_reported("d", 1.0)
    assert sent.is_shown("r")
    assert sent.is_shown("l")
    assert not sent.only_d_knows("r")
