"""KvPort messages: each crosses whole; wrong types, sizes and names are errors that say which."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas_connect.port import messages
from prfaas_connect.port.messages import (
    PREFIX,
    Fetch,
    KvEvents,
    PortError,
    PortMessage,
    Record,
    RingFree,
    Stats,
    decode,
    encode,
    sizes,
)


@pytest.mark.parametrize(
    "message",
    [
        RingFree(3),
        Fetch("s", {"version": 1, "plan": [{"peer": "a"}]}, 16, 99, 83),
        Record("s", 1, 2, 0, 3, 16, 32, 0, 2, 4096, 512, cached=True),
        KvEvents("e", 1, stored=["00"], cleared=True),
        Stats(1, 2, 3, 4, 5, 6, 0.5, 0, 0.25, 1e-9),
    ],
    ids=lambda m: m.TYPE,
)
def test_a_message_crosses_whole(message: PortMessage) -> None:
    data = encode(message, b"tokens")
    header_bytes, blob_bytes = sizes(data[: PREFIX.size])
    assert decode(data[PREFIX.size : PREFIX.size + header_bytes]) == message
    assert data[-blob_bytes:] == b"tokens"


@pytest.mark.parametrize(
    ("header", "names"),
    [
        (b"\xff\xfe", "JSON"),
        (b"[]", "object"),
        (b'{"type":"nope"}', "nope"),
        (b'{"type":{}}', "unknown message type"),
        (b'{"type":"ring_free"}', "count"),
        (b'{"type":"ring_free","count":true}', "ring_free.count"),
        (b'{"type":"ring_free","count":1.5}', "ring_free.count"),
        (b'{"type":"ring_free","count":1,"extra":2}', "extra"),
        (b'{"type":"ring_free","count":1,"TYPE":"x"}', "TYPE"),
        (b'{"type":"kv_events","epoch":"e","seq":1,"stored":[1]}', "kv_events.stored"),
        (b'{"type":"fetch","session":"s","params":[],"have":0,"want":1,"uncached":1}', "params"),
        (b'{"type":"ring_free","count":9223372036854775808}', "64 bits"),
        (b'{"type":"abort","session":"\\ud800"}', "Unicode"),
        (
            b'{"type":"fetch_done","session":"s","status":"","reason":"","retry_after_s":1e999}',
            "finite",
        ),
        (b'{"type":"abort","session":' + b"[" * 100_000, "JSON"),
    ],
)
def test_malformed_headers_name_what_is_wrong(header: bytes, names: str) -> None:
    with pytest.raises(PortError, match=names):
        decode(header)


def test_sizes_are_refused_before_memory_is_taken() -> None:
    with pytest.raises(PortError, match="claims"):
        sizes(struct.pack("<II", 2**32 - 1, 0))
    with pytest.raises(PortError, match="claims"):
        sizes(struct.pack("<II", 0, messages.MAX_BLOB_BYTES + 1))
    with pytest.raises(PortError, match="too large"):
        encode(RingFree(1), bytes(messages.MAX_BLOB_BYTES + 1))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(
    st.sampled_from(["hello", "stats", "fetch", "record", "kv_events", "welcome", "x"]),
    st.dictionaries(st.sampled_from(["session", "epoch", "params", "version", "seq"]), json_values),
)
def test_arbitrary_json_gives_a_message_or_a_port_error(name: str, fields: dict) -> None:
    try:
        decode(json.dumps({"type": name, **fields}).encode())
    except PortError:
        pass
