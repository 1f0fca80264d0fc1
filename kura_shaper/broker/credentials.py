"""The token and the trusted certificates, as their files say at each dial.

Files in a pod are replaced while it runs, so each dial reads them anew. Content that can't be used
keeps the last that could, and is told; without any there is no dial. The token is in no message.
"""

from __future__ import annotations

import logging
import os
import ssl
from typing import TYPE_CHECKING, Any

from kura_shaper.broker.counts import Counts, count
from kura_shaper.errors import UsageError
from kura_shaper.log import event as log_event
from kura_shaper.tenants.check import quoted

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kura_shaper.broker.settings import BrokerSettings

TOKEN_BYTES_MAX = 16 * 1024
_CA_BYTES_MAX = 1 << 20
_log = logging.getLogger("kura_shaper.broker")


class CredentialError(UsageError):
    """A token or a CA bundle that can't be used. `key` is the setting that names it."""

    code = "credential"

    def __init__(self, key: str, message: str, *, remedy: str) -> None:
        super().__init__(f"{key}: {message}", remedy=remedy)
        self.key = key


class Credentials:
    """Reads what the settings name."""

    def __init__(self, settings: BrokerSettings, environ: Mapping[str, str] = os.environ) -> None:
        self._settings, self._environ = settings, environ
        self._token = ""
        self._context: ssl.SSLContext | None = None
        self._ca = b""

    def read_token(self) -> str:
        """Return the token as it is now. Raises CredentialError."""
        settings = self._settings
        if settings.token_file is not None:
            content = read_file("token_file", settings.token_file, TOKEN_BYTES_MAX)
            return _token("token_file", content, where=f"{settings.token_file} ")
        found = self._environ.get(settings.token_env, "")
        return _token("token_env", found.encode(errors="surrogateescape"))

    def read_context(self) -> ssl.SSLContext:
        """Return a TLS context that trusts what the settings name as it is now. Raises CredentialError."""
        path = self._settings.ca_bundle
        if path is None:
            return self._context or _context(None, b"")
        content = read_file("ca_bundle", path, _CA_BYTES_MAX)
        if self._context is None or content != self._ca:
            self._context, self._ca = _context(path, content), content
        return self._context

    def warnings(self, *, now_s: float) -> tuple[str, ...]:
        """Return which certificates of the CA bundle are of use to nobody at a time (Unix), one line each."""
        if self._settings.ca_bundle is None:
            return ()
        try:
            context = self.read_context()
        except CredentialError:
            return ()
        return tuple(
            f"ca_bundle: {self._settings.ca_bundle}: the certificate of {_subject(each)} expired on {each['notAfter']}"
            for each in context.get_ca_certs()
            if ssl.cert_time_to_seconds(str(each["notAfter"])) <= now_s
        )

    def current(self, counts: Counts) -> tuple[str, ssl.SSLContext]:
        """Return both for a dial, the last good one where a file went bad. Raises CredentialError without any."""
        before, failed = self._context, False
        context = before
        try:
            context = self.read_context()
        except CredentialError as error:
            failed = _tell(error)
            if before is None:
                raise
        try:
            self._token = self.read_token()
        except CredentialError as error:
            failed = _tell(error)
            if not self._token:
                raise
        finally:
            count(counts.credential_reloads, "failed" if failed else "ok")
        if before is not None and before is not context:
            log_event(_log, "ca_bundle_changed")
        self._context = context or _context(None, b"")
        return self._token, self._context

    def has_other_token(self, than: str) -> bool:
        """Return whether the token has changed since it was used."""
        return self.other_token(than) is not None

    def other_token(self, than: str) -> str | None:
        """Return the token as it is now when it is another than the one that was used; None where it can't be read."""
        try:
            found = self.read_token()
        except CredentialError:
            return None
        if found == than:
            return None
        self._token = found
        return found


def _tell(error: CredentialError) -> bool:
    log_event(_log, "credential_bad", level=logging.ERROR, key=error.key, reason=error.message)
    return True


def read_file(key: str, path: Path, bytes_max: int) -> bytes:
    """Return what a file holds that a setting names. Raises CredentialError, also for more than so many bytes."""
    try:
        with path.open("rb") as stream:
            content = stream.read(bytes_max + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "there can be no such path"
        message = f"could not be read: {path}: {reason}"
        raise CredentialError(key, message, remedy="check the path and its mode") from error
    if len(content) > bytes_max:
        raise CredentialError(key, f"{path} is larger than {bytes_max} bytes", remedy="is this the right file?")
    return content


def _token(key: str, content: bytes, *, where: str = "") -> str:
    token = content.strip()
    if not token:
        raise CredentialError(key, f"{where}is empty or not set", remedy="put the router's token there")
    if len(token) > TOKEN_BYTES_MAX or not all(0x21 <= byte <= 0x7E for byte in token):
        remedy = "it is one line of visible ASCII, at most 16 KiB"
        raise CredentialError(key, f"{where}has what no header may have", remedy=remedy)
    return token.decode("ascii")


def _context(path: Path | None, content: bytes) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.set_alpn_protocols(["h2"])
    if path is None:
        made.load_default_certs()
        return made
    try:
        made.load_verify_locations(cadata=content.decode("ascii", errors="ignore"))
    except (ssl.SSLError, ValueError) as error:
        raise CredentialError("ca_bundle", f"{path} has no certificates that can be read", remedy="give PEM") from error
    if not made.cert_store_stats()["x509"]:
        raise CredentialError("ca_bundle", f"{path} has no certificate", remedy="give at least one, as PEM")
    return made


def _subject(certificate: dict[str, Any]) -> str:
    """Return who a certificate is of, quoted: anybody may have written it."""
    parts = [f"{name}={value}" for pairs in certificate.get("subject", ()) for name, value in pairs]
    return quoted(", ".join(parts))
