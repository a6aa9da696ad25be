"""A userspace link."""

from bench.wanlink.link import WanLink, available
from bench.wanlink.measure import LinkReport
from bench.wanlink.shape import LinkStats, parse_rate
from bench.wanlink.tcp import TcpSettings

__all__ = ["LinkReport", "LinkStats", "TcpSettings", "WanLink", "available", "parse_rate"]
