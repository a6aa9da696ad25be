"""docs/protocol.md says what the code does."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import google_crc32c
import pytest

from prfaas import frames
from prfaas.codecs import KNOWN_CODECS
from prfaas.frames import Frame, FrameFlag, FrameType
from prfaas.receive_session import ReceiveState
from prfaas.rpc.v1 import prefill_pb2
from prfaas.send_session import SendState
from prfaas.telemetry import LinkInfo, LinkLimit
from prfaas.transfer import PARAMS_VERSION, SeenTransfers
from prfaas_connect.port import messages
from prfaas_connect.port.messages import PortMessage

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
SIZES = {1: "B", 2: "H", 4: "I", 8: "Q"}


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text()


def rows(page: str, first_column: str) -> list[list[str]]:
    """Cells of the table whose first header is `first_column`."""
    lines = page.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return found


def test_the_header_table_reads_a_frame(page: str) -> None:
    frame = Frame(
        type=FrameType.KV,
        session=0x1122334455667788,
        epoch=3,
        flags=FrameFlag.CACHED,
        codec=1,
        group=2,
        chunk=4,
        layer_start=5,
        layer_end=6,
        token_start=7,
        token_end=8,
        head_start=9,
        head_end=10,
        raw_bytes=11,
        sequence=12,
        payload=b"payload",
    )
    data = frame.serialize()
    found: dict[str, int] = {}
    end = 0
    for offset, size, name, _ in rows(page, "offset"):
        assert int(offset) == end, name
        end = int(offset) + int(size)
        if name != "magic":
            (found[name],) = struct.unpack_from("<" + SIZES[int(size)], data, int(offset))
    assert end == frames.HEADER_BYTES == 68
    assert data[:2] == b"PF"
    for name in ("session", "epoch", "codec", "group", "chunk", "layer_start", "layer_end"):
        assert found[name] == getattr(frame, name)
    for name in (
        "token_start",
        "token_end",
        "head_start",
        "head_end",
        "raw_bytes",
        "sequence",
        "type",
        "flags",
    ):
        assert found[name] == getattr(frame, name)
    assert (found["version"], found["wire_bytes"]) == (frames.WIRE_MAJOR, len(frame.payload))
    assert found["payload_crc"] == google_crc32c.value(b"payload")
    assert found["header_crc"] == google_crc32c.value(data[:64])


def test_types_flags_and_codecs_are_all_there(page: str) -> None:
    assert {(r[0], int(r[1])) for r in rows(page, "type")} == {(t.name, t.value) for t in FrameType}
    flags = {(f.name, f.value) for f in FrameFlag if f}
    assert {(r[0], int(r[1])) for r in rows(page, "flag")} == flags
    assert {r[0]: int(r[1]) for r in rows(page, "codec")} == KNOWN_CODECS


def test_versions_are_the_codes(page: str) -> None:
    listed = {r[0].strip("`"): r[1] for r in rows(page, "what")}
    assert listed["wire major"] == str(frames.WIRE_MAJOR)
    assert listed["wire minor"] == str(frames.WIRE_MINOR)
    assert listed["KvPort"] == str(messages.PORT_VERSION)
    assert listed["kv_transfer_params"] == str(PARAMS_VERSION)


def test_every_message_of_kvport_is_listed(page: str) -> None:
    types = {cls.TYPE for cls in vars(messages).values() if _is_message(cls)}
    assert {r[0] for r in rows(page, "message")} == types


def test_every_state_is_named(page: str) -> None:
    text = page[page.index("## A session") : page.index("## KvPort")]
    named = set(re.findall(r"`([A-Z]+)`", text))
    assert {s.name for s in (*SendState, *ReceiveState)} <= named


def test_what_watch_tells_of_links_is_all_there(page: str) -> None:
    named = {name.strip(" `") for row in rows(page, "field") for name in row[0].split(",")}
    own = {"peer", "instance", "agent", "link_class", "detail", "wire_ratio", "sessions"}
    assert named | own == set(LinkInfo.__dataclass_fields__)
    fields = prefill_pb2.LinkSample.DESCRIPTOR.fields_by_name
    assert set(LinkInfo.__dataclass_fields__) == set(fields)
    assert [row[0] for row in rows(page, "slow part")] == list(LinkLimit)


def test_limits_are_the_codes(page: str) -> None:
    listed = {r[0]: r[1] for r in rows(page, "limit")}
    assert frames.DEFAULT_FRAME_LIMITS.max_payload_bytes == 64 << 20
    assert frames.DEFAULT_FRAME_LIMITS.max_control_bytes == 16 << 20
    assert listed["KV payload, encoded or decoded"] == "64 MiB"
    assert listed["control payload"] == "16 MiB"
    assert (messages.MAX_HEADER_BYTES, messages.MAX_BLOB_BYTES) == (4 << 20, 16 << 20)
    assert listed["KvPort header, blob"] == "4 MiB, 16 MiB"
    assert listed["transfer ids remembered"] == f"{SeenTransfers().capacity:,}"


def _is_message(cls: object) -> bool:
    return isinstance(cls, type) and issubclass(cls, PortMessage) and cls is not PortMessage
