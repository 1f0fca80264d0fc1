"""The router's certificate and the tokens that are let in, as their files say; both are replaced while it runs."""

from __future__ import annotations

import hashlib
import hmac
import logging
import ssl
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from kura_shaper.broker.credentials import TOKEN_BYTES_MAX, CredentialError, read_file
from kura_shaper.log import event as log_event

if TYPE_CHECKING:
    from pathlib import Path

    from cryptography.x509 import Certificate

    from kura_shaper.broker.router.counts import RouterCounts
    from kura_shaper.broker.router.settings import RouterSettings

_TOKENS_MAX = 64
_PEM_BYTES_MAX = 1024 * 1024
_log = logging.getLogger("kura_shaper.broker.router")


class ServerCredentials:
    """Reads what the settings name. Tokens are kept only as digests, which is also what is compared."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._digests: tuple[bytes, ...] = ()
        self._seen = b""
        self._dates_told = ""
        self.context: ssl.SSLContext | None = None

    def read_tokens(self) -> tuple[bytes, ...]:
        """Return the digests of the tokens, one a line in the file. Raises CredentialError."""
        content = read_file("token_file", self._settings.token_file, _TOKENS_MAX * TOKEN_BYTES_MAX)
        lines = [line.strip() for line in content.splitlines() if line.strip()]
        if not 1 <= len(lines) <= _TOKENS_MAX:
            remedy = f"give 1 to {_TOKENS_MAX}, each in a line of its own"
            raise CredentialError("token_file", f"{self._settings.token_file} has {len(lines)} tokens", remedy=remedy)
        if not all(0x21 <= byte <= 0x7E for line in lines for byte in line) or max(map(len, lines)) > TOKEN_BYTES_MAX:
            remedy = "a token is visible ASCII, at most 16 KiB"
            raise CredentialError(
                "token_file", f"{self._settings.token_file} has what no header may have", remedy=remedy
            )
        return tuple(map(_digest, lines))

    def read_context(self) -> ssl.SSLContext:
        """Return a TLS context with the certificate as it is now. Raises CredentialError."""
        for key in ("certificate", "private_key"):
            self.read_pem(key)
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        made.set_alpn_protocols(["h2"])
        certificate, private_key = self._settings.certificate, self._settings.private_key
        try:
            # No password is asked for at a terminal: a key that has one is refused.
            made.load_cert_chain(certificate, private_key, password=lambda: "")
        except (ssl.SSLError, OSError, ValueError) as error:
            self._read_certificates()
            _require_key(private_key, self.read_pem("private_key"))
            remedy = f"give the key of the first certificate in {certificate}"
            raise CredentialError("private_key", f"{private_key} is not of the certificate", remedy=remedy) from error
        return made

    def require_dates(self, now: datetime | None = None) -> None:
        """Raise CredentialError for a certificate that is not valid now; nothing when there is none to be read."""
        now = now or datetime.now(UTC)
        try:
            found = self._read_certificates()
        except CredentialError:
            return
        for number, each in enumerate(found, start=1):
            which = f"{self._settings.certificate} has certificate {number} of {len(found)}, which"
            if now > each.not_valid_after_utc:
                words = f"{which} expired on {each.not_valid_after_utc:%Y-%m-%dT%H:%M:%SZ}"
                raise CredentialError("certificate", words, remedy="renew it")
            if now < each.not_valid_before_utc:
                words = f"{which} is not valid before {each.not_valid_before_utc:%Y-%m-%dT%H:%M:%SZ}"
                raise CredentialError("certificate", words, remedy="wait, or see what time this machine has")

    def read_pem(self, key: str) -> bytes:
        """Return what stands in the file of `certificate` or `private_key`. Raises CredentialError."""
        path = self._settings.certificate if key == "certificate" else self._settings.private_key
        return read_file(key, path, _PEM_BYTES_MAX)

    def _read_certificates(self) -> list[Certificate]:
        from cryptography import x509

        content = self.read_pem("certificate")
        try:
            return x509.load_pem_x509_certificates(content)
        except ValueError as error:
            words = f"{self._settings.certificate} has no certificate in PEM, or one that can't be read"
            raise CredentialError("certificate", words, remedy="give a PEM chain, the router's own first") from error

    def _content(self) -> bytes:
        return _digest(self.read_pem("certificate") + self.read_pem("private_key"))

    def load(self) -> None:
        """Read both. Raises CredentialError."""
        self._seen, self._digests = self._content(), self.read_tokens()
        self.context = self.read_context()
        self._tell_dates()

    def reload(self, counts: RouterCounts) -> None:
        """Read both anew where they changed; what can't be used leaves the last good one, and is told."""
        outcome = "ok"
        for read in (self._reload_context, self._reload_tokens):
            try:
                read()
            except CredentialError as error:
                outcome = "failed"
                _tell("credential_bad", error, level=logging.ERROR)
        counts.credential_reloads[outcome] += 1
        self._tell_dates()

    def _tell_dates(self) -> None:
        """Say that the certificate is not valid, once for each reason."""
        try:
            self.require_dates()
        except CredentialError as error:
            if error.message != self._dates_told:
                _tell("certificate_not_valid", error, level=logging.WARNING)
            self._dates_told = error.message
        else:
            self._dates_told = ""

    def is_allowed(self, token: str) -> bool:
        """Return whether a token is one of those in the file. Takes as long for every token."""
        digest = token_digest(token)
        return any([hmac.compare_digest(digest, known) for known in self._digests])  # noqa: C419 - all of them, always

    def _reload_context(self) -> None:
        content = self._content()
        if content != self._seen:
            self.context = self.read_context()
            self._seen = content
            log_event(_log, "certificate_changed")

    def _reload_tokens(self) -> None:
        found = self.read_tokens()
        if found != self._digests:
            self._digests = found
            log_event(_log, "tokens_changed", tokens=len(found))


def _tell(event: str, error: CredentialError, *, level: int) -> None:
    reason = error.message.removeprefix(f"{error.key}: ")
    log_event(_log, event, level=level, key=error.key, reason=reason, remedy=error.remedy)


def _require_key(path: Path, content: bytes) -> None:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        load_pem_private_key(content, None)
    except TypeError as error:
        remedy = "give it without a password; its mode can protect it"
        raise CredentialError("private_key", f"{path} has a password", remedy=remedy) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise CredentialError("private_key", f"{path} has no key in PEM that can be read", remedy="give PEM") from error


def token_digest(token: str) -> bytes:
    """Return what is kept of a token, and compared."""
    # As it came: bytes that are no text are of some token as well, and of none that is allowed.
    return _digest(token.encode(errors="surrogateescape"))


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
