"""What a process dials over gRPC: an address, the certificates shown there, the name expected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import grpc.aio

from prfaas.errors import ConfigError
from prfaas.settings import TlsSettings
from prfaas.tls import channel_credentials, is_loopback, server_name_options
from prfaas.tls_files import TlsFiles, Use

Options = Sequence[tuple[str, int | str]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address that may be dialled; borrows the certificates. Made by `checked_endpoint`."""

    address: str
    files: TlsFiles | None = None
    """None: plain text."""
    tls_name: str | None = None
    """Name the server's certificate must carry; None: the host in the address."""

    def version(self) -> str:
        """Of the certificates now; a channel opened under another one is to be opened anew."""
        return self.files.version() if self.files is not None else ""

    def open(self, options: Options) -> grpc.aio.Channel:
        """A channel with the certificates of now; the caller closes it."""
        if self.files is None:
            return grpc.aio.insecure_channel(self.address, options=list(options))
        credentials = channel_credentials(self.files.current())
        named = server_name_options(self.tls_name) if self.tls_name else []
        return grpc.aio.secure_channel(self.address, credentials, options=[*options, *named])


def open_files(tls: TlsSettings | None, use: Use, key: str) -> TlsFiles | None:
    """Certificates of this process, if it has any. Raises ConfigError where they are no good."""
    return TlsFiles(tls, use, key=key) if tls is not None else None


def ends_at(files: TlsFiles | None) -> float:
    """Unix time at which the certificate of this process ends; 0 where it has none."""
    return files.current().not_after.timestamp() if files is not None else 0.0


def checked_endpoint(
    address: str, files: TlsFiles | None, tls_name: str | None, key: str
) -> Endpoint:
    """Raise ConfigError naming `key` for what is no `host:port`, and for all but loopback without
    TLS.
    """
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not (host and colon and port.isascii() and port.isdigit()) or (
        ":" in host and not bracketed
    ):
        raise ConfigError(f"{key}: {address!r} is not host:port")
    if files is None and not is_loopback(host):
        raise ConfigError(
            f"{key}: {address!r} is not a loopback address, and without TLS only those are "
            "dialled; set tls (cert, key, ca)"
        )
    if files is None and tls_name is not None:
        raise ConfigError(f"{key}: tls_name {tls_name!r} needs tls (cert, key, ca)")
    return Endpoint(address, files, tls_name)
