"""What is on the host: exact files, exact listeners, images by digest, hardened containers, no secret in sight."""

from __future__ import annotations

import ipaddress
import json
from typing import Any

import pytest

# path, type, owner, group, mode
FILES = [
    ("/etc/memory", "directory", "root", "root", 0o755),
    ("/etc/memory/secrets", "directory", "root", "root", 0o700),
    ("/etc/memory/secrets/store", "directory", "root", "root", 0o700),
    ("/etc/memory/secrets/store/hindsight-api-key", "file", "root", "root", 0o600),
    ("/etc/memory/secrets/store/postgres-hindsight-password", "file", "root", "root", 0o600),
    ("/etc/memory/secrets/store/router-master-token", "file", "root", "root", 0o600),
    ("/etc/memory/policy", "directory", "root", "memory-readers", 0o750),
    ("/etc/memory/policy/access.json", "file", "root", "memory-readers", 0o640),
    ("/etc/memory/edge/ca.crt", "file", "root", "root", 0o644),
    ("/etc/memory/device-keys", "directory", "root", "root", 0o700),
    ("/etc/memory/device-keys/sandbox.key", "file", "root", "root", 0o600),
    ("/etc/memory/device-keys/sandbox.json", "file", "root", "root", 0o600),
    ("/var/lib/memory/router-keys", "directory", "memory-router", "memory-router", 0o700),
    ("/var/lib/memory/router-keys/keys.sqlite3", "file", "memory-router", "memory-router", 0o600),
]
# path, uid, gid, mode: owners that exist in containers only
CONSUMER_FILES = [
    ("/etc/memory/secrets/postgres", 0, 999, 0o750),
    ("/etc/memory/secrets/postgres/hindsight-password", 0, 999, 0o640),
    ("/etc/memory/secrets/hindsight", 0, 1000, 0o750),
    ("/etc/memory/secrets/hindsight/.env", 0, 1000, 0o640),
    ("/etc/memory/secrets/hindsight/pgpass", 1000, 1000, 0o600),
    ("/etc/memory/secrets/router", 0, 10001, 0o750),
    ("/etc/memory/secrets/router/HINDSIGHT_GATEWAY_TOKEN", 0, 10001, 0o640),
    ("/var/lib/memory/edge-data", 10002, 10002, 0o700),
]


@pytest.mark.parametrize(("path", "kind", "owner", "group", "mode"), FILES)
def test_type_owner_group_and_mode(
    host: Any, path: str, kind: str, owner: str, group: str, mode: int
) -> None:
    """S2-05, S2-41: exact, and one link."""
    links = " 1" if kind == "file" else ""
    form = "'%F %U %G %04a %h'" if kind == "file" else "'%F %U %G %04a'"
    found = host.check_output(f"stat -c {form} {path}").replace("regular ", "").replace("empty ", "")
    assert found == f"{kind} {owner} {group} {mode:04o}{links}"


@pytest.mark.parametrize(("path", "uid", "gid", "mode"), CONSUMER_FILES)
def test_files_of_containers(host: Any, path: str, uid: int, gid: int, mode: int) -> None:
    found = host.file(path)
    assert (found.uid, found.gid, found.mode) == (uid, gid, mode)


def test_running_images_are_those_of_the_lock(containers: dict[str, Any], lock: dict[str, Any]) -> None:
    for service, container in containers.items():
        image = lock[{"api": "hindsight", "worker": "hindsight"}.get(service, service)]
        assert container["Config"]["Image"] == f"{image['repository']}:{image['tag']}@{image['index_digest']}"


def test_local_images_carry_the_registry_digest(
    host: Any, containers: dict[str, Any], lock: dict[str, Any]
) -> None:
    for container in containers.values():
        image = json.loads(host.check_output("docker image inspect " + container["Config"]["Image"]))[0]
        digests = {entry.rsplit("@", 1)[1] for entry in image["RepoDigests"]}
        assert digests & {entry["index_digest"] for entry in lock.values()}


def test_only_the_edge_listens_beyond_loopback(host: Any, manifest: dict[str, Any]) -> None:
    """S2-64."""
    expected = {f"{address}:{manifest['edge']['port']}" for address in manifest["edge"]["bind_addresses"]}
    listeners = {line.split()[4] for line in host.check_output("ss -Hlntu").splitlines()}
    open_listeners = {entry for entry in listeners if not _loopback(entry.rsplit(":", 1)[0])}
    assert open_listeners == expected


def _loopback(address: str) -> bool:
    plain = address.split("%")[0].strip("[]")
    return plain != "*" and ipaddress.ip_address(plain).is_loopback


def test_no_container_shows_a_secret(host: Any, containers: dict[str, Any]) -> None:
    """S2-07: not in the definition, and not in the environment of the first process of Hindsight."""
    names = host.check_output("ls /etc/memory/secrets/store").split()
    values = {name: host.check_output("cat /etc/memory/secrets/store/" + name) for name in names}
    values["device key"] = host.check_output("cat /etc/memory/device-keys/sandbox.key")
    assert len(values) >= 6
    text = json.dumps(containers)
    assert [name for name, value in values.items() if value in text] == []
    for service in ("api", "worker", "postgres", "edge"):
        environment = host.check_output(
            f"cat /proc/{containers[service]['State']['Pid']}/environ | tr '\\0' '\\n'"
        )
        assert [name for name, value in values.items() if value in environment] == [], service


def test_no_log_shows_a_secret(host: Any, containers: dict[str, Any]) -> None:
    """The worker of Hindsight prints its database URL: there must be no password in it."""
    names = host.check_output("ls /etc/memory/secrets/store").split()
    values = {name: host.check_output("cat /etc/memory/secrets/store/" + name) for name in names}
    for service, container in containers.items():
        log = host.run("docker logs " + container["Id"])
        text = log.stdout + log.stderr
        assert [name for name, value in values.items() if value in text] == [], service


def test_containers_are_hardened_as_the_engine_sees_it(containers: dict[str, Any]) -> None:
    for service, container in containers.items():
        settings = container["HostConfig"]
        assert settings["ReadonlyRootfs"], service
        assert settings["CapDrop"] == ["ALL"], service
        assert (settings["CapAdd"] or []) == (["NET_BIND_SERVICE"] if service == "edge" else []), service
        assert "no-new-privileges:true" in settings["SecurityOpt"], service
        assert settings["PidsLimit"] > 0 and settings["Memory"] > 0, service
        assert settings["LogConfig"]["Config"]["max-size"], service
        assert settings["RestartPolicy"]["Name"] == "always", service
        assert not settings["Privileged"] and settings["NetworkMode"] != "host", service
        assert int(container["Config"]["User"].split(":")[0]) > 0, service
        assert container["State"]["Health"]["Status"] == "healthy", service
        for mount in container["Mounts"]:
            assert "docker.sock" not in mount["Source"], service


def test_the_router_reads_the_policy_and_no_receipt(host: Any, containers: dict[str, Any]) -> None:
    """S2-41, S2-42: reader group by number, and a creation receipt beside the policy stays closed."""
    router = containers["router"]["Id"]
    host.check_output("install -m 0600 /dev/null /etc/memory/policy/.receipt.test.json")
    try:
        assert host.run(f"docker exec {router} cat /run/anvil-memory/access.json").rc == 0
        assert host.run(f"docker exec {router} cat /run/anvil-memory/.receipt.test.json").rc != 0
        assert host.run(f"docker exec {router} touch /run/anvil-memory/new").rc != 0
        assert "10100" in host.check_output(f"docker exec {router} id -G").split()
    finally:
        host.check_output("rm /etc/memory/policy/.receipt.test.json")


def test_a_replaced_policy_is_seen_by_the_router_at_once(host: Any, containers: dict[str, Any]) -> None:
    """S2-39: the directory is mounted, not the file."""
    router = containers["router"]["Id"]
    script = (
        "cd /etc/memory/policy && cp -p access.json .new && mv .new access.json && stat -c %i access.json"
    )
    inode = host.check_output(script)
    assert host.check_output(f"docker exec {router} stat -c %i /run/anvil-memory/access.json") == inode


def test_privacy_defaults(host: Any, manifest: dict[str, Any]) -> None:
    """Traces, file upload and document transfer are off in the service that runs."""
    origin = manifest["hindsight"]
    version = json.loads(host.check_output(f"curl -fsS http://{origin['address']}:{origin['port']}/version"))
    switched_on = {name for name, on in version["features"].items() if on is True}
    assert not switched_on & {"mcp", "file_upload_api", "document_export_api", "document_import_api"}, (
        switched_on
    )
    rows = host.check_output(
        "docker exec -u postgres $(docker ps -qf label=com.docker.compose.service=postgres) "
        "psql -At -d hindsight -c 'select count(*) from llm_requests'"
    )
    assert rows == "0"


def test_the_journal_says_committed(host: Any) -> None:
    last = json.loads(host.check_output("tail -n 1 /var/lib/memory/journal/activations.jsonl"))
    assert last["state"] == "committed" and len(last["facts"]["gates"]) >= 30


def test_status_of_the_host_program(host: Any, manifest: dict[str, Any]) -> None:
    status = json.loads(host.check_output("memoryctl --json status"))
    assert set(status["services"]) == set(manifest["service_images"])
    assert {service["health"] for service in status["services"].values()} == {"healthy"}


def test_readback_of_the_host_program(host: Any) -> None:
    result = json.loads(host.check_output("memoryctl --json readback"))
    assert len(result["gates"]) >= 30
    assert {gate["verdict"] for gate in result["gates"]} == {"pass"}
