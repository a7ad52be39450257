"""A small client for OCI registries: push images, and turn tags into verified digests."""

from __future__ import annotations

import base64
import http.client
import ipaddress
import json
import os
import re
import ssl
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn, Self

from . import oci
from .errors import BundleError

MEDIA_DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
MEDIA_DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"

_INDEX_TYPES = (oci.MEDIA_INDEX, MEDIA_DOCKER_LIST)
_MANIFEST_TYPES = (oci.MEDIA_MANIFEST, MEDIA_DOCKER_MANIFEST)
_ACCEPT = ", ".join((*_INDEX_TYPES, *_MANIFEST_TYPES))
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_PATH = re.compile(rf"{_PART}(?:/{_PART})*\Z")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\Z")
_CHALLENGE = re.compile(r'([A-Za-z_]+)="([^"]*)"')
_MAX_MANIFEST = 4 << 20
_MAX_CONFIG = 8 << 20
_MAX_REDIRECTS = 5
_TIMEOUT = 60.0


@dataclass(frozen=True)
class Reference:
    """A repository and a tag: `host` (with port), `path` below it, `tag`."""

    host: str
    path: str
    tag: str

    @property
    def repository(self) -> str:
        """Host and path, as an image lock writes them."""
        return f"{self.host}/{self.path}"

    @property
    def api_host(self) -> str:
        """The host that answers the registry protocol."""
        return "registry-1.docker.io" if self.host == "docker.io" else self.host


@dataclass(frozen=True)
class Manifest:
    """A manifest or index as the registry stores it; `digest` is that of `body`."""

    media_type: str
    digest: str
    body: bytes

    @property
    def document(self) -> dict[str, Any]:
        """The parsed JSON object."""
        value = json.loads(self.body)
        if not isinstance(value, dict):
            raise TypeError("a manifest is an object")
        return value


@dataclass(frozen=True)
class PlatformImage:
    """One platform of a resolved tag."""

    manifest_digest: str
    config_digest: str
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Resolution:
    """What a tag means now. For a tag that is no index, `index_digest` is the digest of its manifest."""

    index_digest: str
    platforms: Mapping[str, PlatformImage]


@dataclass(frozen=True)
class _Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


def parse_reference(text: str) -> Reference:
    """Split `HOST/PATH:TAG`; names without a host mean Docker Hub, as for the container engine.

    Raises:
        BundleError: there is no tag or the text is no reference.
    """
    name, separator, tag = text.rpartition(":")
    if not separator or "/" in tag or "@" in text:
        raise BundleError(
            f"{text!r} is not REPOSITORY:TAG",
            "a digest is looked up for exactly one tag of one repository",
            "write it like ghcr.io/owner/image:1.2.3",
        )
    first, slash, rest = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        host, path = first, rest
    else:
        host, path = "docker.io", name if slash else f"library/{name}"
    if not _PATH.match(path) or not _TAG.match(tag):
        raise BundleError(
            f"{text!r} is not REPOSITORY:TAG",
            "a registry knows lowercase repositories and plain tags only",
            "write it like ghcr.io/owner/image:1.2.3",
        )
    return Reference(host, path, tag)


def docker_credentials(host: str) -> str:
    """Return `user:password` for `host` from the Docker configuration file, or an empty string."""
    folder = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    try:
        auths = json.loads((folder / "config.json").read_bytes()).get("auths", {})
    except (OSError, ValueError, AttributeError):
        return ""
    names = [host, f"https://{host}", f"https://{host}/v1/", f"https://{host}/v2/"]
    if host == "registry-1.docker.io":
        names.append("https://index.docker.io/v1/")
    for name in names:
        encoded = auths.get(name, {}).get("auth", "") if isinstance(auths, dict) else ""
        if encoded:
            try:
                return base64.b64decode(encoded, validate=True).decode()
            except ValueError:
                return ""
    return ""


class Client:
    """Talks to one registry over TLS.

    Args:
        host: host and optional port.
        ca: certificate authority file to trust instead of the system's.
        credentials: `user:password`, or empty for anonymous access.
    """

    def __init__(self, host: str, *, ca: Path | None = None, credentials: str = "") -> None:
        self.host = host
        self._credentials = credentials
        self._tokens: dict[str, str] = {}
        self._connections: dict[str, http.client.HTTPSConnection] = {}
        try:
            self._context = ssl.create_default_context(cafile=None if ca is None else str(ca))
        except (OSError, ssl.SSLError) as error:
            raise BundleError(
                f"the certificate authority file {ca} cannot be used: {error}",
                f"the registry {host} is reached over verified TLS only",
                "name a readable PEM file",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def ping(self) -> None:
        """Check that the host speaks the registry protocol.

        Raises:
            BundleError: it does not, or it cannot be reached.
        """
        answer = self._request("GET", "/v2/", limit=_MAX_MANIFEST)
        if answer.status != 200:
            self._unexpected(answer, "the registry protocol is asked for")

    def has_manifest(self, path: str, reference: str) -> bool:
        """Tell whether the repository `path` has a manifest by that tag or digest."""
        return self._exists(f"/v2/{path}/manifests/{reference}", path, f"{path}:{reference} is looked up")

    def has_blob(self, path: str, digest: str) -> bool:
        """Tell whether the repository `path` has the blob."""
        return self._exists(f"/v2/{path}/blobs/{digest}", path, f"the blob {digest} is looked up")

    def push_blob(self, path: str, blob: oci.Descriptor, source: Path) -> bool:
        """Upload a blob unless it is there.

        Returns:
            True when bytes were sent.
        """
        if self.has_blob(path, blob.digest):
            return False
        scope = f"repository:{path}:pull,push"
        start = {"Content-Length": "0"}
        answer = self._request("POST", f"/v2/{path}/blobs/uploads/", scope=scope, headers=start)
        location = answer.headers.get("location", "")
        if answer.status != 202 or not location:
            self._unexpected(answer, f"an upload to {path} is started")
        target = urllib.parse.urlsplit(urllib.parse.urljoin(f"https://{self.host}/", location))
        upload = target.path + "?" + (target.query + "&" if target.query else "") + f"digest={blob.digest}"
        with source.open("rb") as stream:
            answer = self._request(
                "PUT",
                upload,
                scope=scope,
                body=stream,
                headers={"Content-Length": str(blob.size), "Content-Type": "application/octet-stream"},
            )
        if answer.status != 201:
            self._unexpected(answer, f"the blob {blob.digest} is uploaded")
        return True

    def push_manifest(self, path: str, reference: str, media_type: str, body: bytes) -> str:
        """Upload a manifest under a tag or its digest and return its digest."""
        answer = self._request(
            "PUT",
            f"/v2/{path}/manifests/{reference}",
            scope=f"repository:{path}:pull,push",
            body=body,
            headers={"Content-Type": media_type, "Content-Length": str(len(body))},
        )
        if answer.status not in (200, 201):
            self._unexpected(answer, f"the manifest {path}:{reference} is uploaded")
        digest = oci.digest_of(body)
        told = answer.headers.get("docker-content-digest", digest)
        if told != digest:
            raise BundleError(
                f"{self.host} stored the manifest of {path} as {told}, not as {digest}",
                "what would be deployed is not what was built",
                "check the registry for a proxy or policy that rewrites manifests",
            )
        return digest

    def fetch_manifest(self, path: str, reference: str) -> Manifest:
        """Download a manifest or index by tag or digest and verify its digest."""
        answer = self._request(
            "GET",
            f"/v2/{path}/manifests/{reference}",
            scope=f"repository:{path}:pull",
            headers={"Accept": _ACCEPT},
            limit=_MAX_MANIFEST,
        )
        if answer.status == 404:
            raise BundleError(
                f"{self.host} has no {path}:{reference}",
                "its digest cannot be looked up, and nothing is deployed from a tag alone",
                "check the repository and the tag for a misspelling",
            )
        if answer.status != 200:
            self._unexpected(answer, f"the manifest {path}:{reference} is read")
        digest = oci.digest_of(answer.body)
        claimed = {answer.headers.get("docker-content-digest", digest)}
        if _DIGEST.match(reference):
            claimed.add(reference)
        if claimed != {digest}:
            self._mismatch(path, ", ".join(sorted(claimed)), digest)
        media_type = answer.headers.get("content-type", "").partition(";")[0].strip()
        try:
            inner = json.loads(answer.body)
            media_type = inner.get("mediaType", media_type)
        except (ValueError, AttributeError):
            media_type = "no JSON object"
        if media_type not in (*_INDEX_TYPES, *_MANIFEST_TYPES):
            raise BundleError(
                f"{path}:{reference} on {self.host} is {media_type}, not an image",
                "only OCI and Docker v2 images have the digests an image lock records",
                "choose a tag of a container image",
            )
        return Manifest(media_type, digest, answer.body)

    def fetch_blob(self, path: str, digest: str) -> bytes:
        """Download a small blob (at most 8 MiB, as image configurations are) and verify its digest."""
        answer = self._request(
            "GET", f"/v2/{path}/blobs/{digest}", scope=f"repository:{path}:pull", limit=_MAX_CONFIG
        )
        if answer.status != 200:
            self._unexpected(answer, f"the blob {digest} of {path} is read")
        if oci.digest_of(answer.body) != digest:
            self._mismatch(path, digest, oci.digest_of(answer.body))
        return answer.body

    def resolve(self, path: str, tag: str) -> Resolution:
        """Look up every digest behind a tag; every body on the way is verified against its digest."""
        top = self.fetch_manifest(path, tag)
        try:
            return self._resolve(path, top)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BundleError(
                f"{path}:{tag} on {self.host} is not a well-formed image ({error})",
                "its digests cannot be recorded",
                "choose another tag, or have the image pushed again",
            ) from error

    def _resolve(self, path: str, top: Manifest) -> Resolution:
        if top.media_type in _MANIFEST_TYPES:
            name, image = self._platform_image(path, top)
            return Resolution(top.digest, {name: image})
        platforms: dict[str, PlatformImage] = {}
        for child in top.document["manifests"]:
            platform = child.get("platform", {})
            name = f"{platform.get('os')}/{platform.get('architecture')}"
            if platform.get("os") != "linux" or platform.get("architecture") not in ("amd64", "arm64"):
                continue
            manifest = self.fetch_manifest(path, child["digest"])
            found, image = self._platform_image(path, manifest)
            if found != name:
                raise ValueError(f"the index says {name}, the image says {found}")
            platforms.setdefault(name, image)
        if not platforms:
            raise ValueError("it offers neither linux/amd64 nor linux/arm64")
        return Resolution(top.digest, platforms)

    def _platform_image(self, path: str, manifest: Manifest) -> tuple[str, PlatformImage]:
        digest = manifest.document["config"]["digest"]
        config = json.loads(self.fetch_blob(path, digest))
        labels = config.get("config", {}).get("Labels") or {}
        image = PlatformImage(manifest.digest, digest, dict(labels))
        return f"{config['os']}/{config['architecture']}", image

    def _exists(self, url: str, path: str, doing: str) -> bool:
        answer = self._request("HEAD", url, scope=f"repository:{path}:pull", headers={"Accept": _ACCEPT})
        if answer.status not in (200, 404):
            self._unexpected(answer, doing)
        return answer.status == 200

    def _request(
        self,
        method: str,
        url: str,
        *,
        scope: str = "",
        body: bytes | IO[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        limit: int = _MAX_MANIFEST,
    ) -> _Answer:
        sent = dict(headers or {})
        authorization = self._authorization(scope)
        if authorization:
            sent["Authorization"] = authorization
        answer = self._send(self.host, method, url, body, sent, limit)
        if answer.status == 401 and self._log_in(answer, scope):
            if body is not None and not isinstance(body, bytes):
                body.seek(0)
            sent["Authorization"] = self._authorization(scope)
            answer = self._send(self.host, method, url, body, sent, limit)
        location = f"https://{self.host}{url}"
        for _ in range(_MAX_REDIRECTS):
            if method != "GET" or answer.status not in (301, 302, 303, 307, 308):
                break
            location = urllib.parse.urljoin(location, answer.headers.get("location", ""))
            target = urllib.parse.urlsplit(location)
            if target.scheme != "https":
                self._unexpected(answer, "a redirect to an address without TLS is refused")
            query = f"?{target.query}" if target.query else ""
            same = {name: value for name, value in sent.items() if name != "Authorization"}
            answer = self._send(target.netloc, "GET", (target.path or "/") + query, None, same, limit)
        return answer

    def _authorization(self, scope: str) -> str:
        return self._tokens.get(scope, "")

    def _log_in(self, answer: _Answer, scope: str) -> bool:
        scheme, _, rest = answer.headers.get("www-authenticate", "").partition(" ")
        basic = "Basic " + base64.b64encode(self._credentials.encode()).decode() if self._credentials else ""
        if scheme.lower() == "basic":
            if not basic or self._tokens.get(scope) == basic:
                return False
            self._tokens[scope] = basic
            return True
        if scheme.lower() != "bearer":
            return False
        fields = dict(_CHALLENGE.findall(rest))
        realm = urllib.parse.urlsplit(fields.get("realm", ""))
        if realm.scheme != "https":
            return False
        query = urllib.parse.urlencode(
            {"service": fields.get("service", ""), "scope": scope or fields.get("scope", "")}
        )
        headers = {"Authorization": basic} if basic else {}
        token = self._send(realm.netloc, "GET", f"{realm.path}?{query}", None, headers, _MAX_MANIFEST)
        try:
            value = json.loads(token.body)
            secret = value.get("token") or value.get("access_token")
        except (ValueError, AttributeError):
            secret = None
        if token.status != 200 or not isinstance(secret, str):
            return False
        self._tokens[scope] = f"Bearer {secret}"
        return True

    def _connect(self, host: str) -> http.client.HTTPSConnection:
        proxy = "" if _is_local(host) or urllib.request.proxy_bypass(host) else _https_proxy()
        if not proxy:
            return http.client.HTTPSConnection(host, timeout=_TIMEOUT, context=self._context)
        parts = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        connection = http.client.HTTPSConnection(
            parts.hostname or "", parts.port or 3128, timeout=_TIMEOUT, context=self._context
        )
        headers = {}
        if parts.username:
            user = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
            headers["Proxy-Authorization"] = "Basic " + base64.b64encode(user.encode()).decode()
        name, _, port = host.partition(":")
        connection.set_tunnel(name, int(port or 443), headers)
        return connection

    def _send(
        self,
        host: str,
        method: str,
        url: str,
        body: bytes | IO[bytes] | None,
        headers: Mapping[str, str],
        limit: int,
    ) -> _Answer:
        reused = host in self._connections
        try:
            return self._exchange(host, method, url, body, headers, limit)
        except (ConnectionError, http.client.HTTPException) as error:
            self._drop(host)
            if not reused:
                raise self._unreachable(host, error) from error
        except (OSError, ssl.SSLError) as error:
            self._drop(host)
            raise self._unreachable(host, error) from error
        if body is not None and not isinstance(body, bytes):
            body.seek(0)
        try:
            return self._exchange(host, method, url, body, headers, limit)
        except (OSError, http.client.HTTPException) as error:
            self._drop(host)
            raise self._unreachable(host, error) from error

    def _exchange(
        self,
        host: str,
        method: str,
        url: str,
        body: bytes | IO[bytes] | None,
        headers: Mapping[str, str],
        limit: int,
    ) -> _Answer:
        if host not in self._connections:
            self._connections[host] = self._connect(host)
        connection = self._connections[host]
        connection.request(method, url, body=body, headers=dict(headers))
        response = connection.getresponse()
        data = response.read(limit + 1)
        if len(data) > limit:
            self._drop(host)
            raise BundleError(
                f"{host} answered {method} {url} with more than {limit} bytes",
                "an answer of that size is no manifest and no image configuration",
                "check that the address is that of a container registry",
            )
        return _Answer(response.status, {key.lower(): value for key, value in response.getheaders()}, data)

    def _drop(self, host: str) -> None:
        connection = self._connections.pop(host, None)
        if connection is not None:
            connection.close()

    def _unreachable(self, host: str, error: Exception) -> BundleError:
        if isinstance(error, ssl.SSLCertVerificationError):
            return BundleError(
                f"the certificate of {host} is not trusted: {error.verify_message}",
                "a digest from an unverified registry proves nothing",
                "pass the registry's certificate authority with --ca, or add it to the system's store",
            )
        return BundleError(
            f"the registry {host} cannot be reached: {error}",
            "images are pushed to it and digests are read from it",
            "check the address, the network and the proxy settings (HTTPS_PROXY, NO_PROXY)",
        )

    def _unexpected(self, answer: _Answer, doing: str) -> NoReturn:
        if answer.status in (401, 403):
            raise BundleError(
                f"{self.host} refused access (HTTP {answer.status}) while {doing}",
                "the repository is private or the credentials are wrong",
                f"log in with `docker login {self.host}` as the user who runs this command",
            )
        raise BundleError(
            f"{self.host} answered HTTP {answer.status} while {doing}",
            "the step is not done: " + answer.body[:200].decode(errors="replace").strip(),
            "check the registry and run the command again",
        )

    def _mismatch(self, path: str, wanted: str, got: str) -> NoReturn:
        raise BundleError(
            f"{self.host} delivered content of {path} with digest {got}, but {wanted} was named",
            "the content was altered on the way or the registry is damaged",
            "do not use this image; check the registry and anything between it and this machine",
        )


def push_content(client: Client, path: str, store: oci.BlobStore, image: oci.BuiltImage) -> int:
    """Upload every blob and manifest of `image` by digest, without a tag; return the bytes sent."""
    if client.has_manifest(path, image.index.digest):
        return 0
    sent = 0
    for blob in (*(layer.blob for layer in image.layers), image.config):
        if client.push_blob(path, blob, store.path(blob.digest)):
            sent += blob.size
    for manifest in (image.manifest, image.index):
        client.push_manifest(path, manifest.digest, manifest.media_type, store.read(manifest.digest))
    return sent


def push_tag(client: Client, path: str, store: oci.BlobStore, image: oci.BuiltImage, tag: str) -> None:
    """Point `tag` at an image whose content was pushed."""
    client.push_manifest(path, tag, image.index.media_type, store.read(image.index.digest))


def _https_proxy() -> str:
    return urllib.request.getproxies().get("https", "")


def _is_local(host: str) -> bool:
    name = host.rpartition(":")[0] or host
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return name == "localhost"
