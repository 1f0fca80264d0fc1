"""What checking a configuration takes of X.509: a certificate to try with, and what a given one says.

HAProxy refuses to read a configuration without its certificates, and the machine that
checks one is seldom a machine that may hold them. So a throwaway takes their place. Its
private key is the number one: nobody can mistake it for a secret.

`cryptography` is imported where it is used: that takes a third of a second, and most
commands need no certificate.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from kura_shaper.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cryptography.x509 import Certificate

_REMEDY = "give a certificate in PEM form"
_FIRST = re.compile(r"-----BEGIN (?P<label>(?:X509 )?CERTIFICATE)-----.*?-----END (?P=label)-----", re.DOTALL)


@cache
def throwaway_pem() -> bytes:
    """Return a self-signed certificate and its key that HAProxy loads, and that no client trusts."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = ec.derive_private_key(1, ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "throwaway")])
    builder = x509.CertificateBuilder(issuer_name=name, subject_name=name, public_key=key.public_key(), serial_number=1)
    # The clock of the machine that checks doesn't matter.
    builder = builder.not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))
    builder = builder.not_valid_after(datetime(2100, 1, 1, tzinfo=UTC))
    certificate = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    return certificate + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def dns_names(pem: str) -> tuple[str, ...]:
    """Return the DNS names in the first certificate of a PEM text. Raises UsageError when there is none to read."""
    from cryptography import x509

    with _read_first(pem) as certificate:
        try:
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            return ()
        return tuple(names.get_values_for_type(x509.DNSName))


def validity(pem: str) -> tuple[datetime, datetime]:
    """Return the first and the last moment, in UTC, that the first certificate is for. Raises as `dns_names`."""
    with _read_first(pem) as certificate:
        return certificate.not_valid_before_utc, certificate.not_valid_after_utc


def fingerprint(pem: str) -> str:
    """Return the first certificate's SHA-1 as HAProxy's `show ssl cert` prints it. Raises as `dns_names`."""
    from cryptography.hazmat.primitives.serialization import Encoding

    with _read_first(pem) as certificate:
        der = certificate.public_bytes(Encoding.DER)
    return hashlib.sha1(der, usedforsecurity=False).hexdigest().upper()


def serial(pem: str) -> str:
    """Return the first certificate's serial number in upper-case hex digits. Raises as `dns_names`."""
    with _read_first(pem) as certificate:
        return f"{certificate.serial_number:X}"


def covers(names: tuple[str, ...], host: str) -> bool:
    """Tell whether one of a certificate's names stands for the host, in any case, with or without the root's dot.

    A wildcard stands for exactly one label, the leftmost.
    """
    wanted = _normal(host)
    label, _, parent = wanted.partition(".")
    known = _all_normal(names)
    return wanted in known or bool(label and parent and f"*.{parent}" in known)


# Thousands of hosts are asked about the same names one after the other.
@lru_cache(maxsize=1)
def _all_normal(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(map(_normal, names))


def _normal(name: str) -> str:
    return name.lower().removesuffix(".")


@contextmanager
def _read_first(pem: str) -> Iterator[Certificate]:
    """Give the first certificate of a text; what it says is parsed only when asked for, so errors come later too."""
    from cryptography import x509

    found = _FIRST.search(pem)
    if found is None:
        raise UsageError("the file has no certificate in PEM form", remedy=_REMEDY)
    unreadable = (ValueError, x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType)
    try:
        # Only this block: a fault in what follows it, such as the key, is none of the certificate's.
        yield x509.load_pem_x509_certificate(found.group().encode("utf-8"))
    except unreadable as error:
        raise UsageError("the certificate is no X.509 that can be read", remedy=_REMEDY) from error
