"""Certificates for tests: a CA in a directory, and pairs of any validity."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from prfaas.certs import Authority, make_certs, write_pair
from prfaas.settings import TlsSettings


class Pki:
    """Owns a directory with ca.pem and NAME/cert.pem, NAME/key.pem; pytest removes it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        make_certs(directory, (), days=1)
        self.authority = Authority.load(directory)

    def settings(self, name: str, *, peers: tuple[str, ...] = ()) -> TlsSettings:
        """Settings of a process `name`; its pair is made where there is none yet."""
        make_certs(self.directory, (name,), days=1)
        return TlsSettings(
            cert=self.directory / name / "cert.pem",
            key=self.directory / name / "key.pem",
            ca=self.directory / "ca.pem",
            peers=peers,
        )

    def rotate(self, name: str) -> None:
        make_certs(self.directory, (), days=1, rotate=(name,))

    def issue(self, name: str, *, begins_s: float, ends_s: float) -> TlsSettings:
        """A pair valid from and to so many seconds from now, in place of the one there is."""
        now = datetime.now(UTC)
        begins, ends = (now + timedelta(seconds=each) for each in (begins_s, ends_s))
        write_pair(self.directory / name, self.authority.issue(name, begins, ends))
        return self.settings(name)
