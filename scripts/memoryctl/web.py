"""One HTTP exchange: bounded, never redirected, never retried."""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAXIMUM_BODY = 4 * 1024 * 1024


@dataclass(frozen=True)
class Answer:
    """Status 0 means that no answer came; `error` says why. Latency in seconds."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    error: str = ""
    seconds: float = 0.0
    certificate_sha256: str = ""

    def json(self) -> Any:
        """The body as JSON, or None when it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @property
    def error_type(self) -> str:
        """`error.type` of the router's refusals, or an empty string."""
        body = self.json()
        error = body.get("error") if isinstance(body, dict) else None
        return str(error.get("type", "")) if isinstance(error, dict) else ""


@dataclass(frozen=True)
class Endpoint:
    """A server: plain HTTP, or TLS when `context` is given (then `server_name` goes into SNI and Host)."""

    address: str
    port: int
    context: ssl.SSLContext | None = None
    server_name: str = ""

    def request(
        self,
        method: str,
        target: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: Any = None,
        timeout: float = 30.0,
    ) -> Answer:
        """Send one request with `target` exactly as given. `body` is sent as JSON unless it is bytes."""
        payload = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        all_headers = {"Host": self.server_name or self.address, **(headers or {})}
        if method != "GET" or payload:
            all_headers = {
                "Content-Type": "application/json",
                "Content-Length": str(len(payload)),
                **all_headers,
            }
        started = time.monotonic()
        connection = http.client.HTTPConnection(self.address, self.port, timeout=timeout)
        certificate = ""
        try:
            raw = socket.create_connection((self.address, self.port), timeout=timeout)
            # Head and body are two writes: without this the second one waits for an acknowledgement of the first.
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sock = raw
            if self.context is not None:
                wrapped = self.context.wrap_socket(raw, server_hostname=self.server_name or self.address)
                certificate = hashlib.sha256(wrapped.getpeercert(binary_form=True) or b"").hexdigest()
                connection.sock = wrapped
            connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
            for name, value in all_headers.items():
                connection.putheader(name, value)
            connection.endheaders(payload)
            response = connection.getresponse()
            return Answer(
                status=response.status,
                headers={name.lower(): value for name, value in response.getheaders()},
                body=response.read(MAXIMUM_BODY),
                seconds=time.monotonic() - started,
                certificate_sha256=certificate,
            )
        except (OSError, http.client.HTTPException) as error:
            return Answer(
                0,
                error=f"{type(error).__name__}: {error}",
                seconds=time.monotonic() - started,
                certificate_sha256=certificate,
            )
        finally:
            connection.close()
