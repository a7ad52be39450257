"""The module that describes a host, on this machine and against an engine made up for the test."""

from __future__ import annotations

import importlib.util
import ipaddress
import json
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from types import ModuleType
from typing import Any

import pytest
import yaml

SOURCE = Path(__file__).resolve().parents[2] / "roles/memory_preflight/library/memory_probe.py"
OPTIONS: dict[str, Any] = {
    "project": "memory",
    "volume": "memory-postgres",
    "subnet": "172.30.88.0/24",
    "listen": [],
    "directories": [],
    "space": [],
    "policy_dir": "",
    "users": [],
    "groups": [],
}
LABEL = "com.docker.compose.project"


@pytest.fixture(scope="module")
def probe() -> ModuleType:
    """The module, loaded from its file."""
    specification = importlib.util.spec_from_file_location("memory_probe", SOURCE)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


class Engine(ThreadingUnixStreamServer):
    """A container engine that gives fixed answers by path."""

    def __init__(self, path: Path) -> None:
        self.answers: dict[str, Any] = {
            "/version": {"Version": "26.1.5+dfsg1", "Components": [{"Name": "Engine"}]},
            "/info": {"Driver": "overlay2", "SecurityOptions": ["name=userns"], "DockerRootDir": "/tmp"},
            "/containers/json?all=1": [],
            "/networks": [],
        }
        super().__init__(str(path), Answer)


class Answer(BaseHTTPRequestHandler):
    """One answer of the engine."""

    def do_GET(self) -> None:
        assert isinstance(self.server, Engine)
        found = self.path in self.server.answers
        body = json.dumps(self.server.answers.get(self.path, {"message": "no such thing"})).encode()
        self.send_response(200 if found else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "test"

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def engine(probe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine that answers at the socket that the module asks."""
    path = tmp_path / "engine.sock"
    monkeypatch.setattr(probe, "SOCKET", str(path))
    with Engine(path) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def no_engine(probe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a socket nor a program of an engine."""
    monkeypatch.setattr(probe, "SOCKET", str(tmp_path / "nothing.sock"))
    monkeypatch.setattr(probe.shutil, "which", lambda _: None)


def test_a_host_without_an_engine_is_described(probe: ModuleType, no_engine: None) -> None:
    found = probe.probe(OPTIONS)
    assert json.loads(json.dumps(found)) == found
    assert found["docker"]["installed"] is False
    assert found["docker"]["error"] == ""
    assert found["volume"]["exists"] is False
    assert found["containers"] == found["networks"] == []
    assert found["uid"] == os.geteuid()
    assert found["memory_total_bytes"] > 2**20
    assert "127.0.0.1" in found["addresses"]
    assert all(ipaddress.ip_address(address) for address in found["addresses"])


def test_an_engine_that_does_not_answer_is_no_error(
    probe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "SOCKET", str(tmp_path / "nothing.sock"))
    monkeypatch.setattr(
        probe.shutil, "which", lambda name: "/usr/sbin/dockerd" if name == "dockerd" else None
    )
    docker = probe.docker()
    assert (docker["installed"], docker["running"]) == (True, False)
    assert docker["error"]


def test_an_engine_is_described(probe: ModuleType, engine: Engine) -> None:
    docker = probe.docker()
    assert (docker["installed"], docker["running"], docker["product"]) == (True, True, "Engine")
    assert (docker["engine_version"], docker["storage_driver"]) == ("26.1.5+dfsg1", "overlay2")
    assert (docker["security_options"], docker["data_root"]) == (["name=userns"], "/tmp")


def test_containers_of_the_project_and_those_with_its_names_are_found(
    probe: ModuleType, engine: Engine
) -> None:
    def container(name: str, labels: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
        return {"Id": name.encode().hex().ljust(64, "0"), "Names": ["/" + name], "Labels": labels, **more}

    engine.answers["/containers/json?all=1"] = [
        container("memory-api-1", {LABEL: "memory"}),
        container("memory-edge-1"),
        container("0123456789ab_memory-router-1"),
        container("memory-backup"),
        container("web-1", {LABEL: "web"}, Ports=[{"IP": "127.0.0.1", "PublicPort": 8443, "Type": "tcp"}]),
    ]
    relevant, published = probe.containers("memory")
    assert [item["name"] for item in relevant] == [
        "memory-api-1",
        "memory-edge-1",
        "0123456789ab_memory-router-1",
    ]
    assert [(address, port, item["name"]) for address, port, item in published] == [
        ("127.0.0.1", 8443, "web-1")
    ]


@pytest.mark.parametrize(
    ("address", "holder"),
    [("127.0.0.1", "web-1"), ("0.0.0.0", "web-1"), ("127.0.0.2", None), ("::1", None), ("::", None)],
)
def test_a_published_port_is_told_by_its_container(
    probe: ModuleType, address: str, holder: str | None
) -> None:
    container = {"name": "web-1", "id": "0123456789ab", "project": "web"}
    found = probe.published_by(address, 8443, [("127.0.0.1", 8443, container)])
    assert (found and found["name"]) == holder


def test_the_database_volume_is_described(probe: ModuleType, engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "PG_VERSION").write_text("17\n")
    engine.answers["/volumes/memory-postgres"] = {"Mountpoint": str(tmp_path), "Labels": {LABEL: "memory"}}
    assert probe.volume("memory-postgres", True) == {
        "name": "memory-postgres",
        "exists": True,
        "project": "memory",
        "empty": False,
        "uid": os.getuid(),
        "postgres_major": 17,
    }
    assert probe.volume("other", True)["exists"] is False


def test_overlapping_networks_are_found_and_their_routes_are_not(probe: ModuleType, engine: Engine) -> None:
    engine.answers["/networks"] = [
        {
            "Id": "a" * 64,
            "Name": "far",
            "IPAM": {"Config": [{"Subnet": "10.0.0.0/8"}, {"Subnet": "fd00::/64"}]},
        },
        {
            "Id": "b" * 64,
            "Name": "near",
            "IPAM": {"Config": [{"Subnet": "172.30.0.0/16"}]},
            "Labels": {LABEL: "x"},
        },
        {"Id": "c" * 64, "Name": "host", "IPAM": {"Config": None}},
    ]
    networks, interfaces = probe.overlapping_networks(ipaddress.ip_network("172.30.88.0/24"), True)
    assert networks == [{"name": "near", "subnet": "172.30.0.0/16", "project": "x"}]
    assert interfaces == {"docker0", "br-" + "a" * 12, "br-" + "b" * 12, "br-" + "c" * 12}


def test_a_free_port_is_free_and_stays_free(probe: ModuleType) -> None:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    for _ in range(2):
        assert probe.listen("127.0.0.1", port, [], [])["state"] == "free"


@pytest.mark.parametrize("asked", ["127.0.0.1", "0.0.0.0"])
def test_a_port_in_use_is_told_with_its_process(probe: ModuleType, asked: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        found = probe.listen(asked, listener.getsockname()[1], [], [])
    assert found["state"] == "busy"
    assert found["holder"]["id"] == str(os.getpid())


def test_an_address_of_another_host_is_absent(probe: ModuleType) -> None:
    assert probe.listen("203.0.113.7", 443, ["192.0.2.1"], [])["state"] == "absent"


def test_every_component_of_a_directory_is_described(probe: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    os.chmod(tmp_path / "real" / "inner", 0o2750)
    inner = probe.directory(str(tmp_path / "real" / "inner"))
    assert (inner["kind"], inner["uid"], inner["mode"]) == ("directory", os.getuid(), "2750")
    assert inner["components"][0]["path"] == "/"
    assert inner["components"][-1]["path"] == inner["path"]
    for path, stop, kind in (
        ("link/inner", "link", "symlink"),
        ("file/inner", "file", "file"),
        ("absent/inner", "absent", "absent"),
    ):
        found = probe.directory(str(tmp_path / path))
        assert (found["path"], found["kind"]) == (str(tmp_path / path), "absent")
        assert (found["components"][-1]["path"], found["components"][-1]["kind"]) == (
            str(tmp_path / stop),
            kind,
        )


def test_space_is_measured_at_the_ancestor_that_exists(probe: ModuleType, tmp_path: Path) -> None:
    found = probe.space(str(tmp_path / "not" / "there"))
    assert found["measured"] == str(tmp_path)
    assert found["free_bytes"] > 0


def test_users_are_found_by_name_and_by_number(probe: ModuleType) -> None:
    user = {"name": "root", "id": 4_000_000}
    assert probe.probe({**OPTIONS, "users": [user]})["users"] == [
        {**user, "id_of_name": 0, "name_of_id": None}
    ]
    group = {"name": "no-such-group", "id": 0}
    assert probe.probe({**OPTIONS, "groups": [group]})["groups"] == [
        {**group, "id_of_name": None, "name_of_id": "root"}
    ]


def test_an_unfinished_publication_is_found(probe: ModuleType, tmp_path: Path) -> None:
    assert probe.probe({**OPTIONS, "policy_dir": str(tmp_path)})["policy_leftover"] is False
    (tmp_path / ".access.json.publish").touch()
    assert probe.probe({**OPTIONS, "policy_dir": str(tmp_path)})["policy_leftover"] is True


def test_the_documentation_of_the_module_names_what_it_returns(probe: ModuleType) -> None:
    documented = set(yaml.safe_load(probe.RETURN))
    assert documented == {*probe.probe(OPTIONS), "time", "controller_time"}
    assert set(yaml.safe_load(probe.DOCUMENTATION)["options"]) == {*OPTIONS, "controller_time"}
