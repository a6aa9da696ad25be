"""Only sockets of which nothing is read are cut."""

from typing import Any

import pytest

from gateway.unread import MOST_BYTES, Unread

SLOW_S = 3.0


class Socket:
    def __init__(self, nbytes: int = 0, closing: bool = False) -> None:
        self.nbytes, self.closing, self.aborted = nbytes, closing, False

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return self.nbytes

    def abort(self) -> None:
        self.closing, self.aborted, self.nbytes = True, True, 0


def swept(socket: Any, sizes: list[int]) -> Unread:
    """After a look each second, at each of which its buffer had another size."""
    unread = Unread()
    unread.add(socket)
    for now, nbytes in enumerate(sizes):
        if not socket.aborted:
            socket.nbytes = nbytes
        unread.sweep(float(now), SLOW_S)
    return unread


@pytest.mark.parametrize("socket", [Socket(closing=True), Socket()])
def test_a_socket_that_is_not_read_is_cut_and_forgotten(socket: Any) -> None:
    unread = swept(socket, [MOST_BYTES + 1] * 6)
    assert socket.aborted
    assert len(unread) == 0


def test_a_few_bytes_keep_open_only_who_is_not_closing() -> None:
    for closing in (False, True):
        socket = Socket(closing=closing)
        unread = swept(socket, [10] * 6)
        assert socket.aborted is closing
        assert len(unread) == (not closing)


def test_who_reads_slowly_is_not_cut() -> None:
    socket = Socket()
    sizes = [MOST_BYTES + 100 - at // 3 for at in range(40)]
    assert len(swept(socket, sizes)) == 1
    assert not socket.aborted


def test_who_has_read_all_in_between_begins_anew() -> None:
    much = MOST_BYTES + 1
    socket = Socket()
    swept(socket, [much, much, much, 0, much, much, much, 0])
    assert not socket.aborted


def test_a_closed_socket_is_forgotten() -> None:
    socket = Socket(closing=True)
    assert len(swept(socket, [0])) == 0
    assert not socket.aborted
