"""Frames as a TUN device with virtio-net headers gives them: wire size, and cutting TCP ones.

A frame is the 10 bytes of `struct virtio_net_hdr` (virtio 1.2, 5.1.6; native byte order) and an IP
packet. A TCP super-frame (segmentation offload) stands for many packets on the wire; its checksum
field holds the pseudo-header's sum only and the kernel that reads it trusts or completes it.
"""

from __future__ import annotations

import struct

Frame = bytes

VNET_HEADER_BYTES = 10
MAX_FRAME_BYTES = VNET_HEADER_BYTES + 65535

WIRE_OVERHEAD_BYTES = 38
"""What Ethernet adds to an IP packet: preamble 8, header 14, checksum 4, gap 12."""

_VNET = struct.Struct("=BBHHHH")
_VNET_NEEDS_CSUM = 1
_GSO_NONE, _GSO_TCP4 = 0, 1
_FIN, _PSH, _CWR = 0x01, 0x08, 0x80


def wire_size(frame: Frame) -> tuple[int, int]:
    """How many packets the frame is on the wire, and their bytes with headers and overhead."""
    size = len(frame) - VNET_HEADER_BYTES
    if frame[1] == _GSO_NONE:
        return 1, size + WIRE_OVERHEAD_BYTES
    csum_start = frame[6] | frame[7] << 8
    header_bytes = csum_start + (frame[VNET_HEADER_BYTES + csum_start + 12] >> 4) * 4
    segment_bytes = frame[4] | frame[5] << 8
    packets = -(-(size - header_bytes) // segment_bytes)
    return packets, size + (packets - 1) * header_bytes + packets * WIRE_OVERHEAD_BYTES


def full_packet_bytes(frame: Frame) -> int:
    """Wire bytes of each packet of a super-frame but the last, which may be shorter."""
    csum_start = frame[6] | frame[7] << 8
    header_bytes = csum_start + (frame[VNET_HEADER_BYTES + csum_start + 12] >> 4) * 4
    return header_bytes + (frame[4] | frame[5] << 8) + WIRE_OVERHEAD_BYTES


def cut(frame: Frame, first: int, end: int) -> Frame:
    """Packets `first` to `end` (exclusive) of a TCP/IPv4 super-frame as a frame of their own.

    Does what a network card does (Linux: net/ipv4/tcp_offload.c): sequence number, IP id, lengths
    and both checksum fields are those of the part; FIN and PSH stay with the last packet, CWR with
    the first.
    """
    flags, gso_type, _, segment_bytes, csum_start, csum_offset = _VNET.unpack_from(frame)
    if gso_type != _GSO_TCP4 or not flags & _VNET_NEEDS_CSUM:
        raise ValueError(f"cannot cut a frame of virtio type {gso_type} with flags {flags}")
    tcp_at = VNET_HEADER_BYTES + csum_start
    header_bytes = csum_start + (frame[tcp_at + 12] >> 4) * 4
    payload_at = VNET_HEADER_BYTES + header_bytes
    last_packet = -(-(len(frame) - payload_at) // segment_bytes)
    payload = frame[payload_at + first * segment_bytes : payload_at + end * segment_bytes]
    if not 0 <= first < end <= last_packet:
        raise ValueError(f"no packets {first} to {end} in a frame of {last_packet}")

    header = bytearray(frame[:payload_at])
    if end - first == 1:
        _VNET.pack_into(header, 0, flags, _GSO_NONE, 0, 0, csum_start, csum_offset)
    ip_bytes = header_bytes + len(payload)
    ip_at = VNET_HEADER_BYTES
    ip_id = int.from_bytes(header[ip_at + 4 : ip_at + 6])
    struct.pack_into("!HH", header, ip_at + 2, ip_bytes, (ip_id + first) & 0xFFFF)
    struct.pack_into("!H", header, ip_at + 10, 0)
    struct.pack_into("!H", header, ip_at + 10, 0xFFFF ^ _sum16(header[ip_at:tcp_at]))

    sequence = int.from_bytes(header[tcp_at + 4 : tcp_at + 8])
    sequence = (sequence + first * segment_bytes) & 0xFFFFFFFF
    struct.pack_into("!I", header, tcp_at + 4, sequence)
    if end < last_packet:
        header[tcp_at + 13] &= ~(_FIN | _PSH)
    if first > 0:
        header[tcp_at + 13] &= ~_CWR
    pseudo = bytes(header[ip_at + 12 : ip_at + 20]) + struct.pack(
        "!HH", header[ip_at + 9], ip_bytes - csum_start
    )
    struct.pack_into("!H", header, tcp_at + csum_offset, _sum16(pseudo))
    return bytes(header) + payload


def _sum16(data: bytes | bytearray) -> int:
    """The ones' complement sum of big-endian 16-bit words (RFC 1071), not inverted."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total
