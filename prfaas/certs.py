"""A CA and certificates for tests and pilots; production takes them from a CA of its own."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from prfaas.clock import SYSTEM_CLOCK, Clock
from prfaas.errors import ConfigError

CA_DAYS = 365
_SKEW = timedelta(minutes=5)
"""Certificates begin a little in the past: clocks of two sites differ."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its private key, PEM."""

    cert: bytes
    key: bytes
    not_after: datetime


@dataclass(frozen=True, slots=True)
class Made:
    """What `make_certs` did for one name."""

    name: str
    directory: Path
    not_after: datetime
    new: bool


class Authority:
    """A CA in memory; issues P-256 certificates that both serve and dial."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def create(cls, not_before: datetime, not_after: datetime) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        # A name of its own each time: two CAs in one bundle must not be mistaken for each other.
        name = _common_name(f"prfaas test CA {os.urandom(4).hex()}")
        builder = _builder(name, name, key, not_before, not_after)
        usage = x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        certificate = (
            builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(key, SHA256())
        )
        return cls(certificate, key)

    @classmethod
    def load(cls, directory: Path, clock: Clock = SYSTEM_CLOCK) -> Authority:
        """The CA in `directory`. Raises ConfigError where it is no good any more."""
        paths = _ca_paths(directory)
        try:
            certificate = x509.load_pem_x509_certificate(paths[0].read_bytes())
            key = load_pem_private_key(paths[1].read_bytes(), None)
        except OSError as exc:
            raise ConfigError(f"{exc.filename}: {exc.strerror}") from exc
        except (ValueError, TypeError) as exc:
            raise ConfigError(f"{paths[0]} and {paths[1]} are not a CA made here") from exc
        if (
            not isinstance(key, ec.EllipticCurvePrivateKey)
            or key.public_key() != certificate.public_key()
        ):
            raise ConfigError(f"{paths[1]} is not the key of {paths[0]}")
        if certificate.not_valid_after_utc < _now(clock):
            raise ConfigError(f"{paths[0]} has expired; make a new CA in another directory")
        return cls(certificate, key)

    @property
    def pem(self) -> bytes:
        return self._certificate.public_bytes(Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return _key_pem(self._key)

    def issue(self, name: str, not_before: datetime, not_after: datetime) -> Pair:
        """A pair for `name`, localhost, 127.0.0.1 and ::1, that does not outlive the CA."""
        key = ec.generate_private_key(ec.SECP256R1())
        not_after = min(not_after, self._certificate.not_valid_after_utc)
        issuer = self._certificate
        builder = _builder(_common_name(name), issuer.subject, key, not_before, not_after)
        names = x509.SubjectAlternativeName(
            [
                x509.DNSName(name),
                x509.DNSName("localhost"),
                x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
                x509.IPAddress(ipaddress.ip_address("::1")),
            ]
        )
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(names, critical=False)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(authority, critical=False)
            .sign(self._key, SHA256())
        )
        return Pair(certificate.public_bytes(Encoding.PEM), _key_pem(key), not_after)


def make_certs(
    directory: Path,
    names: Sequence[str],
    *,
    days: int,
    rotate: Sequence[str] = (),
    clock: Clock = SYSTEM_CLOCK,
) -> list[Made]:
    """Make the CA where there is none, a pair for each name that has none, and new ones to rotate.

    `directory` gets ca.pem, ca.key and for each name NAME/cert.pem and NAME/key.pem. Raises
    ConfigError for names that are no host names and files that are in the way.
    """
    for name in (*names, *rotate):
        if not _NAME.fullmatch(name) or name == "localhost":
            raise ConfigError(f"{name!r} cannot be a name: lower-case letters, digits, - and .")
    for name in rotate:
        if not (directory / name / "cert.pem").exists():
            raise ConfigError(f"{directory / name} does not exist; make it with --name {name}")
    try:
        authority = _ensure_ca(directory, clock)
        return [
            _ensure_pair(authority, directory / name, days, name in rotate, clock)
            for name in dict.fromkeys((*names, *rotate))
        ]
    except OSError as exc:
        raise ConfigError(f"{exc.filename}: {exc.strerror}") from exc


def describe(directory: Path, made: Sequence[Made]) -> str:
    """What `make_certs` left in `directory`, for people."""
    lines = [
        f"CA    {directory / 'ca.pem'}",
        *(
            f"{'made' if each.new else 'kept'}  {each.directory / 'cert.pem'} and key.pem, "
            f"until {each.not_after:%Y-%m-%d %H:%M}Z"
            for each in made
        ),
        "",
        "These are for tests and pilots only: the CA's key lies unencrypted beside them, and",
        "whoever has it can be anyone. In production take certificates from a CA of your own.",
    ]
    return "\n".join(lines)


def write_pair(path: Path, pair: Pair) -> None:
    """Put cert.pem and key.pem into `path` at one stroke: it is a link to a directory of their own.

    A process that reads the two files around the change sees a key and a certificate that do not
    fit, never a half-written file, and TlsFiles then reads again.
    """
    if path.exists() and not path.is_symlink():
        raise ConfigError(f"{path} is in the way: it was not made here")
    before = path.resolve() if path.is_symlink() else None
    directory = path.with_name(f".{path.name}-{os.urandom(8).hex()}")
    directory.mkdir(mode=0o755)
    _write(directory / "cert.pem", pair.cert, 0o644)
    _write(directory / "key.pem", pair.key, 0o600)
    link = directory.with_name(directory.name + ".link")
    link.symlink_to(directory.name)
    link.replace(path)
    if before is not None and before.parent == directory.parent.resolve():
        shutil.rmtree(before, ignore_errors=True)


def _ensure_ca(directory: Path, clock: Clock) -> Authority:
    certificate, key = _ca_paths(directory)
    if certificate.exists() or key.exists():
        return Authority.load(directory, clock)
    now = _now(clock)
    authority = Authority.create(now - _SKEW, now + timedelta(days=CA_DAYS))
    directory.mkdir(parents=True, exist_ok=True)
    _write(key, authority.key_pem, 0o600)
    _write(certificate, authority.pem, 0o644)
    return authority


def _ensure_pair(authority: Authority, path: Path, days: int, rotate: bool, clock: Clock) -> Made:
    if path.exists() and not rotate:
        return Made(path.name, path, _not_after(path / "cert.pem"), new=False)
    now = _now(clock)
    pair = authority.issue(path.name, now - _SKEW, now + timedelta(days=days))
    write_pair(path, pair)
    return Made(path.name, path, pair.not_after, new=True)


def _ca_paths(directory: Path) -> tuple[Path, Path]:
    return directory / "ca.pem", directory / "ca.key"


def _write(path: Path, data: bytes, mode: int) -> None:
    """A new file with this mode from its first byte on."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _not_after(path: Path) -> datetime:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path} is in the way: not a certificate made here") from exc


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    not_before: datetime,
    not_after: datetime,
) -> x509.CertificateBuilder:
    public = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(not_before)
        .not_valid_after(not_after)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _now(clock: Clock) -> datetime:
    return datetime.fromtimestamp(clock.wall(), UTC)
