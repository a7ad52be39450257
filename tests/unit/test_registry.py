"""The registry client against a small registry of its own, over real TLS; and the sandbox's certificates."""

from __future__ import annotations

import base64
import http.server
import json
import re
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from bundle import localregistry, oci, registry
from bundle.errors import BundleError

PATH = "memory/thing"


@dataclass
class FakeRegistry:
    """Content and behaviour of the registry under test."""

    port: int = 0
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    basic: str = ""
    token: str = ""
    redirect_blobs: str = ""
    digest_header: str = ""


class Handler(http.server.BaseHTTPRequestHandler):
    """Speaks as much of the registry protocol as the client needs."""

    protocol_version = "HTTP/1.1"
    state: FakeRegistry

    def log_message(self, *_arguments: Any) -> None:
        """Keep quiet."""

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle_request(self) -> None:
        state, authorization = self.state, self.headers.get("Authorization", "")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        state.requests.append((self.command, self.path, authorization))
        path, _, query = self.path.partition("?")
        if path == "/token":
            granted = not state.basic or authorization == f"Basic {state.basic}"
            self.answer(200 if granted else 401, json.dumps({"token": state.token}).encode())
        elif path.startswith("/elsewhere/"):
            self.answer(200, state.blobs[path.rpartition("/")[2]])
        elif state.token and authorization != f"Bearer {state.token}":
            realm = f'Bearer realm="https://127.0.0.1:{state.port}/token",service="s"'
            self.answer(401, WWW_Authenticate=realm)
        elif state.basic and not state.token and authorization != f"Basic {state.basic}":
            self.answer(401, WWW_Authenticate='Basic realm="x"')
        elif path == "/v2/":
            self.answer(200, b"{}")
        elif "/manifests/" in path:
            self.manifest(path.rpartition("/")[2], body)
        else:
            self.blob(path.rpartition("/")[2], query, body)

    def manifest(self, name: str, body: bytes) -> None:
        if self.command == "PUT":
            self.state.manifests[name] = (self.headers["Content-Type"], body)
            self.answer(201, Docker_Content_Digest=self.state.digest_header or oci.digest_of(body))
        elif name in self.state.manifests:
            media_type, stored = self.state.manifests[name]
            told = self.state.digest_header or oci.digest_of(stored)
            self.answer(200, stored, Content_Type=media_type, Docker_Content_Digest=told)
        else:
            self.answer(404)

    def blob(self, name: str, query: str, body: bytes) -> None:
        if self.command == "POST":
            self.answer(202, Location=f"/v2/{PATH}/blobs/uploads/upload-1?state=abc")
        elif self.command == "PUT":
            digest = re.fullmatch(r"state=abc&digest=(sha256:[0-9a-f]{64})", query)
            assert digest is not None
            assert oci.digest_of(body) == digest[1]
            self.state.blobs[digest[1]] = body
            self.answer(201)
        elif name not in self.state.blobs:
            self.answer(404)
        elif self.state.redirect_blobs:
            self.answer(307, Location=f"{self.state.redirect_blobs}/elsewhere/{name}")
        else:
            self.answer(200, self.state.blobs[name])

    do_GET = do_HEAD = do_POST = do_PUT = handle_request


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tls")
    localregistry.ensure_certificates(directory, "127.0.0.1")
    return directory


@pytest.fixture
def fake(tls: Path) -> Iterator[FakeRegistry]:
    state = FakeRegistry()
    handler = type("BoundHandler", (Handler,), {"state": state})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls / "server" / "server.crt", tls / "server" / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    state.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def client(fake: FakeRegistry, tls: Path) -> Iterator[registry.Client]:
    with registry.Client(f"127.0.0.1:{fake.port}", ca=tls / "ca.crt") as connected:
        yield connected


@pytest.fixture
def store(tmp_path: Path) -> oci.BlobStore:
    return oci.BlobStore(tmp_path / "blobs")


def image(store: oci.BlobStore) -> oci.BuiltImage:
    tree = oci.Tree()
    tree.data("hello", b"hello")
    layer = oci.write_layer(store, tree, "test", 0)
    config = oci.ImageConfig(user="1:1", labels={"a": "b"})
    return oci.assemble(store, [layer], config, oci.Platform("linux", "amd64"), 0)


def test_push_then_resolve_gives_the_digests_that_were_built(
    client: registry.Client, fake: FakeRegistry, store: oci.BlobStore
) -> None:
    built = image(store)
    sent = registry.push_content(client, PATH, store, built)
    assert sent == built.layers[0].blob.size + built.config.size
    assert "1.0" not in fake.manifests, "content is pushed without a tag"
    registry.push_tag(client, PATH, store, built, "1.0")
    found = client.resolve(PATH, "1.0")
    assert found.index_digest == built.index.digest
    platform = found.platforms["linux/amd64"]
    assert platform.manifest_digest == built.manifest.digest
    assert platform.config_digest == built.config.digest
    assert platform.labels == {"a": "b"}


def test_what_is_there_is_not_pushed_again(
    client: registry.Client, fake: FakeRegistry, store: oci.BlobStore
) -> None:
    built = image(store)
    registry.push_content(client, PATH, store, built)
    fake.requests.clear()
    assert registry.push_content(client, PATH, store, built) == 0
    assert [method for method, _, _ in fake.requests] == ["HEAD"]
    assert not client.push_blob(PATH, built.config, store.path(built.config.digest))


def test_a_tag_without_an_index_resolves_to_its_manifest(
    client: registry.Client, fake: FakeRegistry, store: oci.BlobStore
) -> None:
    built = image(store)
    registry.push_content(client, PATH, store, built)
    fake.manifests["plain"] = (oci.MEDIA_MANIFEST, store.read(built.manifest.digest))
    found = client.resolve(PATH, "plain")
    assert found.index_digest == built.manifest.digest
    assert found.platforms["linux/amd64"].manifest_digest == built.manifest.digest


def test_other_platforms_of_an_index_are_left_out(
    client: registry.Client, fake: FakeRegistry, store: oci.BlobStore
) -> None:
    built = image(store)
    registry.push_content(client, PATH, store, built)
    index = json.loads(store.read(built.index.digest))
    attestation = {**index["manifests"][0], "platform": {"os": "unknown", "architecture": "unknown"}}
    index["manifests"].insert(0, attestation)
    fake.manifests["more"] = (oci.MEDIA_INDEX, json.dumps(index).encode())
    assert list(client.resolve(PATH, "more").platforms) == ["linux/amd64"]
    index["manifests"] = [attestation]
    fake.manifests["none"] = (oci.MEDIA_INDEX, json.dumps(index).encode())
    with pytest.raises(BundleError, match="offers neither linux/amd64 nor linux/arm64"):
        client.resolve(PATH, "none")


def test_an_index_that_lies_about_a_platform_is_refused(
    client: registry.Client, fake: FakeRegistry, store: oci.BlobStore
) -> None:
    built = image(store)
    registry.push_content(client, PATH, store, built)
    index = json.loads(store.read(built.index.digest))
    index["manifests"][0]["platform"]["architecture"] = "arm64"
    fake.manifests["lie"] = (oci.MEDIA_INDEX, json.dumps(index).encode())
    with pytest.raises(BundleError, match="the index says linux/arm64, the image says linux/amd64"):
        client.resolve(PATH, "lie")


def test_altered_content_is_refused(
    client: registry.Client, fake: FakeRegistry, store: oci.BlobStore
) -> None:
    built = image(store)
    registry.push_content(client, PATH, store, built)
    fake.manifests[built.index.digest] = (oci.MEDIA_INDEX, b"{}")
    with pytest.raises(BundleError, match="delivered content of memory/thing with digest"):
        client.fetch_manifest(PATH, built.index.digest)
    fake.blobs[built.config.digest] = b"{}"
    with pytest.raises(BundleError, match="delivered content of memory/thing with digest"):
        client.fetch_blob(PATH, built.config.digest)


def test_a_registry_that_rewrites_manifests_is_refused(client: registry.Client, fake: FakeRegistry) -> None:
    fake.digest_header = "sha256:" + "0123456789abcdef" * 4
    with pytest.raises(BundleError, match="stored the manifest of memory/thing as"):
        client.push_manifest(PATH, "1.0", oci.MEDIA_MANIFEST, b"{}")
    with pytest.raises(BundleError, match="delivered content"):
        client.fetch_manifest(PATH, "1.0")


@pytest.mark.parametrize(
    ("media_type", "body", "message"),
    [
        ("text/html", b"<html>", "not an image"),
        (oci.MEDIA_MANIFEST, b"[]", "not an image"),
        (oci.MEDIA_MANIFEST, b"{}", "not a well-formed image"),
        (oci.MEDIA_INDEX, b'{"manifests": [1]}', "not a well-formed image"),
    ],
)
def test_what_is_no_image_is_refused(
    client: registry.Client, fake: FakeRegistry, media_type: str, body: bytes, message: str
) -> None:
    fake.manifests["x"] = (media_type, body)
    with pytest.raises(BundleError, match=message):
        client.resolve(PATH, "x")


def test_an_unknown_tag_is_named(client: registry.Client) -> None:
    with pytest.raises(BundleError, match=r"has no memory/thing:9\.9"):
        client.resolve(PATH, "9.9")


def test_a_token_is_fetched_once_per_scope(
    client: registry.Client, fake: FakeRegistry, store: oci.BlobStore
) -> None:
    fake.token = "secret-token"
    registry.push_content(client, PATH, store, image(store))
    tokens = [path for _, path, _ in fake.requests if path.startswith("/token")]
    assert len(tokens) == 2
    assert "scope=repository%3Amemory%2Fthing%3Apull%2Cpush" in tokens[1]


@pytest.mark.parametrize("token", ["", "secret-token"])
def test_credentials_open_a_private_repository(
    fake: FakeRegistry, tls: Path, store: oci.BlobStore, token: str
) -> None:
    fake.basic, fake.token = base64.b64encode(b"user:pass").decode(), token
    host = f"127.0.0.1:{fake.port}"
    with registry.Client(host, ca=tls / "ca.crt", credentials="user:pass") as known:
        registry.push_content(known, PATH, store, image(store))
    for credentials in ("", "user:wrong"):
        with (
            registry.Client(host, ca=tls / "ca.crt", credentials=credentials) as unknown,
            pytest.raises(BundleError, match="refused access") as caught,
        ):
            unknown.resolve(PATH, "1.0")
        assert "pass" not in str(caught.value)


def test_a_redirect_does_not_carry_the_credentials(
    client: registry.Client, fake: FakeRegistry, store: oci.BlobStore
) -> None:
    fake.token = "secret-token"
    built = image(store)
    registry.push_content(client, PATH, store, built)
    fake.redirect_blobs = f"https://127.0.0.1:{fake.port}"
    assert client.fetch_blob(PATH, built.config.digest) == store.read(built.config.digest)
    method, path, authorization = fake.requests[-1]
    assert (method, authorization) == ("GET", "")
    assert path.startswith("/elsewhere/")
    fake.redirect_blobs = f"http://127.0.0.1:{fake.port}"
    with pytest.raises(BundleError, match="a redirect to an address without TLS is refused"):
        client.fetch_blob(PATH, built.config.digest)


def test_an_untrusted_certificate_is_refused(fake: FakeRegistry) -> None:
    with (
        registry.Client(f"127.0.0.1:{fake.port}") as stranger,
        pytest.raises(BundleError, match="is not trusted") as caught,
    ):
        stranger.ping()
    assert "--ca" in caught.value.fix


def test_a_certificate_for_another_name_is_refused(fake: FakeRegistry, tls: Path) -> None:
    with (
        registry.Client(f"localhost:{fake.port}", ca=tls / "ca.crt") as stranger,
        pytest.raises(BundleError, match="is not trusted"),
    ):
        stranger.ping()


def test_a_registry_that_is_not_there_is_named(tls: Path) -> None:
    with (
        registry.Client("127.0.0.1:1", ca=tls / "ca.crt") as absent,
        pytest.raises(BundleError, match=r"127\.0\.0\.1:1 cannot be reached"),
    ):
        absent.ping()


def test_an_unusable_authority_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cannot be used"):
        registry.Client("registry.test", ca=tmp_path / "absent.crt")


@pytest.mark.parametrize(
    ("text", "repository", "tag"),
    [
        ("ghcr.io/vectorize-io/hindsight-api:1.1.0-slim", "ghcr.io/vectorize-io/hindsight-api", "1.1.0-slim"),
        ("pgvector/pgvector:pg17", "docker.io/pgvector/pgvector", "pg17"),
        ("caddy:2.11", "docker.io/library/caddy", "2.11"),
        ("registry.test:5000/a/b:1", "registry.test:5000/a/b", "1"),
        ("localhost/x:1", "localhost/x", "1"),
    ],
)
def test_references_are_read_as_the_engine_reads_them(text: str, repository: str, tag: str) -> None:
    reference = registry.parse_reference(text)
    assert (reference.repository, reference.tag) == (repository, tag)


def test_docker_hub_answers_under_another_name() -> None:
    assert registry.parse_reference("caddy:2").api_host == "registry-1.docker.io"


@pytest.mark.parametrize(
    "text", ["caddy", "registry.test:5000/a", "a@sha256:1", "A/b:1", "a/b:", "a/:1", "a/../b:1", "a b:1"]
)
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(BundleError, match="is not REPOSITORY:TAG"):
        registry.parse_reference(text)


def test_credentials_come_from_the_docker_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    assert registry.docker_credentials("registry.test") == ""
    encoded = base64.b64encode(b"me:secret").decode()
    auths = {
        "registry.test": {"auth": encoded},
        "https://index.docker.io/v1/": {"auth": encoded},
        "x": {"auth": "%"},
    }
    (tmp_path / "config.json").write_text(json.dumps({"auths": auths}))
    assert registry.docker_credentials("registry.test") == "me:secret"
    assert registry.docker_credentials("registry-1.docker.io") == "me:secret"
    assert registry.docker_credentials("other.test") == ""
    assert registry.docker_credentials("x") == ""
    (tmp_path / "config.json").write_text("[]")
    assert registry.docker_credentials("registry.test") == ""


def subject_names(certificate: Path) -> str:
    command = ["openssl", "x509", "-in", str(certificate), "-noout", "-ext", "subjectAltName"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_certificates_are_made_once_and_kept(tmp_path: Path) -> None:
    directory = tmp_path / "registry"
    localregistry.ensure_certificates(directory, "10.213.0.2")
    files = ["ca.crt", "ca.key", "server/server.crt", "server/server.key"]
    first = {name: (directory / name).read_bytes() for name in files}
    localregistry.ensure_certificates(directory, "10.213.0.2")
    assert {name: (directory / name).read_bytes() for name in files} == first
    assert (directory / "ca.key").stat().st_mode & 0o777 == 0o600
    assert (directory / "server" / "server.key").stat().st_mode & 0o777 == 0o600
    assert directory.stat().st_mode & 0o777 == 0o700
    names = subject_names(directory / "server" / "server.crt")
    for name in (f"DNS:{localregistry.HOST_NAME}", "IP Address:127.0.0.1", "IP Address:10.213.0.2"):
        assert name in names


def test_another_address_makes_a_new_server_certificate_under_the_same_authority(tmp_path: Path) -> None:
    localregistry.ensure_certificates(tmp_path, "10.213.0.2")
    authority = (tmp_path / "ca.crt").read_bytes()
    localregistry.ensure_certificates(tmp_path, "10.213.7.2")
    assert (tmp_path / "ca.crt").read_bytes() == authority
    assert "10.213.7.2" in subject_names(tmp_path / "server" / "server.crt")


def test_a_certificate_near_its_end_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(localregistry, "_SERVER_DAYS", 20)
    localregistry.ensure_certificates(tmp_path, "10.213.0.2")
    authority = (tmp_path / "ca.crt").read_bytes()
    old = (tmp_path / "server" / "server.crt").read_bytes()
    monkeypatch.undo()
    localregistry.ensure_certificates(tmp_path, "10.213.0.2")
    renewed = (tmp_path / "server" / "server.crt").read_bytes()
    assert renewed != old
    assert (tmp_path / "ca.crt").read_bytes() == authority
    localregistry.ensure_certificates(tmp_path, "10.213.0.2")
    assert (tmp_path / "server" / "server.crt").read_bytes() == renewed
