"""TLS files: each fault is named, and a broken rotation leaves the old pair in force."""

from __future__ import annotations

import logging
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from prfaas.errors import ConfigError
from prfaas.settings import TlsSettings
from prfaas.testing.pki import Pki
from prfaas.tls_files import TlsFiles, check_files

DAY_S = 86400.0


class WallClock:
    """A wall clock that a test sets ahead."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now(self) -> float:
        return 0.0

    def wall(self) -> float:
        return datetime.now(UTC).timestamp() + self.ahead_s


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path / "pki")


def copied(settings: TlsSettings, directory: Path, **changes: object) -> TlsSettings:
    """The same files as plain copies, which a test may break."""
    directory.mkdir(exist_ok=True)
    paths = {}
    for name in ("cert", "key", "ca"):
        paths[name] = directory / f"{name}.pem"
        shutil.copy(getattr(settings, name), paths[name])
    return settings.model_copy(update=paths | changes)


def build(
    subject: str,
    public: object,
    signer: object,
    issuer: str,
    *extensions: x509.ExtensionType,
) -> bytes:
    """A certificate with the extensions given and no others."""
    now = datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    by = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(by).public_key(public)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(days=1))
    builder = builder.not_valid_after(now + timedelta(days=1))
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    algorithm = None if isinstance(signer, ed25519.Ed25519PrivateKey) else SHA256()
    return builder.sign(signer, algorithm).public_bytes(Encoding.PEM)


def pem(key: object) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def test_good_files_give_the_names_and_the_end_of_the_certificate(pki: Pki) -> None:
    material = check_files(pki.settings("gateway-d"), "both")
    assert material.names == ("gateway-d",)
    assert timedelta(hours=20) < material.not_after - datetime.now(UTC) < timedelta(days=1)
    assert repr(material).startswith("<TlsMaterial gateway-d until 2")
    assert "PRIVATE" not in repr(material)


@pytest.mark.parametrize("name", ["cert", "key", "ca"])
def test_a_missing_or_garbled_file_is_named_with_its_setting(
    pki: Pki, tmp_path: Path, name: str
) -> None:
    settings = copied(pki.settings("p"), tmp_path / "copy")
    path = getattr(settings, name)
    whole = path.read_bytes()
    for wrong in (b"", b"hello", whole[: len(whole) // 2], b"\xff" * 100):
        path.write_bytes(wrong)
        with pytest.raises(ConfigError, match=rf"^agent\.tls\.{name}: {path} is not a PEM "):
            check_files(settings, "both", key="agent.tls")
    path.unlink()
    with pytest.raises(ConfigError, match=rf"^tls\.{name}: {path} cannot be read: No such file"):
        check_files(settings, "both")


def test_a_key_of_another_certificate_is_refused(pki: Pki) -> None:
    settings = pki.settings("p").model_copy(update={"key": pki.settings("other").key})
    with pytest.raises(ConfigError, match=r"^tls\.key: .* is not the key of .*/p/cert\.pem$"):
        check_files(settings, "both")


def test_an_encrypted_key_is_refused(pki: Pki, tmp_path: Path) -> None:
    settings = copied(pki.settings("p"), tmp_path / "copy")
    key = load_pem_private_key(settings.key.read_bytes(), None)
    settings.key.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    )
    with pytest.raises(ConfigError, match=r"^tls\.key: .* is encrypted"):
        check_files(settings, "both")


def test_expired_and_future_certificates_are_refused_with_the_time(pki: Pki) -> None:
    expired = pki.issue("p", begins_s=-2 * DAY_S, ends_s=-DAY_S)
    with pytest.raises(ConfigError, match=r"^tls\.cert: .* expired at \d{4}-.*Z$"):
        check_files(expired, "both")
    future = pki.issue("q", begins_s=DAY_S / 2, ends_s=DAY_S)
    with pytest.raises(ConfigError, match=r"^tls\.cert: .* is not valid before \d{4}-"):
        check_files(future, "both")


def test_an_expired_ca_is_refused(pki: Pki) -> None:
    settings = pki.settings("p")
    root, leaf = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    san = x509.SubjectAlternativeName([x509.DNSName("p")])
    now = datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "old")])
    old = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(root.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=3))
        .not_valid_after(now - timedelta(days=2))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(root, SHA256())
    )
    other = copied(settings, pki.directory / "copy")
    other.ca.write_bytes(old.public_bytes(Encoding.PEM))
    other.key.write_bytes(pem(leaf))
    other.cert.write_bytes(build("p", leaf.public_key(), root, "old", san))
    with pytest.raises(ConfigError, match=r"^tls\.ca: .* the CA expired at"):
        check_files(other, "both")


def test_a_certificate_of_another_ca_is_refused_and_its_issuer_named(
    pki: Pki, tmp_path: Path
) -> None:
    other = Pki(tmp_path / "other")
    settings = other.settings("p").model_copy(update={"ca": pki.settings("p").ca})
    with pytest.raises(ConfigError, match=r"^tls\.cert: .* not signed by .*, but by CN=prfaas"):
        check_files(settings, "both")


def test_a_signer_of_the_same_name_but_another_key_is_not_the_ca(pki: Pki, tmp_path: Path) -> None:
    """The issuer's name alone proves nothing."""
    real, fake = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    leaf = ec.generate_private_key(ec.SECP256R1())
    san = x509.SubjectAlternativeName([x509.DNSName("p")])
    basic = x509.BasicConstraints(ca=True, path_length=None)
    settings = copied(pki.settings("p"), tmp_path / "copy")
    settings.ca.write_bytes(build("root", real.public_key(), real, "root", basic))
    settings.key.write_bytes(pem(leaf))
    settings.cert.write_bytes(build("p", leaf.public_key(), fake, "root", san))
    with pytest.raises(ConfigError, match="not signed by"):
        check_files(settings, "both")
    settings.cert.write_bytes(build("p", leaf.public_key(), real, "root", san))
    assert check_files(settings, "both").names == ("p",)


def test_a_plain_certificate_cannot_sign_another(pki: Pki, tmp_path: Path) -> None:
    """Whoever holds a certificate of the CA must not be able to make identities."""
    settings = copied(pki.settings("p"), tmp_path / "copy")
    mallory = pki.settings("mallory")
    signer = load_pem_private_key(mallory.key.read_bytes(), None)
    leaf = ec.generate_private_key(ec.SECP256R1())
    san = x509.SubjectAlternativeName([x509.DNSName("p")])
    settings.key.write_bytes(pem(leaf))
    settings.cert.write_bytes(
        build("p", leaf.public_key(), signer, "mallory", san) + mallory.cert.read_bytes()
    )
    with pytest.raises(ConfigError, match=r"not signed by .*, but by CN=mallory"):
        check_files(settings, "both")


def test_intermediates_in_the_certificate_file_lead_to_the_ca(pki: Pki, tmp_path: Path) -> None:
    root, middle, leaf = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    basic = x509.BasicConstraints(ca=True, path_length=None)
    uri = "spiffe://example.org/prefill"
    san = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), x509.DNSName("P.Example"), x509.UniformResourceIdentifier(uri)]
    )
    settings = copied(pki.settings("p"), tmp_path / "copy")
    settings.ca.write_bytes(build("root", root.public_key(), root, "root", basic))
    settings.key.write_bytes(pem(leaf))
    alone = build("p", leaf.public_key(), middle, "middle", san)
    settings.cert.write_bytes(alone + build("middle", middle.public_key(), root, "root", basic))
    assert check_files(settings, "both").names == (uri, "p.example")
    settings.cert.write_bytes(alone)
    with pytest.raises(ConfigError, match=r"not signed by .*, but by CN=middle"):
        check_files(settings, "both")


def test_a_certificate_without_a_name_or_for_another_use_is_refused(
    pki: Pki, tmp_path: Path
) -> None:
    root, leaf = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    basic = x509.BasicConstraints(ca=True, path_length=None)
    localhost = x509.SubjectAlternativeName([x509.DNSName("localhost")])
    named = x509.SubjectAlternativeName([x509.DNSName("p")])
    serves = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    settings = copied(pki.settings("p"), tmp_path / "copy")
    settings.ca.write_bytes(build("root", root.public_key(), root, "root", basic))
    settings.key.write_bytes(pem(leaf))
    for extensions in ((), (localhost,)):
        settings.cert.write_bytes(build("p", leaf.public_key(), root, "root", *extensions))
        with pytest.raises(ConfigError, match="no DNS or URI name"):
            check_files(settings, "both")
    settings.cert.write_bytes(build("p", leaf.public_key(), root, "root", named, serves))
    assert check_files(settings, "server").names == ("p",)
    for use in ("client", "both"):
        with pytest.raises(ConfigError, match="it lacks clientAuth"):
            check_files(settings, use)


def test_keys_grpc_cannot_use_are_refused_and_rsa_is_not(pki: Pki, tmp_path: Path) -> None:
    root = ec.generate_private_key(ec.SECP256R1())
    basic = x509.BasicConstraints(ca=True, path_length=None)
    named = x509.SubjectAlternativeName([x509.DNSName("p")])
    settings = copied(pki.settings("p"), tmp_path / "copy")
    settings.ca.write_bytes(build("root", root.public_key(), root, "root", basic))
    for key in (ed25519.Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP521R1())):
        settings.key.write_bytes(pem(key))
        settings.cert.write_bytes(build("p", key.public_key(), root, "root", named))
        with pytest.raises(ConfigError, match=r"^tls\.key: .* take RSA, P-256 or P-384"):
            check_files(settings, "both")
    good = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    settings.key.write_bytes(pem(good))
    settings.cert.write_bytes(build("p", good.public_key(), root, "root", named))
    assert check_files(settings, "both").names == ("p",)


def test_rotated_files_are_used_and_change_the_version(pki: Pki) -> None:
    files = TlsFiles(pki.settings("p"), "both")
    first = files.current()
    assert files.version() == first.version
    pki.rotate("p")
    assert files.current().cert != first.cert
    assert files.version() != first.version


def test_a_half_written_rotation_keeps_the_old_pair_and_is_logged_once(
    pki: Pki, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = copied(pki.settings("p"), tmp_path / "copy")
    files = TlsFiles(settings, "both", key="prefill.tls")
    good = files.current()
    pki.rotate("p")
    new = pki.settings("p")
    caplog.set_level(logging.INFO, logger="prfaas.tls_files")
    shutil.copyfile(new.key, settings.key)
    assert files.current() == good
    settings.cert.write_bytes(new.cert.read_bytes()[:200])
    for _ in range(3):
        assert files.current() == good
    settings.ca.unlink()
    assert files.version() == good.version
    problems = [each.message for each in caplog.records]
    assert len(problems) == 3
    assert "is not the key of" in problems[0]
    assert "is not a PEM certificate" in problems[1]
    assert "cannot be read" in problems[2]
    assert all(each.startswith("prefill.tls.") and "keeps <Tls" in each for each in problems)
    for name in ("cert", "ca"):
        shutil.copyfile(getattr(new, name), getattr(settings, name))
    assert files.current().cert == new.cert.read_bytes()
    assert caplog.records[-1].message.startswith("prefill.tls: uses <TlsMaterial p until")


def test_a_pair_of_the_future_is_taken_once_its_time_has_come(
    pki: Pki, caplog: pytest.LogCaptureFixture
) -> None:
    clock = WallClock()
    files = TlsFiles(pki.settings("p"), "both", clock=clock)
    first = files.current()
    pki.issue("p", begins_s=3600.0, ends_s=DAY_S)
    for _ in range(2):
        assert files.current() == first
        clock.ahead_s += 1.0
    assert len(caplog.records) == 1
    clock.ahead_s = 4000.0
    assert files.current() != first


def test_a_certificate_that_expires_in_use_is_logged_once(
    pki: Pki, caplog: pytest.LogCaptureFixture
) -> None:
    clock = WallClock()
    files = TlsFiles(pki.settings("p"), "both", clock=clock)
    clock.ahead_s = 2 * DAY_S
    for _ in range(3):
        files.current()
    assert [each.message.split(":")[1] for each in caplog.records] == [" expired"]


def test_a_key_that_every_user_can_read_is_logged(
    pki: Pki, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = copied(pki.settings("p"), tmp_path / "copy")
    settings.key.chmod(0o640)
    TlsFiles(settings, "both")
    assert not caplog.records
    settings.key.chmod(0o644)
    TlsFiles(settings, "both")
    assert "can be read by every user" in caplog.text


@pytest.mark.parametrize("peer", ["", "localhost", "127.0.0.1", "::1", "*.example"])
def test_names_that_identify_nobody_cannot_be_allowed(pki: Pki, peer: str) -> None:
    with pytest.raises(ValueError, match="identifies nobody"):
        TlsSettings.model_validate(dict(pki.settings("p")) | {"peers": ("ok", peer)})
