"""The test CA: what it makes and keeps, that keys stay private, that rotation is one stroke."""

from __future__ import annotations

import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from prfaas.certs import Authority, describe, make_certs
from prfaas.errors import ConfigError
from prfaas.settings import TlsSettings
from prfaas.tls_files import check_files


def settings(directory: Path, name: str) -> TlsSettings:
    return TlsSettings(
        cert=directory / name / "cert.pem",
        key=directory / name / "key.pem",
        ca=directory / "ca.pem",
    )


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_each_name_gets_a_pair_that_passes_the_check_of_the_agents(tmp_path: Path) -> None:
    out = tmp_path / "new" / "certs"
    made = make_certs(out, ("gateway-d", "p"), days=7)
    assert [(each.name, each.new) for each in made] == [("gateway-d", True), ("p", True)]
    for each in made:
        material = check_files(settings(out, each.name), "both")
        assert material.names == (each.name,)
        left = material.not_after - datetime.now(UTC)
        assert timedelta(days=6, hours=23) < left <= timedelta(days=7)


def test_certificates_name_the_process_and_loopback_and_are_p256(tmp_path: Path) -> None:
    make_certs(tmp_path, ("p",), days=1)
    certificate = x509.load_pem_x509_certificate((tmp_path / "p" / "cert.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["p", "localhost"]
    addresses = names.get_values_for_type(x509.IPAddress)
    assert [str(each) for each in addresses] == ["127.0.0.1", "::1"]
    assert certificate.public_key().curve.name == "secp256r1"
    basic = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert not basic.ca


def test_keys_are_for_their_owner_only(tmp_path: Path) -> None:
    make_certs(tmp_path, ("p",), days=1)
    make_certs(tmp_path, (), days=1, rotate=("p",))
    assert mode(tmp_path / "ca.key") == 0o600
    assert mode(tmp_path / "p" / "key.pem") == 0o600


def test_a_second_run_keeps_the_ca_and_the_pairs_there_are(tmp_path: Path) -> None:
    make_certs(tmp_path, ("d",), days=1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    made = make_certs(tmp_path, ("d", "p"), days=1)
    assert [(each.name, each.new) for each in made] == [("d", False), ("p", True)]
    assert all(path.read_bytes() == data for path, data in before.items())
    check_files(settings(tmp_path, "p"), "both")


def test_rotation_leaves_one_new_pair_of_the_same_ca(tmp_path: Path) -> None:
    make_certs(tmp_path, ("d", "p"), days=1)
    old, other = (check_files(settings(tmp_path, name), "both") for name in ("p", "d"))
    made = make_certs(tmp_path, (), days=1, rotate=("p",))
    assert [(each.name, each.new) for each in made] == [("p", True)]
    new = check_files(settings(tmp_path, "p"), "both")
    assert new.cert != old.cert
    assert new.key != old.key
    assert new.ca == old.ca
    assert check_files(settings(tmp_path, "d"), "both") == other
    assert len([path for path in tmp_path.iterdir() if path.name.startswith(".p-")]) == 1


def test_a_reader_never_meets_a_missing_or_half_written_pair(tmp_path: Path) -> None:
    make_certs(tmp_path, ("p",), days=1)
    stop, failures, seen = threading.Event(), [], set()

    def read() -> None:
        while not stop.is_set():
            try:
                seen.add(check_files(settings(tmp_path, "p"), "both").version)
            except ConfigError as exc:
                failures.append(exc.message)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(20):
            make_certs(tmp_path, (), days=1, rotate=("p",))
            stop.wait(0.02)  # who finds them changed at every look gives up, and rightly so
    finally:
        stop.set()
        reader.join(10)
    assert failures == []
    assert len(seen) > 1


def test_a_pair_does_not_outlive_its_ca(tmp_path: Path) -> None:
    (made,) = make_certs(tmp_path, ("p",), days=5000)
    root = x509.load_pem_x509_certificate((tmp_path / "ca.pem").read_bytes())
    assert made.not_after == root.not_valid_after_utc


def test_two_cas_are_told_apart_by_name(tmp_path: Path) -> None:
    """Both may lie in one file while one takes over from the other."""
    make_certs(tmp_path / "a", (), days=1)
    make_certs(tmp_path / "b", (), days=1)
    first, second = (
        x509.load_pem_x509_certificate((tmp_path / each / "ca.pem").read_bytes()).subject
        for each in "ab"
    )
    assert first != second


@pytest.mark.parametrize(
    "name", ["", "localhost", "../p", "a/b", ".p", "P", "p_1", "x" * 64, "-p", "p\n"]
)
def test_a_name_that_is_no_host_name_is_refused_before_anything_is_made(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(ConfigError, match="cannot be a name"):
        make_certs(tmp_path / "out", ("p", name), days=1)
    assert not (tmp_path / "out").exists()


def test_what_was_not_made_here_is_never_overwritten(tmp_path: Path) -> None:
    make_certs(tmp_path, (), days=1)
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "cert.pem").write_text("mine")
    with pytest.raises(ConfigError, match="in the way"):
        make_certs(tmp_path, ("p",), days=1)
    with pytest.raises(ConfigError, match="in the way"):
        make_certs(tmp_path, (), days=1, rotate=("p",))
    assert (tmp_path / "p" / "cert.pem").read_text() == "mine"
    with pytest.raises(ConfigError, match="does not exist"):
        make_certs(tmp_path, (), days=1, rotate=("q",))


def test_half_a_ca_or_a_strange_one_is_an_error_and_stays(tmp_path: Path) -> None:
    make_certs(tmp_path / "a", (), days=1)
    make_certs(tmp_path / "b", (), days=1)
    key = tmp_path / "a" / "ca.key"
    key.write_bytes((tmp_path / "b" / "ca.key").read_bytes())
    with pytest.raises(ConfigError, match=r"ca\.key is not the key of .*ca\.pem"):
        make_certs(tmp_path / "a", ("p",), days=1)
    key.write_text("junk")
    with pytest.raises(ConfigError, match="are not a CA made here"):
        make_certs(tmp_path / "a", ("p",), days=1)
    key.unlink()
    with pytest.raises(ConfigError, match=r"ca\.key: No such file"):
        make_certs(tmp_path / "a", ("p",), days=1)
    assert (tmp_path / "a" / "ca.pem").exists()


def test_an_expired_ca_is_not_used(tmp_path: Path) -> None:
    make_certs(tmp_path, (), days=1)
    now = datetime.now(UTC)
    old = Authority.create(now - timedelta(days=2), now - timedelta(days=1))
    (tmp_path / "ca.pem").write_bytes(old.pem)
    (tmp_path / "ca.key").write_bytes(old.key_pem)
    with pytest.raises(ConfigError, match="has expired"):
        make_certs(tmp_path, ("p",), days=1)


def test_the_report_says_what_it_is_for_and_which_pairs_are_old(tmp_path: Path) -> None:
    make_certs(tmp_path, ("d",), days=1)
    text = describe(tmp_path, make_certs(tmp_path, ("d", "p"), days=1))
    assert "for tests and pilots only" in text
    assert f"kept  {tmp_path}/d/cert.pem" in text
    assert f"made  {tmp_path}/p/cert.pem" in text
