"""The router's certificate and the tokens that are let in, as their files say; both are replaced while it runs."""

from __future__ import annotations

import hashlib
import hmac
import logging
import ssl
from typing import TYPE_CHECKING

from kura_shaper.broker.credentials import TOKEN_BYTES_MAX, CredentialError, read_file
from kura_shaper.log import event as log_event

if TYPE_CHECKING:
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
        self.context: ssl.SSLContext | None = None

    def read_tokens(self) -> tuple[bytes, ...]:
        """Return the digests of the tokens, one a line in the file. Raises CredentialError."""
        content = read_file("token_file", self._settings.token_file, _TOKENS_MAX * TOKEN_BYTES_MAX)
        lines = [line.strip() for line in content.splitlines() if line.strip()]
        if not 1 <= len(lines) <= _TOKENS_MAX:
            remedy = f"give 1 to {_TOKENS_MAX}, each in a line of its own"
            raise CredentialError("token_file", f"has {len(lines)} tokens", remedy=remedy)
        if not all(0x21 <= byte <= 0x7E for line in lines for byte in line) or max(map(len, lines)) > TOKEN_BYTES_MAX:
            remedy = "a token is visible ASCII, at most 16 KiB"
            raise CredentialError("token_file", "has what no header may have", remedy=remedy)
        return tuple(map(_digest, lines))

    def read_context(self) -> ssl.SSLContext:
        """Return a TLS context with the certificate as it is now. Raises CredentialError."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        made.set_alpn_protocols(["h2"])
        try:
            # No password is asked for at a terminal: a key that has one is refused.
            made.load_cert_chain(self._settings.certificate, self._settings.private_key, password=lambda: "")
        except (ssl.SSLError, OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or type(error).__name__
            remedy = "give a PEM chain and its own key, without a password"
            raise CredentialError("certificate", f"and private_key can't be used: {reason}", remedy=remedy) from error
        return made

    def _content(self) -> bytes:
        certificate = read_file("certificate", self._settings.certificate, _PEM_BYTES_MAX)
        return _digest(certificate + read_file("private_key", self._settings.private_key, _PEM_BYTES_MAX))

    def load(self) -> None:
        """Read both. Raises CredentialError."""
        self._seen, self._digests = self._content(), self.read_tokens()
        self.context = self.read_context()

    def reload(self, counts: RouterCounts) -> None:
        """Read both anew where they changed; what can't be used leaves the last good one, and is told."""
        outcome = "ok"
        for read in (self._reload_context, self._reload_tokens):
            try:
                read()
            except CredentialError as error:
                outcome = "failed"
                log_event(_log, "credential_bad", level=logging.ERROR, key=error.key, reason=error.message)
        counts.credential_reloads[outcome] += 1

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


def token_digest(token: str) -> bytes:
    """Return what is kept of a token, and compared."""
    # As it came: bytes that are no text are of some token as well, and of none that is allowed.
    return _digest(token.encode(errors="surrogateescape"))


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
