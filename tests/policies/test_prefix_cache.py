"""The simulated prefix cache keeps its books, and evicts ends before beginnings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.prefix_cache import CacheSpec, PrefixCache
from policies.workload.request import BLOCK_TOKENS


def test_only_whole_blocks_are_reused() -> None:
    cache = PrefixCache(CacheSpec())
    cache.insert((1, 2, 3), 2 * BLOCK_TOKENS + 5)
    assert len(cache) == 2
    assert cache.match((1, 2, 3), 3 * BLOCK_TOKENS) == 2 * BLOCK_TOKENS
    assert cache.match((1, 2), 2 * BLOCK_TOKENS - 1) == BLOCK_TOKENS
    assert cache.match((9, 2), 2 * BLOCK_TOKENS) == 0


def test_a_full_cache_loses_the_ends_of_the_oldest_first() -> None:
    cache = PrefixCache(CacheSpec(4 * BLOCK_TOKENS))
    cache.insert((1, 2, 3), 3 * BLOCK_TOKENS)
    cache.insert((7, 8), 2 * BLOCK_TOKENS)
    assert cache.match((1, 2, 3), 3 * BLOCK_TOKENS) == 2 * BLOCK_TOKENS
    assert cache.match((7, 8), 2 * BLOCK_TOKENS) == 2 * BLOCK_TOKENS
    assert cache.evicted_blocks == 1


def test_states_are_kept_at_ends_and_checkpoints_and_weigh_what_they_weigh() -> None:
    cache = PrefixCache(CacheSpec(None, state_tokens=1000, checkpoint_blocks=2))
    cache.insert((1, 2, 3, 4, 5), 5 * BLOCK_TOKENS)
    assert cache.tokens == 5 * BLOCK_TOKENS + 3 * 1000
    assert cache.match((1, 2, 3), 3 * BLOCK_TOKENS) == 2 * BLOCK_TOKENS
    assert cache.match((1, 2, 3, 4, 5, 6), 6 * BLOCK_TOKENS) == 5 * BLOCK_TOKENS
    cache.insert((1, 2, 3, 4, 5), 5 * BLOCK_TOKENS)
    cache.check()


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=60),
    st.integers(0, 12),
    st.sampled_from([0, 700]),
    st.sampled_from([0, 2]),
)
def test_the_books_agree_whatever_comes(
    paths: list[list[int]], capacity: int, state_tokens: int, every: int
) -> None:
    cache = PrefixCache(CacheSpec(capacity * BLOCK_TOKENS, state_tokens, every))
    names: dict[tuple[int, ...], int] = {}
    for path in paths:
        chain = tuple(names.setdefault(tuple(path[: i + 1]), len(names)) for i in range(len(path)))
        tokens = len(chain) * BLOCK_TOKENS
        hit = cache.match(chain, tokens)
        assert 0 <= hit <= tokens
        cache.insert(chain, tokens)
        cache.check()
        again = cache.match(chain, tokens)
        if cache.tokens and state_tokens == 0 and tokens <= capacity * BLOCK_TOKENS:
            assert again == tokens
    cache.clear()
    cache.check()
