"""Everything an agent reads from the wire: frames, session machines, control payloads, codecs."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import replace

import google_crc32c
import numpy as np
import pytest

from prfaas.codecs import RAW, PlanesZstdCodec, default_codecs, encode
from prfaas.errors import CorruptKv, IncompatibleLayout, PrfaasError, ProtocolError
from prfaas.frames import HEADER_BYTES, Frame, FrameType, parse_all
from prfaas.layout import Fingerprint, GroupKind, KvLayout, LayerGroup
from prfaas.ledger import piece_digest
from prfaas.receive_session import ReceiveSession, ReceiveState
from prfaas.rpc import convert
from prfaas.rpc.v1 import prefill_pb2 as pb
from prfaas.send_session import SendSession
from prfaas.session_messages import (
    Feature,
    Handshake,
    LaneAttach,
    PrefillReport,
    SessionAck,
    SessionOpen,
    SessionResume,
)
from prfaas.testing.fuzz import fuzz, mutate_bytes
from prfaas.testing.kv_pieces import split_pieces

LAYOUT = KvLayout((LayerGroup(GroupKind.FULL, (0, 1), 2, 4, "bfloat16"),))
CHUNK, TOKENS = 4, 11
SESSION = 0xABCDEF
REQUEST = SessionOpen(
    transfer_id="t", model="m", tokens=bytes(4 * TOKENS), send_from=0, salt="s", use_cache=True,
    quality="exact", codecs=("planes-zstd", "raw"), deadline_s=5.0, lease_s=5.0,
    engine_epoch="e", link=b"l", credit_bytes=1 << 20,
)  # fmt: skip


ACK = SessionAck(1, ((2, 4), (7, 8)), ((5, 6),), (4,), 9000, (0, 1), 2, 3.0, wanted=((0, 2),))


def recorded_session() -> list[Frame]:
    """All frames down of one good session: ACCEPT twice, pieces in two codecs, SEAL."""
    rng = random.Random(1)
    machine = SendSession(
        session=SESSION, epoch=1, request=REQUEST, layout=LAYOUT, chunk_tokens=CHUNK
    )
    frames = [machine.accept(2, 100), machine.accept(0, 100)]
    for piece in split_pieces(LAYOUT, 0, TOKENS, CHUNK, rng):
        nbytes = machine.ledger.piece_bytes(piece)
        raw = np.frombuffer(rng.randbytes(8) * (nbytes // 8) + bytes(nbytes % 8), dtype=np.uint8)
        codec, payload = encode(rng.choice((RAW, PlanesZstdCodec())), raw, 2)
        for cut in machine.claim(piece, nbytes):
            machine.put(
                cut, raw_bytes=nbytes, digest=piece_digest(raw), codec=codec, payload=payload
            )
            frames += machine.take(0, app_limited=False)
    return [*frames, machine.seal(PrefillReport(1, 10, 0.1, 0.2, 5.0, 7))]


SESSION_FRAMES = recorded_session()
MESSAGES = [
    b"".join(f.serialize() for f in SESSION_FRAMES[i : i + n])
    for i in range(len(SESSION_FRAMES))
    for n in (1, 3)
]


def reseal(data: bytes) -> bytes:
    """The checksums of the first frame made right again, so that what they guard is reached."""
    if len(data) < HEADER_BYTES:
        return data
    changed = bytearray(data)
    (wire_bytes,) = struct.unpack_from("<Q", changed, HEADER_BYTES - 20)
    payload = bytes(changed[HEADER_BYTES : HEADER_BYTES + min(wire_bytes, len(changed))])
    struct.pack_into("<I", changed, HEADER_BYTES - 8, google_crc32c.value(payload))
    head = bytes(changed[: HEADER_BYTES - 4])
    struct.pack_into("<I", changed, HEADER_BYTES - 4, google_crc32c.value(head))
    return bytes(changed)


@pytest.mark.parametrize("sealed", [False, True])
def test_messages_of_frames(sealed: bool) -> None:
    def make(rng: random.Random) -> bytes:
        data = rng.choice(MESSAGES)
        for _ in range(rng.randrange(3)):
            data = mutate_bytes(data, MESSAGES, rng)
        return reseal(data) if sealed else data

    fuzz(f"frames/{sealed}", lambda data: list(parse_all(data)), make, (ProtocolError, CorruptKv))


def mutated_frame(frame: Frame, rng: random.Random) -> Frame:
    """Some fields of a frame changed within what the header can carry."""
    bounds = {
        "codec": 8, "group": 8, "chunk": 32, "layer_start": 16, "layer_end": 16, "token_start": 32,
        "token_end": 32, "head_start": 16, "head_end": 16, "raw_bytes": 64, "epoch": 32,
        "session": 64, "sequence": 32,
    }  # fmt: skip
    for _ in range(rng.choice((0, 1, 1, 2))):
        name = rng.choice([*bounds, "type", "payload"])
        if name == "type":
            frame = replace(frame, type=rng.choice(list(FrameType)))
        elif name == "payload":
            payloads = [bytes(f.payload) for f in SESSION_FRAMES]
            frame = replace(frame, payload=mutate_bytes(bytes(frame.payload), payloads, rng))
        else:
            most = (1 << bounds[name]) - 1
            near = min(max(0, getattr(frame, name) + rng.choice((-1, 1, 2))), most)
            frame = replace(frame, **{name: rng.choice((near, near, 0, most))})
    return frame


def test_a_receiver_takes_any_frames_in_any_order() -> None:
    """Only our errors get out, a broken session stays broken, a complete one had every byte."""
    codecs = default_codecs()
    complete = 0

    def run(frames: list[Frame]) -> None:
        nonlocal complete
        machine = ReceiveSession(
            session=SESSION, epoch=1, request=REQUEST, layout=LAYOUT, codecs=codecs,
            chunk_tokens=CHUNK,
        )  # fmt: skip
        for frame in frames:
            for parsed in parse_all(frame.serialize()):
                try:
                    arrival = machine.receive(parsed)
                except PrfaasError:
                    assert machine.ended
                    raise
                if arrival is None:
                    continue
                try:
                    if not parsed.intact:
                        raise CorruptKv("crc")
                    out = np.empty(parsed.raw_bytes, dtype=np.uint8)
                    codecs.by_id(parsed.codec).decode_into(memoryview(parsed.payload), out, 2)
                except CorruptKv as exc:
                    machine.broken(arrival, exc)
                    continue
                machine.decoded(arrival, piece_digest(out))
        if machine.state is ReceiveState.COMPLETE:
            complete += 1
            assert machine.ledger.whole
            assert machine.seal is not None
            assert machine.seal.root_digest == machine.ledger.root_digest()

    def make(rng: random.Random) -> list[Frame]:
        frames = list(SESSION_FRAMES)
        for _ in range(rng.choice((0, 1, 1, 3))):
            at = rng.randrange(len(frames))
            match rng.randrange(4):
                case 0:
                    frames[at] = mutated_frame(frames[at], rng)
                case 1:
                    frames.insert(at, mutated_frame(rng.choice(frames), rng))
                case 2:
                    del frames[at]
                case _:
                    other = rng.randrange(len(frames))
                    frames[at], frames[other] = frames[other], frames[at]
        return frames

    fuzz("receive session", run, make, (PrfaasError,))
    assert complete


def test_a_sender_takes_any_frames_from_the_other_side() -> None:
    request = replace(REQUEST, on_demand=True)
    machine = SendSession(
        session=SESSION, epoch=1, request=request, layout=LAYOUT, chunk_tokens=CHUNK
    )
    ack = Frame(FrameType.ACK, SESSION, 1, payload=convert.ack_to_bytes(ACK))

    def make(rng: random.Random) -> bytes:
        frame = mutated_frame(ack, rng) if rng.random() < 0.8 else rng.choice(SESSION_FRAMES)
        return frame.serialize()

    def run(data: bytes) -> None:
        for frame in parse_all(data):
            machine.receive(frame)

    fuzz("send session", run, make, (ProtocolError, CorruptKv))


FINGERPRINT = Fingerprint(1, "identity", "config", "tokenizer", ("a",), LAYOUT)
HANDSHAKE = Handshake("n", "m", 1, 0, Feature.NONE, FINGERPRINT, ("raw",), 256, 4096, "i", "e")


def read_handshake(data: bytes) -> Handshake:
    """As the server does: gRPC's own parser first, whose refusals never reach us."""
    try:
        message = pb.HandshakeRequest.FromString(data)
    except Exception as exc:
        raise ProtocolError(str(exc)) from exc
    theirs = convert.handshake_from_request(message)
    FINGERPRINT.require_compatible(theirs.fingerprint)
    return theirs


PARSERS: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "open": (convert.open_from_bytes, convert.open_to_bytes(REQUEST)),
    "accept": (convert.accept_from_bytes, bytes(SESSION_FRAMES[0].payload)),
    "seal": (convert.seal_from_bytes, bytes(SESSION_FRAMES[-1].payload)),
    "ack": (
        convert.ack_from_bytes,
        convert.ack_to_bytes(ACK),
    ),
    "resume": (
        convert.resume_from_bytes,
        convert.resume_to_bytes(SessionResume(b"link", ACK)),
    ),
    "attach": (convert.attach_from_bytes, convert.attach_to_bytes(LaneAttach(b"link", 3))),
    "error": (
        convert.error_from_bytes,
        convert.error_to_bytes(
            PrfaasError("m", param="p", retry_after_s=1.0, phase="total", field="f")
        ),
    ),
    "handshake": (read_handshake, convert.handshake_request(HANDSHAKE).SerializeToString()),
}


@pytest.mark.parametrize("name", PARSERS)
def test_control_payloads(name: str) -> None:
    parser, good = PARSERS[name]
    others = [data for _, data in PARSERS.values()]

    def make(rng: random.Random) -> bytes:
        return mutate_bytes(good, others, rng) if rng.random() < 0.95 else good

    fuzz(f"control/{name}", parser, make, (ProtocolError, IncompatibleLayout))


@pytest.mark.parametrize("item_bytes", [2, 4])
def test_codec_payloads(item_bytes: int) -> None:
    """Whatever arrives, exactly the negotiated bytes are written, or CorruptKv."""
    rng = random.Random(2)
    size = 512 * item_bytes
    raws = [bytes(size), rng.randbytes(size), rng.randbytes(16) * (size // 16)]
    codec = PlanesZstdCodec()
    payloads = [encode(codec, np.frombuffer(raw, dtype=np.uint8), item_bytes)[1] for raw in raws]
    canvas = np.zeros(size + 128, dtype=np.uint8)

    def make(rng: random.Random) -> tuple[int, bytes]:
        data = rng.choice(payloads)
        return rng.choice((0, 1)), data if rng.random() < 0.1 else mutate_bytes(data, payloads, rng)

    def run(value: tuple[int, bytes]) -> None:
        codec_id, payload = value
        try:
            default_codecs().by_id(codec_id).decode_into(
                memoryview(payload), canvas[64:-64], item_bytes
            )
        finally:
            assert not canvas[:64].any()
            assert not canvas[-64:].any()

    fuzz(f"codec/{item_bytes}", run, make, (CorruptKv,))
