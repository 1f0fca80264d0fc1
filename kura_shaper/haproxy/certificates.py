"""As much of X.509 as checking a configuration takes: a certificate to try with, and the names in a given one.

HAProxy refuses to read a configuration without its certificates, and the machine that
checks one is seldom a machine that may hold them. So a throwaway takes their place. Its
private key is the number one: nobody can mistake it for a secret.
"""

from __future__ import annotations

import ssl
from base64 import b64encode
from typing import TYPE_CHECKING

from kura_shaper.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

_INTEGER, _BIT_STRING, _OCTET_STRING, _OID, _UTF8, _TIME = 0x02, 0x03, 0x04, 0x06, 0x0C, 0x18
_SEQUENCE, _SET, _EXTENSIONS, _DNS_NAME = 0x30, 0x31, 0xA3, 0x82

_COMMON_NAME = bytes.fromhex("550403")
_SUBJECT_ALT_NAME = bytes.fromhex("551d11")
_ECDSA_SHA256 = bytes.fromhex("2a8648ce3d040302")
_EC_PUBLIC_KEY = bytes.fromhex("2a8648ce3d0201")
_P256 = bytes.fromhex("2a8648ce3d030107")
# The curve's generator, which is the public key of the private key 1 (SEC 2, secp256r1).
_GENERATOR = bytes.fromhex(
    "046b17d1f2e12c4247f8bce6e563a440f277037d812deb33a0f4a13945d898c296"
    "4fe342e2fe1a7f9b8ee7eb4a7c0f9e162bce33576b315ececbb6406837bf51f5"
)
_PEM_CERTIFICATE = "CERTIFICATE"
_PEM_KEY = "PRIVATE KEY"


def throwaway_pem() -> bytes:
    """Return a certificate and its key that HAProxy loads, and that no client trusts: its signature is void."""
    algorithm = _der(_SEQUENCE, _der(_OID, _ECDSA_SHA256))
    name = _der(_SEQUENCE, _der(_SET, _der(_SEQUENCE, _der(_OID, _COMMON_NAME), _der(_UTF8, b"throwaway"))))
    validity = _der(_SEQUENCE, _der(_TIME, b"20000101000000Z"), _der(_TIME, b"21000101000000Z"))
    key_type = _der(_SEQUENCE, _der(_OID, _EC_PUBLIC_KEY), _der(_OID, _P256))
    public = _der(_SEQUENCE, key_type, _der(_BIT_STRING, b"\0", _GENERATOR))
    one = _der(_INTEGER, b"\1")
    void = _der(_BIT_STRING, b"\0", _der(_SEQUENCE, one, one))
    certificate = _der(_SEQUENCE, _der(_SEQUENCE, one, algorithm, name, validity, name, public), algorithm, void)
    private = _der(_SEQUENCE, one, _der(_OCTET_STRING, (1).to_bytes(32, "big")))
    key = _der(_SEQUENCE, _der(_INTEGER, b"\0"), key_type, _der(_OCTET_STRING, private))
    return _pem(_PEM_CERTIFICATE, certificate) + _pem(_PEM_KEY, key)


def dns_names(pem: str) -> tuple[str, ...]:
    """Return the DNS names in the first certificate of a PEM text. Raises UsageError when there is none to read."""
    start = pem.find(f"-----BEGIN {_PEM_CERTIFICATE}-----")
    end = f"-----END {_PEM_CERTIFICATE}-----"
    stop = pem.find(end, max(start, 0))
    if start < 0 or stop < 0:
        raise UsageError("the file has no certificate in PEM form")
    try:
        der = ssl.PEM_cert_to_DER_cert(pem[start : stop + len(end)])
        return tuple(_subject_alt_names(der))
    except (ValueError, IndexError, StopIteration, RuntimeError) as error:
        raise UsageError("the certificate is no X.509 that can be read") from error


def covers(names: tuple[str, ...], host: str) -> bool:
    """Tell whether one of a certificate's names stands for the host; a wildcard stands for one label."""
    _, _, parent = host.partition(".")
    return any(name.lower() in {host, f"*.{parent}"} for name in names)


def _subject_alt_names(der: bytes) -> Iterator[str]:
    certificate = _first(der)
    fields = _elements(_first(certificate))
    for extension in (e for tag, body in fields if tag == _EXTENSIONS for _, e in _elements(_first(body))):
        parts = list(_elements(extension))
        if parts[0] == (_OID, _SUBJECT_ALT_NAME):
            names = _elements(_first(parts[-1][1]))
            yield from (body.decode("ascii") for tag, body in names if tag == _DNS_NAME)


def _der(tag: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    if len(body) < 0x80:
        return bytes((tag, len(body))) + body
    length = len(body).to_bytes((len(body).bit_length() + 7) // 8, "big")
    return bytes((tag, 0x80 | len(length))) + length + body


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position < len(der):
        tag, size = der[position], der[position + 1]
        position += 2
        if size & 0x80:
            width = size & 0x7F
            size = int.from_bytes(der[position : position + width], "big")
            position += width
        if position + size > len(der):
            raise ValueError("an element is longer than what holds it")
        yield tag, der[position : position + size]
        position += size


def _first(der: bytes) -> bytes:
    for _, body in _elements(der):
        return body
    raise ValueError("nothing where an element must be")


def _pem(label: str, der: bytes) -> bytes:
    text = b64encode(der).decode("ascii")
    rows = [text[start : start + 64] for start in range(0, len(text), 64)]
    return "\n".join((f"-----BEGIN {label}-----", *rows, f"-----END {label}-----", "")).encode("ascii")
