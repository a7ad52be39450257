"""Other ways to run it: a model provider, provided certificates, an ACME authority. One host, changed step by step."""

from __future__ import annotations

import hashlib
import json
import secrets
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.live import PREFIX, STATE, Sandbox, make_certificate, run

KEY = "stub-provider-key-0001"


def converge(sandbox: Sandbox, settings: dict[str, Any], tmp_path: Path) -> None:
    """Run site.yml with more settings; secrets go through a file, as they would through a vault."""
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(settings))
    sandbox.playbook("site.yml", "-e", f"@{path}")


def start_times(sandbox: Sandbox) -> dict[str, str]:
    """Start time of each container by service."""
    form = '{{index .Config.Labels "com.docker.compose.service"}} {{.State.StartedAt}}'
    lines = sandbox.on_host(f"docker inspect -f '{form}' $(docker ps -q)").splitlines()
    return {line.split()[0]: line.split()[1] for line in lines}


@pytest.fixture(scope="module")
def stub(sandbox: Sandbox) -> Iterator[str]:
    """The model stub as a container beside the managed host; yields its base URL."""
    name = f"{PREFIX}-openai-stub"
    image = run("docker", "inspect", "-f", "{{.Config.Image}}", sandbox.host).stdout.strip()
    run("docker", "rm", "-f", name, check=False)
    run(
        *(
            "docker",
            "run",
            "-d",
            "--name",
            name,
            "--network",
            PREFIX,
            "--label",
            f"memory-bundle.prefix={PREFIX}",
        ),
        *(
            "-v",
            f"{Path(__file__).parent}:/stub:ro",
            "--entrypoint",
            "python3",
            image,
            "/stub/openai_stub.py",
            "9000",
            KEY,
        ),
    )
    address = run(
        "docker", "inspect", "-f", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", name
    ).stdout.strip()
    yield f"http://{address}:9000/v1"
    run("docker", "rm", "-f", name)


def test_reflect_works_with_a_provider(sandbox: Sandbox, stub: str, tmp_path: Path) -> None:
    """Rows 4, 5 and 13 of the systems table: extraction and reflection through an OpenAI-compatible service."""
    before = start_times(sandbox)
    settings = {
        "hindsight_stack_llm_provider": "openai",
        "hindsight_stack_llm_model": "stub-model",
        "hindsight_stack_llm_base_url": stub,
        "hindsight_stack_llm_api_key": KEY,
    }
    converge(sandbox, settings, tmp_path)
    after = start_times(sandbox)
    assert {service for service in before if before[service] != after[service]} == {"api", "worker"}
    word = "marker" + secrets.token_hex(6)
    assert sandbox.call("retain", {"content": f"The captain of {word} is Ruth."})[0] == 200
    status, body = sandbox.call("recall", {"query": f"Who is the captain of {word}?"})
    assert status == 200 and any(word in item["text"] for item in body["result"]["results"])
    status, body = sandbox.call("reflect", {"query": f"Who is the captain of {word}?"})
    assert status == 200 and json.dumps(body["result"])
    inspected = sandbox.on_host("docker inspect $(docker ps -q)")
    assert KEY not in inspected
    sandbox.playbook("site.yml")
    status, body = sandbox.call("reflect", {"query": "x"})
    assert (status, body["error"]["type"]) == (400, "memory_rejected")


def test_a_provided_certificate_is_served_and_pinned(sandbox: Sandbox, tmp_path: Path) -> None:
    before = start_times(sandbox)
    settings = make_certificate(tmp_path, sandbox.url.removeprefix("https://"))
    converge(sandbox, settings, tmp_path)
    served = ssl.get_server_certificate((sandbox.url.removeprefix("https://"), 443))
    assert (
        hashlib.sha256(ssl.PEM_cert_to_DER_cert(served)).hexdigest()
        == settings["memory_edge_certificate_sha256"]
    )
    after = start_times(sandbox)
    assert {service for service in before if before[service] != after[service]} == {"edge"}
    assert "tls.key" not in sandbox.on_host("find /var/lib/memory/releases -name 'tls*'")


@pytest.mark.parametrize("flaw", ["wrong fingerprint", "another key", "another name"])
def test_a_certificate_that_does_not_fit_is_refused(sandbox: Sandbox, tmp_path: Path, flaw: str) -> None:
    settings = make_certificate(
        tmp_path, "192.0.2.1" if flaw == "another name" else sandbox.url.removeprefix("https://")
    )
    if flaw == "wrong fingerprint":
        settings["memory_edge_certificate_sha256"] = hashlib.sha256(b"another").hexdigest()
    if flaw == "another key":
        other = tmp_path / "other"
        other.mkdir()
        settings["memory_edge_private_key_file"] = make_certificate(other, "192.0.2.1")[
            "memory_edge_private_key_file"
        ]
    before = start_times(sandbox)
    done = sandbox.playbook("site.yml", "-e", json.dumps(settings), check=False)
    assert done.returncode != 0 and "memory_edge_" in done.stdout
    assert start_times(sandbox) == before


@pytest.fixture
def acme(sandbox: Sandbox, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """An ACME authority beside the managed host: Caddy's own, run from the locked edge image of the sandbox's registry."""
    edge = next(
        item
        for item in json.loads((STATE / "images.lock.json").read_text())["images"]
        if item["name"] == "edge"
    )
    reference = f"{edge['repository']}:{edge['tag']}@{edge['index_digest']}"
    host = f"{PREFIX}-acme-host"
    run("./scripts/hosts", "create", host)
    address = json.loads((STATE / "hosts.json").read_text())[host]
    _install_engine(sandbox, host)
    caddyfile = (
        "{\n\tadmin off\n\tskip_install_trust\n\tauto_https disable_redirects\n"
        f"\tdefault_sni {address}\n}}\n"
        f"https://{address}:443 {{\n\ttls internal\n\tacme_server\n}}\n"
    )
    run(
        "docker",
        "exec",
        "-i",
        host,
        "sh",
        "-c",
        "mkdir -p /srv/acme /srv/data && cat > /srv/acme/Caddyfile",
        stdin=caddyfile,
    )
    edge_address = sandbox.url.removeprefix("https://")
    run(
        *(
            "docker",
            "exec",
            host,
            "docker",
            "run",
            "-d",
            "--name",
            "acme",
            "--network",
            "host",
            "--user",
            "0:0",
        ),
        *(
            "--add-host",
            f"memory.sandbox.test:{edge_address}",
            "-v",
            "/srv/acme:/etc/caddy:ro",
            "-v",
            "/srv/data:/data",
            reference,
        ),
    )
    root = tmp_path / "acme-root.crt"
    for _ in range(60):
        done = run(
            "docker", "exec", host, "cat", "/srv/data/caddy/pki/authorities/local/root.crt", check=False
        )
        if done.returncode == 0 and done.stdout:
            break
        time.sleep(0.5)
    root.write_text(done.stdout)
    yield {
        "memory_edge_tls_mode": "acme",
        "memory_edge_names": ["memory.sandbox.test"],
        "memory_edge_acme_ca_url": f"https://{address}/acme/local/directory",
        "memory_edge_acme_email": "operator@example.test",
        "memory_edge_acme_ca_root_file": str(root),
    }
    run("./scripts/hosts", "destroy", host)


def _install_engine(sandbox: Sandbox, host: str) -> None:
    """Give a bare host the engine and the images by copying what the sandbox host has."""
    authority = (STATE / "registry" / "ca.crt").read_text()
    script = (
        "export DEBIAN_FRONTEND=noninteractive\n"
        "apt-get -qq update && apt-get -qq install --no-install-recommends -y docker.io docker-cli >/dev/null\n"
        "mkdir -p /etc/docker/certs.d/registry.memory.test:5000\n"
        "cat > /etc/docker/certs.d/registry.memory.test:5000/ca.crt\n"
    )
    run("docker", "exec", "-i", host, "sh", "-ec", script, stdin=authority)


def test_a_certificate_comes_from_an_acme_authority(
    sandbox: Sandbox, acme: dict[str, Any], tmp_path: Path
) -> None:
    converge(sandbox, acme, tmp_path)
    address = sandbox.url.removeprefix("https://")
    done = run(
        *(
            "curl",
            "-sS",
            "--cacert",
            acme["memory_edge_acme_ca_root_file"],
            "-o",
            "/dev/null",
            "-w",
            "%{http_code}",
        ),
        *("--resolve", f"memory.sandbox.test:443:{address}", "https://memory.sandbox.test/v1/memory"),
    )
    assert done.stdout == "404"


def test_back_to_the_edges_own_authority(sandbox: Sandbox) -> None:
    sandbox.playbook("site.yml")
    assert sandbox.call("recall", {"query": "x"})[0] == 200


def test_error_log_of_the_edge_holds_no_header(sandbox: Sandbox) -> None:
    """The router away for longer than the edge waits: the client gets an answer, the log gets no content."""
    word = "canary" + secrets.token_hex(8)
    router = "$(docker ps -aqf label=com.docker.compose.service=router)"
    sandbox.on_host(f"docker stop {router}")
    try:
        request = ["-H", f"X-Api-Key: {word}", "-d", f'{{"x":"{word}"}}', "--max-time", "60"]
        assert sandbox.status_of("/v1/memory", *request) == "502"
        edge = "$(docker ps -qf label=com.docker.compose.service=edge)"
        log = sandbox.on_host(f"docker logs --since 2m {edge} 2>&1")
        assert '"level":"error"' in log and word not in log
    finally:
        sandbox.on_host(f"docker start {router}")
    sandbox.playbook("site.yml")
