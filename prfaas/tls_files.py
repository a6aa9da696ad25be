"""Certificate, key and CA files of one process: read, checked, and read again when they change."""

from __future__ import annotations

import hashlib
import logging
import stat
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, ObjectIdentifier

from prfaas.clock import SYSTEM_CLOCK, Clock
from prfaas.errors import ConfigError
from prfaas.settings import TlsSettings

log = logging.getLogger(__name__)

Use = Literal["server", "client", "both"]

_SERVER = (ExtendedKeyUsageOID.SERVER_AUTH, "serverAuth")
_CLIENT = (ExtendedKeyUsageOID.CLIENT_AUTH, "clientAuth")
_PURPOSES: Mapping[Use, tuple[tuple[ObjectIdentifier, str], ...]] = MappingProxyType(
    {"server": (_SERVER,), "client": (_CLIENT,), "both": (_SERVER, _CLIENT)}
)

_UNREADABLE = (
    ValueError,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)

_MAX_READS = 4
"""Files are read until two reads agree, as they may be replaced meanwhile; longer is a fault."""


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """Certificate chain, key and CAs that fit each other; `version` is a digest of all three."""

    cert: bytes
    key: bytes
    ca: bytes
    version: str
    names: tuple[str, ...]
    not_after: datetime

    def __repr__(self) -> str:
        return f"<TlsMaterial {self.names[0]} until {_time(self.not_after)} {self.version[:8]}>"


class TlsFiles:
    """The newest good material of one process; any thread may ask. Holds no file open.

    The constructor raises ConfigError when the files are no good. Later on, files that are broken
    or half written are logged once and the material from before stays in force.
    """

    def __init__(
        self, settings: TlsSettings, use: Use, *, key: str = "tls", clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._check = _Check(settings, use, key, clock)
        self._clock = clock
        self._lock = threading.Lock()
        self._material = self._check.material(self._check.read())
        self._logged = ""
        if settings.key.stat().st_mode & stat.S_IROTH:
            log.warning("%s.key: %s can be read by every user of this host", key, settings.key)

    def current(self) -> TlsMaterial:
        """What is on disk now, or the last that was good."""
        with self._lock:
            try:
                files = self._check.read()
                if files.version != self._material.version:
                    self._material = self._check.material(files)
                    log.info("%s: uses %r from now on", self._check.key, self._material)
            except ConfigError as exc:
                self._log_once(f"{exc.message}; keeps {self._material!r}")
            else:
                if self._material.not_after.timestamp() > self._clock.wall():
                    self._logged = ""
                else:
                    self._log_once(f"{self._check.key}.cert: expired: {self._material!r}")
            return self._material

    def version(self) -> str:
        """Digest of `current()`; channels opened under another one are to be opened anew."""
        return self.current().version

    def _log_once(self, problem: str) -> None:
        if problem != self._logged:
            self._logged = problem
            log.warning(problem)


def check_files(
    settings: TlsSettings, use: Use, *, key: str = "tls", clock: Clock = SYSTEM_CLOCK
) -> TlsMaterial:
    """The material in the files. Raises ConfigError naming the setting, the file and its fault.

    Refused are: files missing or not PEM, a key that is encrypted, of a kind gRPC cannot use or
    of another certificate, a certificate that is expired, not valid yet, without a name, not for
    this `use` or not signed by the CA.
    """
    check = _Check(settings, use, key, clock)
    return check.material(check.read())


@dataclass(frozen=True, slots=True)
class _Files:
    cert: bytes
    key: bytes
    ca: bytes

    @property
    def version(self) -> str:
        digest = hashlib.sha256()
        for part in (self.cert, self.key, self.ca):
            digest.update(hashlib.sha256(part).digest())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Check:
    settings: TlsSettings
    use: Use
    key: str
    clock: Clock

    def read(self) -> _Files:
        """All three files as they were at one moment."""
        before, fault = None, ConfigError(f"{self.key}: the files change all the time")
        for _ in range(_MAX_READS):
            try:
                files = self._read_once()
            except ConfigError as exc:
                before, fault = None, exc
                continue
            if files == before:
                return files
            before = files
        raise fault

    def material(self, files: _Files) -> TlsMaterial:
        chain = self._certificates(files.cert, "cert")
        roots = self._certificates(files.ca, "ca")
        leaf = chain[0]
        names = certificate_names(leaf)
        if not names:
            raise self._fault("cert", "has no DNS or URI name that tells who it is")
        self._check_key(files.key, leaf)
        self._check_time(leaf, "cert", "")
        self._check_purpose(leaf)
        self._check_signer(leaf, chain[1:], roots)
        return TlsMaterial(
            files.cert, files.key, files.ca, files.version, names, leaf.not_valid_after_utc
        )

    def _read_once(self) -> _Files:
        parts = {}
        for name in ("cert", "key", "ca"):
            try:
                parts[name] = self._path(name).read_bytes()
            except OSError as exc:
                raise self._fault(name, f"cannot be read: {exc.strerror}") from exc
        return _Files(**parts)

    def _certificates(self, data: bytes, name: str) -> list[x509.Certificate]:
        try:
            return parse_certificates(data)
        except ValueError as exc:
            raise self._fault(name, "is not a PEM certificate") from exc

    def _check_key(self, data: bytes, leaf: x509.Certificate) -> None:
        try:
            private = load_pem_private_key(data, None)
        except TypeError as exc:
            raise self._fault("key", "is encrypted; it has to lie there in the clear") from exc
        except (ValueError, UnsupportedAlgorithm) as exc:
            raise self._fault("key", "is not a PEM private key") from exc
        curve = private.curve.name if isinstance(private, ec.EllipticCurvePrivateKey) else ""
        if not isinstance(private, rsa.RSAPrivateKey) and curve not in ("secp256r1", "secp384r1"):
            raise self._fault("key", "is of a kind gRPC cannot use; take RSA, P-256 or P-384")
        mine, theirs = (
            public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
            for public in (private.public_key(), leaf.public_key())
        )
        if mine != theirs:
            raise self._fault("key", f"is not the key of {self.settings.cert}")

    def _check_time(self, certificate: x509.Certificate, name: str, whose: str) -> None:
        now = datetime.fromtimestamp(self.clock.wall(), UTC)
        begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if now > end:
            raise self._fault(name, f"{whose}expired at {_time(end)}")
        if now < begin:
            raise self._fault(name, f"{whose}is not valid before {_time(begin)}; mind the clock")

    def _check_purpose(self, leaf: x509.Certificate) -> None:
        try:
            purposes = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        except x509.ExtensionNotFound:
            return
        for oid, text in _PURPOSES[self.use]:
            if oid not in purposes:
                raise self._fault("cert", f"may not be used here: it lacks {text}")

    def _check_signer(
        self,
        leaf: x509.Certificate,
        between: Sequence[x509.Certificate],
        roots: Sequence[x509.Certificate],
    ) -> None:
        """Walk from the certificate to a CA over the intermediates in its own file."""
        current = leaf
        for _ in range(len(between) + 1):
            for root in roots:
                if _signed_by(current, root):
                    return self._check_time(root, "ca", "the CA ")
            signer = next((each for each in between if _signed_by(current, each)), None)
            if signer is None:
                break
            self._check_time(signer, "cert", "its intermediate ")
            current = signer
        issuer = current.issuer.rfc4514_string() or "nobody"
        raise self._fault("cert", f"is not signed by {self.settings.ca}, but by {issuer}")

    def _path(self, name: str) -> Path:
        return {"cert": self.settings.cert, "key": self.settings.key, "ca": self.settings.ca}[name]

    def _fault(self, name: str, fault: str) -> ConfigError:
        return ConfigError(f"{self.key}.{name}: {self._path(name)} {fault}")


def parse_certificates(pem: bytes) -> list[x509.Certificate]:
    """The certificates of a PEM file, their extensions readable. Raises ValueError."""
    try:
        certificates = x509.load_pem_x509_certificates(pem)
        for certificate in certificates:
            _ = certificate.extensions
    except _UNREADABLE as exc:
        raise ValueError(f"not a certificate: {exc}") from exc
    return certificates


def certificate_names(certificate: x509.Certificate) -> tuple[str, ...]:
    """The URI names, then the DNS names but localhost: what can tell one peer from another."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    uris = found.get_values_for_type(x509.UniformResourceIdentifier)
    hosts = [name.lower() for name in found.get_values_for_type(x509.DNSName)]
    return (*uris, *(name for name in hosts if name != "localhost"))


def _signed_by(certificate: x509.Certificate, signer: x509.Certificate) -> bool:
    try:
        basic = signer.extensions.get_extension_for_class(x509.BasicConstraints).value
        certificate.verify_directly_issued_by(signer)
    except (x509.ExtensionNotFound, InvalidSignature, ValueError, TypeError, UnsupportedAlgorithm):
        return False
    return basic.ca


def _time(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S}Z"
