"""Events past Python reach a client byte for byte as they do through it, and nothing else does."""

import asyncio
import random
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from gateway.events import Channel, Gaps, Took, native
from gateway.http1 import KnownHeads
from gateway.http_connection import Connection
from gateway.outbox import Outbox
from gateway.relay import Relayed, WholeAnswer, relay_stream
from gateway.upstream import _Exchange
from prfaas.errors import Cancelled, PrfaasError
from prfaas.limits import Limits
from prfaas.testing.gateway_setup import completion, until
from prfaas.testing.scripted_engine import Script

pytestmark = pytest.mark.skipif(native is None, reason="the C extension was not built")

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"text":"a"}]}\n\n'
EVENTS = [
    EVENT,
    EVENT * 3,
    b": ping\n\n",
    b'event: x\r\ndata: {"choices":[{"text":"[b] {c}"}]}\r\n\r\n',
    b'data: {"choices":[{"text":"[DONE] \\n\\ndata: "}]}\n\n',
]
BAD = [b"data: cut", b'data: {"error":{"message":"m","type":"overloaded"}}\n\n', b"\n\n", b"data:"]


def chunk(data: bytes, size: str = "x", extension: bytes = b"") -> bytes:
    return f"{len(data):{size}}".encode() + extension + b"\r\n" + data + b"\r\n"


# --- where chunks begin ---


def pieces_of(data: bytes, rng: random.Random, cuts: int) -> Iterator[bytes]:
    ends = sorted(rng.randrange(len(data) + 1) for _ in range(cuts))
    for start, end in zip([0, *ends], [*ends, len(data)], strict=True):
        if start < end:
            yield data[start:end]


def test_it_knows_where_a_chunk_begins_and_only_there() -> None:
    rng = random.Random(7)
    for _ in range(300):
        chunks = [
            chunk(b"d" * rng.randrange(1, 40), rng.choice(("x", "X", "04x"))) for _ in range(6)
        ]
        starts, at = {0}, 0
        for each in chunks:
            starts.add(at := at + len(each))
        followed, at = native.Chunks(), 0
        assert followed.between
        for piece in pieces_of(b"".join(chunks), rng, rng.randrange(12)):
            followed.seen(piece)
            at += len(piece)
            assert followed.between == (at in starts)


def test_whole_plain_chunks_are_taken_apart_and_the_rest_is_left() -> None:
    rests = [b"", b"0\r\n\r\n", b"5", b"5\r\nhell", b"5\r\nhello\n\n", b"5;a\r\nhello\r\n", b"\r\n"]
    for chunks in ([], [b"a"], [b"a" * 17, b"b", b"c" * 300]):
        for rest in rests:
            for size in ("x", "X", "04x"):
                data = b"".join(chunk(each, size) for each in chunks) + rest
                assert native.Chunks().unpack(data) == (b"".join(chunks), rest)
    inside = native.Chunks()
    inside.seen(b"5\r\nhel")
    assert inside.unpack(b"lo\r\n" + chunk(b"a")) == (b"", b"lo\r\n" + chunk(b"a"))
    assert native.Chunks().unpack(bytearray(chunk(b"a"))) == (b"", bytearray(chunk(b"a")))
    with pytest.raises(TypeError):
        native.Chunks().unpack()


@pytest.mark.parametrize(
    "data",
    [
        b"0\r\n",
        b"5;a=b\r\n",
        b"5 \r\n",
        b"5\n",
        b"g\r\n",
        b"-1\r\n",
        b"\r\n",
        b"0x5\r\n",
        b"123456789\r\n",
        b"000000005\r\n",
        b"5\r\r\n",
    ],
)
def test_after_what_is_not_plain_no_chunk_begins_any_more(data: bytes) -> None:
    for pieces in ([data], [data[:1], data[1:]], [bytes([each]) for each in data]):
        followed = native.Chunks()
        for piece in pieces:
            followed.seen(piece)
        followed.seen(b"1\r\na\r\n")
        assert not followed.between


# --- what a channel takes ---


class Client:
    """Notes what a channel writes and tells."""

    def __init__(self) -> None:
        self.got = b""
        self.gaps: list[float] = []
        self.tellings = 0
        self.last_at = 0.0
        self.time = 0.0
        self.closing = False
        self.channel = native.Channel(
            self.write, lambda: self.closing, lambda: self.time, self.note, 0.0
        )

    def write(self, data: bytes) -> None:
        self.got += data

    def note(self, gaps: list[float], last_at: float) -> None:
        self.tellings += 1
        self.gaps += gaps
        self.last_at = last_at

    def take(self, data: bytes, at: float = 1.0) -> int:
        return self.channel.take(native.Chunks(), data, at)


@pytest.mark.parametrize("size", ["x", "X", "04x"])
def test_whole_events_in_plain_chunks_are_taken_as_one_chunk(size: str) -> None:
    client = Client()
    events = [EVENT, EVENTS[3], EVENT * 9]
    assert client.take(b"".join(chunk(each, size) for each in events), 3.5) == Took.TAKEN
    assert client.got == chunk(b"".join(events))
    assert client.channel.said_at == 3.5


@pytest.mark.parametrize(
    "data",
    [
        b"",
        chunk(EVENT)[:-1],
        chunk(EVENT)[:-2] + b"\n\n",
        chunk(EVENT)[:-2] + b"xx",
        chunk(EVENT) + b"2",
        chunk(EVENT) + b"0\r\n\r\n",
        b"0\r\n\r\n",
        chunk(EVENT, extension=b";a=b"),
        chunk(EVENT).replace(b"\r\n", b"\n", 1),
        b"ffffffff\r\n" + EVENT + b"\r\n",
        b"fffffffff\r\n" + EVENT + b"\r\n",
        chunk(EVENT[:-1]),
        chunk(EVENT + b"data: a"),
        chunk(EVENT[:-1]) + chunk(b"\r\n"),
        chunk(b"data: [DONE]\n\n"),
        chunk(b"data: [DO") + chunk(b"NE]\n\n"),
        chunk(BAD[1]),
        chunk(BAD[1][:9]) + chunk(BAD[1][9:]),
        bytearray(chunk(EVENT)),
    ],
)
def test_what_is_not_plain_is_left_untouched(data: bytes) -> None:
    client = Client()
    assert client.take(data) == Took.LEFT
    client.channel.close()
    assert (client.got, client.gaps) == (b"", [])


def test_nothing_is_taken_in_the_middle_of_a_chunk_or_an_event_or_by_a_closed_channel() -> None:
    client, inside = Client(), native.Chunks()
    inside.seen(b"5\r\nab")
    assert client.channel.take(inside, chunk(EVENT), 0.0) == Took.LEFT
    client.channel.whole = False
    assert client.take(chunk(EVENT)) == Took.LEFT
    client.channel.whole, client.channel.open = True, False
    assert client.take(chunk(EVENT)) == Took.LEFT
    client.channel.open, client.closing = True, True
    assert client.take(chunk(EVENT)) == Took.LEFT
    client.closing = False
    client.channel.close()
    client.channel.open = True
    assert client.take(chunk(EVENT)) == Took.LEFT
    assert client.got == b""
    with pytest.raises(TypeError):
        client.channel.take(client, chunk(EVENT), 0.0)


def test_a_client_that_becomes_slow_is_said_to_be_with_the_piece_that_made_it_so() -> None:
    client = Client()

    def full(data: bytes) -> None:
        client.got += data
        client.channel.open = False

    client.channel = native.Channel(full, lambda: False, lambda: 0.0, client.note, 0.0)
    assert client.take(chunk(EVENT)) == Took.SLOW
    assert client.take(chunk(EVENT)) == Took.LEFT
    assert client.got == chunk(EVENT)


def test_every_gap_is_told_once_some_dozen_at_a_time() -> None:
    client = Client()
    for number in range(1, 101):
        client.time = float(number)
        assert client.take(chunk(EVENT)) == Took.TAKEN
        assert len(client.gaps) > number - 40
    client.time = 103.0
    client.take(chunk(EVENT * 3))
    client.take(chunk(b": ping\n\n"))
    client.channel.close()
    client.channel.close()
    assert client.gaps == [1.0] * 103
    assert client.last_at == 103.0
    assert client.tellings < 8


def test_what_writing_and_telling_raise_is_raised() -> None:
    def gone(*args: object) -> None:
        raise Cancelled("gone")

    channel = native.Channel(gone, lambda: False, lambda: 0.0, lambda *args: None, 0.0)
    with pytest.raises(Cancelled):
        channel.take(native.Chunks(), chunk(EVENT), 0.0)
    channel = native.Channel(lambda data: None, lambda: False, lambda: 0.0, gone, 0.0)
    channel.take(native.Chunks(), chunk(EVENT), 0.0)
    with pytest.raises(Cancelled):
        channel.close()


# --- a whole stream, with it and without ---


class Wire(asyncio.Transport):
    """An engine's side that says nothing by itself."""

    def __init__(self) -> None:
        super().__init__({"socket": self})

    def setsockopt(self, *args: object) -> None: ...
    def write(self, data: object) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def abort(self) -> None: ...

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0


class Pool:
    """Of one connection."""

    at_work = 1

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def take_idle(self) -> Connection:
        return self._connection

    def give_back(self, connection: Connection) -> None:
        connection.finish()


class Sink:
    """A client; every so many writes it is slow. `past`: it has a way past `put`."""

    def __init__(self, past: bool, slow_every: int) -> None:
        self.started = False
        self.got = b""
        self.complete: bool | None = None
        self.taken = 0
        self._past = past
        self._slow_every = slow_every
        self._writes = 0
        self._slow = False
        self._channel: Channel | None = None

    async def start(self, headers: Mapping[str, str]) -> None:
        self.started = True

    def write(self, data: bytes) -> None:
        assert not self._slow
        self.got += data
        self._writes += 1
        self._slow = self._writes % self._slow_every == 0
        if self._slow and self._channel is not None:
            self._channel.open = False

    def _past_python(self, data: bytes) -> None:
        self.taken += 1
        self.write(data)

    def put(self, data: bytes, last: bool = False) -> bool:
        self.write(chunk(data))
        return self._slow

    def channel(self, gaps: Gaps) -> Channel | None:
        if not self._past:
            return None
        self._channel = native.Channel(
            self._past_python, lambda: False, gaps.now, gaps.note, gaps.last_at()
        )
        return self._channel

    async def drain(self) -> None:
        await asyncio.sleep(0)
        self._slow = False

    async def end(self, complete: bool) -> None:
        self.complete = complete


async def relayed(pieces: list[bytes], past: bool, slow_every: int) -> tuple[Any, Sink, int]:
    connection = Connection(
        Limits(max_event_bytes=500), lambda closed: None, KnownHeads(), Outbox()
    )
    connection.connection_made(Wire())
    sink, events = Sink(past, slow_every), [0]

    def count(more: int) -> None:
        events[0] += more

    async def say() -> None:
        for piece in pieces:
            for _ in range(4):  # let whoever was woken go on
                await asyncio.sleep(0)
            connection.data_received(piece)
        for _ in range(4):
            await asyncio.sleep(0)
        connection.eof_received()

    gaps = Gaps(lambda: 0.0, lambda: 0.0, lambda gaps_s, now: count(len(gaps_s)))
    exchange = _Exchange(Pool(connection), "d", "POST", b"", b"")
    saying = asyncio.create_task(say())
    try:
        async with exchange as response:
            limits = Limits(max_event_bytes=500)
            args = (response, sink, limits, {}, count, lambda: None, gaps)
            answer: Relayed | WholeAnswer | str = await relay_stream(*args)
    except PrfaasError as exc:
        answer = exc.message
    await saying
    return answer, sink, events[0]


def stream(rng: random.Random) -> list[bytes]:
    """An engine's answer: mostly plain, cut here and there, sometimes broken."""
    chunks = []
    for _ in range(rng.randrange(1, 25)):
        data = rng.choice(EVENTS if rng.random() < 0.93 else BAD)
        roll = rng.random()
        if roll < 0.1 and len(data) > 1:
            cut = rng.randrange(1, len(data))
            chunks += [chunk(data[:cut]), chunk(data[cut:])]
        else:
            extension = b";a=b" if roll < 0.13 else b""
            chunks.append(chunk(data, rng.choice("xX"), extension))
    if rng.random() < 0.8:
        chunks.append(chunk(b"data: [DONE]\n\n"))
    if rng.random() < 0.9:
        chunks.append(b"0\r\n\r\n")
    if rng.random() < 0.05:
        chunks.insert(rng.randrange(len(chunks)), b"zz\r\n")
    pieces = [HEAD]
    for each in chunks:
        roll = rng.random()
        if roll < 0.15:
            pieces[-1] += each
        elif roll < 0.3:
            pieces += pieces_of(each, rng, 2)
        else:
            pieces.append(each)
    return pieces


async def test_a_client_gets_the_same_with_it_and_without() -> None:
    rng, taken = random.Random(11), 0
    for number in range(150):
        pieces, slow_every = stream(rng), rng.choice((1, 3, 1000))
        answer, sink, events = await relayed(pieces, True, slow_every)
        others, other, more = await relayed(pieces, False, slow_every)
        assert (answer, sink.got, sink.complete, events) == (
            others,
            other.got,
            other.complete,
            more,
        ), (number, pieces)
        taken += sink.taken
    assert taken > 120


async def test_an_answer_after_one_that_went_past_the_parser_is_read_as_well() -> None:
    """llhttp has not seen the chunks between, and is where the last one begins."""
    pieces = [HEAD, *[chunk(EVENT)] * 20, chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n"]
    connection = Connection(Limits(), lambda closed: None, KnownHeads(), Outbox())
    connection.connection_made(Wire())
    for _ in range(3):
        sink = Sink(True, 1000)
        gaps = Gaps(lambda: 0.0, lambda: 0.0, lambda gaps_s, now: None)
        exchange = _Exchange(Pool(connection), "d", "POST", b"", b"")

        async def say() -> None:
            for piece in pieces:
                for _ in range(4):
                    await asyncio.sleep(0)
                connection.data_received(piece)

        saying = asyncio.create_task(say())
        async with exchange as response:
            done = await relay_stream(
                response, sink, Limits(), {}, lambda n: None, lambda: None, gaps
            )
        await saying
        assert (done, sink.complete) == (Relayed(), True)
        assert sink.taken > 10
        assert connection.usable


# --- through a gateway, on real sockets ---

Make = Callable[..., Any]
both = pytest.mark.parametrize("native_events", [True, False], ids=["native", "python"])


@both
async def test_events_of_a_stream_are_counted_and_timed(
    make_cluster: Make, native_events: bool
) -> None:
    async with make_cluster(native_events=native_events) as cluster:
        cluster.engine.script = Script(texts=("a",) * 50, token_delay_s=0.002)
        status, text, response = await cluster.post(completion(stream=True, max_tokens=9999))
        assert status == 200
        assert text.endswith("data: [DONE]\n\n")
        events = text.count("data: ") - 1
        record = await cluster.record(response.headers["x-request-id"])
        assert record["events"] == events
        assert len(record["itl_s"]) == events - 1
        name, target = "prfaas_gateway_itl_seconds_count", record["target"]
        assert await cluster.metric(name, target=target) == events - 1


@both
async def test_a_client_that_does_not_read_for_a_while_misses_nothing(
    make_cluster: Make, native_events: bool
) -> None:
    async with make_cluster(native_events=native_events) as cluster:
        texts = tuple(f"{number:06d}" + "x" * 20_000 for number in range(400))
        cluster.engine.script = Script(texts=texts)
        async with cluster.client.post(
            "/v1/completions", json=completion(stream=True, max_tokens=9999)
        ) as response:
            got = await response.content.readany()
            response.connection.transport.pause_reading()
            await asyncio.sleep(0.2)
            response.connection.transport.resume_reading()
            got += await response.content.read()
        assert [int(each) for each in re.findall(rb"(\d{6})x{20000}", got)] == [*range(400)]
        assert got.endswith(b"data: [DONE]\n\n")


@both
async def test_a_client_that_leaves_in_its_stream_stops_the_engine(
    make_cluster: Make, native_events: bool
) -> None:
    async with make_cluster(native_events=native_events) as cluster:
        cluster.engine.script = Script(texts=("a",) * 5000, token_delay_s=0.005)
        async with cluster.client.post(
            "/v1/completions", json=completion(stream=True, max_tokens=9999)
        ) as response:
            for _ in range(10):
                await response.content.readline()
            response.close()
        await until(lambda: cluster.engine.seen[-1].cancelled, "the engine to be told")


@both
async def test_a_stream_that_breaks_off_ends_with_an_error(
    make_cluster: Make, native_events: bool
) -> None:
    async with make_cluster(native_events=native_events) as cluster:
        cluster.engine.script = Script(
            texts=("a",) * 20, token_delay_s=0.005, stop_after=15, then="cut"
        )
        status, text, _ = await cluster.post(completion(stream=True, max_tokens=9999))
        assert status == 200
        assert '{"error":' in text.split("data: ")[-1]
        assert text.count('"text"') == 15
        assert "[DONE]" not in text


@both
async def test_comments_come_in_a_silence_between_events(
    make_cluster: Make, native_events: bool
) -> None:
    async with make_cluster(
        native_events=native_events, limits={"sse_keepalive_s": 0.1}
    ) as cluster:
        cluster.engine.script = Script(
            texts=("a",) * 12, token_delay_s=0.01, stop_after=8, then="hang"
        )
        async with cluster.client.post(
            "/v1/completions", json=completion(stream=True, max_tokens=9999)
        ) as response:
            got = b""
            while got.count(b": keepalive") < 2:
                got += await response.content.readany()
            response.close()
        assert got.count(b'"text"') == 8
