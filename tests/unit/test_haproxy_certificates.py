"""What is read of a certificate: its names, its dates and its fingerprint, or a refusal."""

from __future__ import annotations

import hashlib
import ssl
import subprocess
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from kura_shaper.errors import UsageError
from kura_shaper.haproxy.certificates import covers, dns_names, fingerprint, throwaway_pem, validity

if TYPE_CHECKING:
    from pathlib import Path

HOSTS = ("*.kura.example", *(f"host-{n}.cache.example" for n in range(40)))
ISSUED = trustme.CA().issue_cert(*HOSTS, "192.0.2.1")
LEAF = ISSUED.cert_chain_pems[0].bytes().decode()
DER = ssl.PEM_cert_to_DER_cert(LEAF)
THROWAWAY = throwaway_pem().decode()


def test_names_are_read_of_the_first_certificate_alone_and_without_its_key() -> None:
    assert dns_names("some text\n" + LEAF) == HOSTS
    assert dns_names(LEAF + THROWAWAY) == HOSTS
    assert dns_names(THROWAWAY + LEAF) == ()
    key_first = ISSUED.private_key_pem.bytes().decode() + LEAF
    assert dns_names(key_first) == HOSTS


def test_what_follows_the_first_certificate_may_be_broken() -> None:
    broken = "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n-----BEGIN PRIVATE KEY-----\n"
    assert dns_names(LEAF + broken) == HOSTS
    assert fingerprint(LEAF + broken) == fingerprint(LEAF)


def test_the_older_label_of_a_certificate_is_read_too() -> None:
    older = LEAF.replace(" CERTIFICATE-----", " X509 CERTIFICATE-----")
    assert older != LEAF
    assert dns_names(older) == HOSTS


def test_the_fingerprint_is_haproxys() -> None:
    assert fingerprint("text\n" + LEAF + THROWAWAY) == hashlib.sha1(DER).hexdigest().upper()


def test_the_dates_are_in_utc() -> None:
    assert validity(THROWAWAY) == (datetime(2000, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC))


@pytest.mark.parametrize("read", [dns_names, fingerprint, validity])
@pytest.mark.parametrize(
    "pem",
    [
        "",
        "-----BEGIN CERTIFICATE-----\n",
        "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n",
        "-----BEGIN CERTIFICATE-----\nMIL/////\n-----END CERTIFICATE-----\n",
        "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n",
        "-----BEGIN CERTIFICATE-----\n\ud800\n-----END CERTIFICATE-----\n",
        "-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n",
        "-----END CERTIFICATE-----\n-----BEGIN CERTIFICATE-----\n",
        ISSUED.private_key_pem.bytes().decode(),
    ],
)
def test_what_is_no_certificate_is_refused(read: object, pem: str) -> None:
    assert callable(read)
    with pytest.raises(UsageError) as caught:
        read(pem)
    assert caught.value.remedy


@given(position=st.integers(0, len(DER) - 1), byte=st.integers(0, 255), length=st.integers(0, len(DER)))
def test_a_damaged_certificate_is_read_or_refused(position: int, byte: int, length: int) -> None:
    damaged = bytearray(DER)
    damaged[position] = byte
    for der in (bytes(damaged), DER[:length]):
        pem = ssl.DER_cert_to_PEM_cert(der)
        for read in (dns_names, fingerprint, validity):
            try:
                read(pem)
            except UsageError:
                continue


def test_the_throwaway_is_one_that_a_server_loads(tmp_path: Path) -> None:
    path = tmp_path / "throwaway.pem"
    path.write_bytes(throwaway_pem())
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(path)


def test_the_throwaways_key_is_no_secret() -> None:
    key = THROWAWAY[THROWAWAY.index("-----BEGIN PRIVATE KEY-----") :]
    assert (1).to_bytes(32, "big") in ssl.PEM_cert_to_DER_cert(key.replace("PRIVATE KEY", "CERTIFICATE").strip())


@pytest.mark.parametrize(
    ("host", "is_covered"),
    [
        ("acme.kura.example", True),
        ("ACME.Kura.Example.", True),
        ("cache.example", True),
        ("root.example", True),
        ("a.wild.example", True),
        ("a.b.kura.example", False),
        ("kura.example", False),
        (".kura.example", False),
        ("acme.cache.example", False),
        ("example", False),
        ("other.example", False),
        ("fox.partial.example", False),
        ("", False),
    ],
)
def test_a_wildcard_stands_for_one_label_and_case_and_root_do_not_matter(host: str, is_covered: bool) -> None:
    names = ("*.kura.example", "Cache.example", "root.example.", "*.WILD.example.", "f*.partial.example", "*", "*.")
    assert covers(names, host) is is_covered
    assert not covers((), host)


def test_a_command_that_needs_no_certificate_does_not_wait_for_the_library() -> None:
    program = "import sys, kura_shaper.haproxy.check; print('cryptography' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert done.stdout == "False\n"
