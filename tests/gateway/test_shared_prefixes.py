"""What one gateway sent to an engine is known to the others, under names that tell nothing."""

from __future__ import annotations

import pytest

from gateway.shared_prefixes import BATCH_NAMES, BURST_S, MAX_PENDING, STEP_TOKENS, SharedPrefixes
from gateway.text_blocks import SharedHasher, TextBlocks
from prfaas.cluster_state import PREFIX_NAME_BYTES, PREFIX_TTL_S, HeardPrefixes, PrefixDelta
from prfaas.hashing import block_chain, cache_salt
from prfaas.testing.clock import ManualClock

SECRET = b"a secret of all gateways"
ENGINES = ("d-0", "d-1")
BLOCK = 64
PROMPT = list(range(BLOCK * 40))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def two(clock: ManualClock) -> tuple[SharedPrefixes, SharedPrefixes]:
    return SharedPrefixes(SECRET, clock), SharedPrefixes(SECRET, clock)


def carry(
    teller: SharedPrefixes, hearer: SharedPrefixes, age_s: float = 0.0
) -> tuple[PrefixDelta, ...]:
    """One exchange that goes well."""
    deltas = teller.report()
    hearer.take([HeardPrefixes("teller", age_s, deltas)], ENGINES)
    teller.told()
    return deltas


def named(prefixes: SharedPrefixes, salt: str = "", tokens: list[int] = PROMPT) -> list[bytes]:
    return prefixes.names(BLOCK, block_chain(tokens, BLOCK, salt))


def test_what_one_sent_is_expected_by_the_other(two: tuple[SharedPrefixes, ...]) -> None:
    one, other = two
    one.sent("d-0", named(one))
    carry(one, other)
    names = named(other)
    assert len(names) == len(PROMPT) // STEP_TOKENS
    assert other.match("d-0", names) == len(names)
    assert other.tokens(BLOCK, len(names)) == len(PROMPT)
    assert other.match("d-1", names) == 0
    longer = named(other, tokens=PROMPT[: BLOCK * 20] + [7] * BLOCK * 20)
    assert other.tokens(BLOCK, other.match("d-0", longer)) == BLOCK * 20
    assert one.match("d-0", names) == 0, "its own it knows better"


def test_of_an_engine_that_tells_what_it_has_only_the_latest_is_believed(
    two: tuple[SharedPrefixes, ...], clock: ManualClock
) -> None:
    one, other = two
    old, new = one.names(256, range(4)), one.names(256, range(8))
    one.sent("d-0", old)
    carry(one, other)
    assert other.match("d-0", new, tells=True) == 4
    clock.advance(BURST_S + 1)
    assert other.match("d-0", new, tells=True) == 0, "it says itself by now whether it has it"
    assert other.match("d-0", new) == 4
    one.sent("d-0", new)
    carry(one, other)
    assert other.match("d-0", new, tells=True) == 8, "of which the first ones are old"


@pytest.mark.parametrize("block_tokens", [16, 256, 1024])
def test_names_fit_any_block_size(two: tuple[SharedPrefixes, ...], block_tokens: int) -> None:
    one, other = two
    chain = block_chain(list(range(4096)), block_tokens)
    one.sent("d-0", one.names(block_tokens, chain))
    carry(one, other)
    matched = other.match("d-0", other.names(block_tokens, chain))
    assert other.tokens(block_tokens, matched) == 4096


def test_tenants_and_salts_share_nothing(two: tuple[SharedPrefixes, ...]) -> None:
    one, other = two
    salts = [cache_salt(SECRET, *who) for who in (("a", ""), ("b", ""), ("a", "x"), ("", ""))]
    one.sent("d-0", named(one, salts[0]))
    carry(one, other)
    assert [other.match("d-0", named(other, salt)) > 0 for salt in salts] == [True] + [False] * 3


def test_names_need_the_secret_and_are_no_hashes_of_blocks(clock: ManualClock) -> None:
    one, stranger = SharedPrefixes(SECRET, clock), SharedPrefixes(b"another", clock)
    one.sent("d-0", named(one))
    carry(one, stranger)
    assert stranger.match("d-0", named(stranger)) == 0
    told = set(named(one))
    chain = block_chain(PROMPT, BLOCK)
    assert not told & {block[:PREFIX_NAME_BYTES] for block in chain}
    assert {len(name) for name in told} == {PREFIX_NAME_BYTES}


def test_texts_that_nobody_tokenised_are_shared_too(two: tuple[SharedPrefixes, ...]) -> None:
    one, other = two
    body = b'{"prompt": "' + b"many words " * 1000
    chain = TextBlocks(SharedHasher()).chain(body, "salt")
    one.sent("d-0", one.names(256, chain))
    carry(one, other)
    texts = TextBlocks(SharedHasher())
    again = texts.chain(body + b"more", "salt")
    assert other.match("d-0", other.names(256, again)) == len(chain) > 5
    assert not set(texts.chain(body, "another salt")) & set(chain)


def test_what_was_just_told_is_not_told_again(
    two: tuple[SharedPrefixes, ...], clock: ManualClock
) -> None:
    one, other = two
    names = named(one)
    one.sent("d-0", names)
    assert carry(one, other)
    one.sent("d-0", names)
    assert one.report() == ()
    clock.advance(PREFIX_TTL_S / 2)
    one.sent("d-0", names)
    assert carry(one, other), "so that it stays known"
    clock.advance(PREFIX_TTL_S * 0.9)
    assert other.match("d-0", names) == len(names)
    clock.advance(PREFIX_TTL_S * 0.2)
    assert other.match("d-0", names) == 0


def test_what_comes_late_is_forgotten_in_time(
    two: tuple[SharedPrefixes, ...], clock: ManualClock
) -> None:
    one, other = two
    names = named(one)
    one.sent("d-0", names)
    carry(one, other, age_s=PREFIX_TTL_S - 10)
    assert other.match("d-0", names) == len(names)
    clock.advance(11)
    assert other.match("d-0", names) == 0


def test_a_lost_cache_is_told_in_its_place(two: tuple[SharedPrefixes, ...]) -> None:
    one, other = two
    names = named(one)
    one.sent("d-0", names)
    one.sent("d-1", names)
    carry(one, other)
    one.cleared("d-0")
    one.sent("d-0", names[:2])
    carry(one, other)
    assert other.match("d-0", names) == 2
    assert other.match("d-1", names) == len(names)
    one.sent("d-0", names)
    one.cleared("d-0")
    assert one.report() == (PrefixDelta("d-0", b"", True),), "what was sent before is no use"


def test_a_report_that_may_not_have_arrived_is_told_once_more(
    two: tuple[SharedPrefixes, ...],
) -> None:
    one, other = two
    one.sent("d-0", named(one))
    lost = one.report()
    one.sent("d-1", named(one, "salt"))
    one.cleared("d-0")
    one.untold()
    assert carry(one, other)[: len(lost)] == lost
    assert other.match("d-0", named(other)) == 0
    assert other.match("d-1", named(other, "salt")) > 0


def test_reports_are_bounded_and_all_is_told_in_the_end(
    two: tuple[SharedPrefixes, ...],
) -> None:
    one, other = two
    names = [number.to_bytes(PREFIX_NAME_BYTES, "little") for number in range(BATCH_NAMES * 3)]
    one.sent("d-0", names)
    reports = 0
    while deltas := carry(one, other):
        assert sum(len(d.names) for d in deltas) <= BATCH_NAMES * PREFIX_NAME_BYTES
        reports += 1
    assert reports == 3
    assert other.match("d-0", names) == len(names)


def test_while_nobody_hears_memory_is_bounded_and_the_newest_is_told_afterwards(
    two: tuple[SharedPrefixes, ...],
) -> None:
    one, other = two
    for prompt in range(200):
        one.sent("d-0", [f"{prompt:04}{at:04}".encode() for at in range(100)])
        one.report()
        one.untold()
    assert len(one._pending) == MAX_PENDING
    while carry(one, other):
        pass
    newest = [f"0199{at:04}".encode() for at in range(100)]
    assert other.match("d-0", newest) == 100
    assert other.blocks("d-0") <= 2 * MAX_PENDING


def test_after_a_loss_all_is_told_again_and_what_was_heard_is_forgotten(
    two: tuple[SharedPrefixes, ...],
) -> None:
    one, other = two
    one.sent("d-0", named(one))
    one.cleared("d-1")
    carry(one, other)
    other.reset()
    assert other.match("d-0", named(other)) == 0
    one.tell_again()
    carry(one, other)
    assert other.match("d-0", named(other)) == len(named(other))


def test_engines_that_are_not_known_take_no_memory(two: tuple[SharedPrefixes, ...]) -> None:
    one, other = two
    one.sent("elsewhere", named(one))
    carry(one, other)
    assert other.blocks("elsewhere") == 0
