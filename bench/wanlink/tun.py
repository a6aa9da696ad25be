"""A TUN device with virtio-net headers and TCP segmentation offload in a network namespace."""

from __future__ import annotations

import fcntl
import os
import struct

from bench.wanlink import namespaces
from bench.wanlink.packets import Frame

# linux/if_tun.h
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02

DEVICE = "wan0"
NODE = "/dev/net/tun"

_QUEUE_FRAMES = 10_000
"""Of the device itself: it must never be the one that drops."""


class Tun:
    """Owns the device's file; the device is gone when it is closed."""

    def __init__(self, namespace: str, address: str, prefix_bits: int, mtu: int) -> None:
        """Make the device there, up and with the address; OSError if that is not allowed."""
        with namespaces.entered(namespace):
            self._refused = 0
            self.fd = os.open(NODE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
                fcntl.ioctl(self.fd, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
                fcntl.ioctl(self.fd, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
                self._counters = open("/proc/thread-self/net/dev")  # noqa: SIM115 of that namespace
            except BaseException:
                os.close(self.fd)
                raise
        try:
            device = ("-n", namespace, "link", "set", DEVICE)
            namespaces.run_ip(*device, "mtu", str(mtu), "txqueuelen", str(_QUEUE_FRAMES))
            namespaces.run_ip(*device, "addrgenmode", "none", "up")  # no IPv6 chatter
            cidr = f"{address}/{prefix_bits}"
            namespaces.run_ip("-n", namespace, "addr", "add", cidr, "dev", DEVICE)
        except BaseException:
            self.close()
            raise

    def deliver(self, frames: list[Frame]) -> int:
        """Give them to the kernel of that side; their bytes."""
        fd, size = self.fd, 0
        for frame in frames:
            try:
                size += os.write(fd, frame)
            except OSError:  # the device is down
                self._refused += 1
        return size

    @property
    def refused(self) -> int:
        """Frames that could not be delivered."""
        return self._refused

    def dropped(self) -> int:
        """Frames that the kernel dropped on the way to the reader of this file."""
        self._counters.seek(0)
        for line in self._counters:
            name, _, values = line.partition(":")
            if name.strip() == DEVICE:
                return int(values.split()[11])  # transmit: bytes, packets, errs, drop
        raise OSError(f"{DEVICE} is gone")

    def close(self) -> None:
        self._counters.close()
        os.close(self.fd)
