"""The container engine of the controller: what counts as there, as forbidden, and as ours."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from bundle import engine
from bundle.errors import BundleError


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH that holds only what the test puts there, beside a shell."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "cat"):
        (folder / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(engine, "_DAEMON_PATH", str(folder))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    return folder


def put(folder: Path, name: str, script: str) -> None:
    """Put a shell program into the folder."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_an_answering_engine_is_used_as_it_is(tmp_path: Path, programs: Path) -> None:
    put(programs, "docker", "echo 26.1.5")
    assert engine.ensure_engine(tmp_path) == "26.1.5"
    assert not (tmp_path / "dockerd.pid").exists()


def test_a_forbidden_socket_is_told_from_an_absent_engine(tmp_path: Path, programs: Path) -> None:
    put(programs, "docker", "echo 'permission denied while trying to connect to the daemon' >&2; exit 1")
    with pytest.raises(BundleError) as caught:
        engine.ensure_engine(tmp_path)
    assert "sudo" in caught.value.fix
    assert "group docker" in caught.value.fix


@pytest.mark.parametrize(
    ("code", "out", "err", "version"),
    [
        (0, "20.10.24\n", "", "20.10.24"),
        (0, "\n", "", None),
        (1, "", "Cannot connect to the Docker daemon", None),
    ],
)
def test_classify(code: int, out: str, err: str, version: str | None) -> None:
    assert engine.classify(code, out, err) == version


def test_a_chosen_endpoint_is_not_replaced(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(programs, "docker", "exit 1")
    monkeypatch.setenv("DOCKER_HOST", "tcp://192.0.2.7:2376")
    with pytest.raises(BundleError, match=r"192\.0\.2\.7"):
        engine.ensure_engine(tmp_path)


def test_an_installed_engine_is_not_installed_again(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(programs, "docker", f"cat {tmp_path}/answer 2>/dev/null")
    put(programs, "dockerd", "exit 0")
    installed: list[list[str]] = []
    monkeypatch.setattr(engine, "ensure_packages", lambda names, _log: installed.append(list(names)))
    monkeypatch.setattr(engine, "_SYSTEMD", tmp_path / "no-systemd")
    monkeypatch.setattr(engine, "_start", lambda _pid, _log: (tmp_path / "answer").write_text("28.5.2"))
    assert engine.ensure_engine(tmp_path) == "28.5.2"
    assert installed == []


def test_a_missing_engine_is_installed_with_its_separate_client(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[list[str]] = []

    def install(names: list[str], _log: Path) -> None:
        installed.append(list(names))
        if "docker-cli" in names:
            put(programs, "docker", "echo 26.1.5")

    monkeypatch.setattr(engine, "ensure_packages", install)
    monkeypatch.setattr(engine, "_SYSTEMD", tmp_path / "no-systemd")
    monkeypatch.setattr(engine, "_start", lambda _pid, _log: None)
    assert engine.ensure_engine(tmp_path) == "26.1.5"
    assert installed == [["docker.io", "iptables"], ["docker-cli"]]


def test_systemd_starts_the_engine_where_it_runs_the_machine(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(programs, "docker", f"cat {tmp_path}/answer 2>/dev/null")
    put(programs, "dockerd", "exit 0")
    put(programs, "systemctl", f'echo "$*" >{tmp_path}/asked; echo 26.1.5 >{tmp_path}/answer')
    monkeypatch.setattr(engine, "as_root", list)
    monkeypatch.setattr(engine, "_SYSTEMD", tmp_path)
    assert engine.ensure_engine(tmp_path) == "26.1.5"
    assert (tmp_path / "asked").read_text() == "start docker.service\n"


def test_an_engine_that_dies_at_start_is_told_with_the_end_of_its_log(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(programs, "docker", "exit 1")
    put(programs, "dockerd", "exit 0")
    monkeypatch.setattr(engine, "_SYSTEMD", tmp_path / "no-systemd")
    monkeypatch.setattr(engine, "_EARLY_SECONDS", 0.0)

    def start(_pid_file: Path, log: Path) -> None:
        log.parent.mkdir()
        log.write_text("failed to start daemon: no cgroup mount\n")

    monkeypatch.setattr(engine, "_start", start)
    with pytest.raises(BundleError) as caught:
        engine.ensure_engine(tmp_path)
    assert "no cgroup mount" in caught.value.why


def test_only_an_engine_of_ours_is_stopped(tmp_path: Path, programs: Path) -> None:
    put(programs, "docker", "echo 26.1.5")
    assert engine.stop_engine_if_ours(tmp_path) is False
    with subprocess.Popen(["/bin/sleep", "60"]) as bystander:
        (tmp_path / "dockerd.pid").write_text(str(bystander.pid))
        assert engine.started_by_us(tmp_path) is None
        assert engine.stop_engine_if_ours(tmp_path) is False
        assert bystander.poll() is None
        bystander.kill()


@pytest.mark.parametrize("text", ["", "x", "999999999", str(os.getpid())])
def test_a_pid_file_counts_only_when_it_names_an_engine(tmp_path: Path, text: str) -> None:
    (tmp_path / "pid").write_text(text)
    assert engine.engine_pid(tmp_path / "pid") is None
    assert engine.engine_pid(tmp_path / "absent") is None
