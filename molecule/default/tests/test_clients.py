"""Real clients: the official MCP SDK, curl, and a second container that tries everything else."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client

PREFIX = os.environ.get("MEMORY_SANDBOX", "memory-sandbox")
NAME = f"{PREFIX}-molecule-default"


@pytest.fixture(scope="session")
def authority(host: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("edge") / "ca.crt"
    path.write_text(host.check_output("cat /etc/memory/edge/ca.crt") + "\n")
    return path


@pytest.fixture(scope="session")
def key(host: Any) -> str:
    text: str = host.check_output("cat /etc/memory/device-keys/sandbox.key")
    return text


@pytest.fixture(scope="session")
def url(manifest: dict[str, Any]) -> str:
    return f"https://{manifest['edge']['names'][0]}"


def test_mcp_sdk_stores_and_recalls(url: str, key: str, authority: Path) -> None:
    """S2-27, S2-29: initialize, list, retain and recall with the official SDK through TLS."""
    word = "marker" + secrets.token_hex(6)

    async def converse() -> tuple[str, set[str], str, str]:
        headers = {"Authorization": f"Bearer {key}"}
        context = ssl.create_default_context(cafile=str(authority))
        async with (
            httpx2.AsyncClient(headers=headers, verify=context, timeout=60) as http,
            streamable_http_client(f"{url}/v1/memory/mcp", http_client=http) as streams,
            ClientSession(streams[0], streams[1]) as session,
        ):
            hello = await session.initialize()
            tools = await session.list_tools()
            stored = await session.call_tool(
                "memory_retain", {"alias": "memory.sandbox", "content": f"The colour of the {word} is green."}
            )
            found = await session.call_tool(
                "memory_recall", {"alias": "memory.sandbox", "query": f"Which colour has the {word}?"}
            )
            return (
                hello.server_info.name,
                {tool.name for tool in tools.tools},
                stored.content[0].text,
                found.content[0].text,
            )

    name, tools, stored, found = asyncio.run(converse())
    assert name == "anvil-serving"
    assert tools == {"memory_retain", "memory_recall", "memory_reflect"}
    assert json.loads(stored)["ok"] is True
    assert word in found


def test_two_principals_do_not_share_a_bank(host: Any, url: str, key: str, authority: Path) -> None:
    """S2-13, S2-14: the alias of another principal is forbidden."""
    context = ssl.create_default_context(cafile=str(authority))
    with httpx2.Client(verify=context, headers={"Authorization": f"Bearer {key}"}) as client:
        body = {"alias": "memory.canary", "operation": "recall", "arguments": {"query": "x"}}
        answer = client.post(f"{url}/v1/memory", json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (403, "memory_forbidden")


def test_reflect_without_a_provider_is_refused(url: str, key: str, authority: Path) -> None:
    context = ssl.create_default_context(cafile=str(authority))
    with httpx2.Client(verify=context, headers={"Authorization": f"Bearer {key}"}) as client:
        body = {
            "alias": "memory.sandbox",
            "operation": "reflect",
            "arguments": {"query": "What do you know?"},
        }
        answer = client.post(f"{url}/v1/memory", json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "memory_rejected")


def test_http2_is_spoken(url: str, key: str, authority: Path) -> None:
    command = [
        "curl",
        "-s",
        "--http2",
        "--cacert",
        str(authority),
        "-o",
        "/dev/null",
        "-w",
        "%{http_version} %{http_code}",
        url,
    ]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "2 404"


def test_access_log_holds_no_header_query_or_body(
    host: Any, containers: dict[str, Any], url: str, key: str, authority: Path
) -> None:
    word = "canary" + secrets.token_hex(8)
    command = [
        "curl",
        "-s",
        "--cacert",
        str(authority),
        "-o",
        "/dev/null",
        "-H",
        f"X-Test: {word}",
        "-d",
        word,
    ]
    subprocess.run([*command, f"{url}/v1/memory?{word}"], check=True)
    log = host.run("docker logs --since 30s " + containers["edge"]["Id"])
    assert '"uri":"/v1/memory"' in log.stdout + log.stderr
    assert word not in log.stdout + log.stderr


def test_nothing_else_is_reached_from_the_outside(
    host: Any, manifest: dict[str, Any], containers: dict[str, Any]
) -> None:
    """S2-64, F3: a second machine, even with routes to the inner networks, reaches the edge's port and nothing more."""
    address = manifest["edge"]["bind_addresses"][0]
    targets = [(address, port) for port in (22, 80, 443, 2019, 2080, 5432, 8000, 8080, 8888, 8889, 9999)]
    ports = {"postgres": 5432, "api": 8888, "worker": 8889, "embeddings": 8080, "router": 8000, "edge": 2080}
    targets += [
        (network["IPAddress"], ports[service])
        for service, container in containers.items()
        for network in container["NetworkSettings"]["Networks"].values()
    ]
    assert len(targets) > 15
    # A listener of the host on one of its inner addresses shows that the routes of the probe do lead there.
    gateway = containers["edge"]["NetworkSettings"]["Networks"]["memory_public"]["Gateway"]
    host.check_output(f"systemd-run --unit=control --collect python3 -m http.server 7999 --bind {gateway}")
    targets.append((gateway, 7999))
    network = subprocess.run(
        ["docker", "inspect", "-f", "{{range $name, $_ := .NetworkSettings.Networks}}{{$name}}{{end}}", NAME],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    image = subprocess.run(
        ["docker", "inspect", "-f", "{{.Config.Image}}", NAME], capture_output=True, text=True, check=True
    ).stdout.strip()
    probe = (
        "import json, socket, subprocess, sys\n"
        "targets = json.loads(sys.argv[2])\n"
        "for net in sorted({ip.rsplit('.', 1)[0] + '.0/24' for ip, _ in targets if ip != sys.argv[1]}):\n"
        "    subprocess.run(['ip', 'route', 'replace', net, 'via', sys.argv[1]], check=True)\n"
        "reached = []\n"
        "for ip, port in targets:\n"
        "    try:\n"
        "        socket.create_connection((ip, port), timeout=1).close()\n"
        "        reached.append([ip, port])\n"
        "    except OSError:\n"
        "        pass\n"
        "print(json.dumps(reached))\n"
    )
    done = subprocess.run(
        [
            *(
                "docker",
                "run",
                "--rm",
                "--network",
                network,
                "--cap-add",
                "NET_ADMIN",
                "--entrypoint",
                "python3",
            ),
            *("--label", f"memory-bundle.prefix={PREFIX}", image, "-c", probe, address, json.dumps(targets)),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    host.check_output("systemctl stop control")
    assert json.loads(done.stdout) == [[address, 443], [gateway, 7999]]
