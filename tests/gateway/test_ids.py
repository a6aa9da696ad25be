"""Ids come from pages of randomness, and none twice."""

from gateway.ids import PAGE_BYTES, Ids


def test_ids_have_their_size_and_do_not_repeat_over_pages() -> None:
    ids = Ids()
    found = [ids.hex(size) for _ in range(PAGE_BYTES // 10) for size in (8, 12, 16)]
    assert [len(each) for each in found[:3]] == [16, 24, 32]
    assert len(set(found)) == len(found)


def test_bytes_of_one_id_are_not_in_the_next() -> None:
    ids = Ids()
    found = "".join(ids.hex(16) for _ in range(PAGE_BYTES // 16))
    assert len({found[at : at + 16] for at in range(0, len(found), 16)}) == PAGE_BYTES // 8


def test_two_sources_are_unlike() -> None:
    assert Ids().hex(16) != Ids().hex(16)


def test_one_larger_than_a_page() -> None:
    assert len(Ids().hex(PAGE_BYTES + 1)) == 2 * PAGE_BYTES + 2
