"""Activations that go wrong: the previous release serves again, proved, or the edge is closed. Never a success."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest

from tests.faults.injection import CURRENT, TOKEN, activate, await_end, entries, status
from tests.live import ROOT, Sandbox, run

# Runs an activation on the host, ends it with SIGKILL in a given state, waits for the guard, and prints what came of it.
KILL_AT = """
import json, pathlib, subprocess, sys, time
state, release = sys.argv[1:]
journal = pathlib.Path("/var/lib/memory/journal/activations.jsonl")
known = len(journal.read_text().splitlines())
def new():
    return [json.loads(line)["state"] for line in journal.read_text().splitlines()[known:] if line.endswith("}")]
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
run = subprocess.Popen(["memoryctl", "activate", release], **quiet)
while state not in new() and run.poll() is None:
    time.sleep(0.002)
run.kill()
run.wait()
reached = new()
deadline = time.time() + 120
while pathlib.Path("/var/lib/memory/armed.json").exists() and time.time() < deadline:
    time.sleep(0.2)
print(json.dumps({"reached": reached, "ended": new()}))
"""


def test_a_wrong_upstream_key_is_rolled_back_and_the_gate_is_named(sandbox: Sandbox) -> None:
    """Healthy containers, dead write path: the readback decides."""
    sandbox.on_host(f"printf wrong-wrong-wrong-wrong > {TOKEN}")
    done = activate(sandbox)
    assert done.returncode == 5
    assert "retain: fail" in done.stderr and "serves again" in done.stderr
    found = status(sandbox)
    assert found["state"] == "rolled-back" and found["entry"] == entries(sandbox)[-1]["sequence"]
    states = [entry["state"] for entry in entries(sandbox)][-6:]
    assert states == ["staged", "armed", "activating", "reading-back", "rolling-back", "rolled-back"]


def test_kept_evidence_holds_logs_and_no_secret(sandbox: Sandbox) -> None:
    newest = sandbox.on_host("ls -d /var/lib/memory/evidence/* | tail -n 1")
    assert {"reason.txt", "api.log", "router.json"} <= set(sandbox.on_host(f"ls {newest}").split())
    values = sandbox.on_host("for f in /etc/memory/secrets/store/*; do cat $f; echo; done").split()
    text = sandbox.on_host(f"cat {newest}/*")
    assert len(values) >= 5 and [value[:3] for value in values if value in text] == []


@pytest.mark.parametrize("state", ["staged", "armed", "activating", "reading-back", "rolling-back"])
def test_a_run_killed_in_any_state_is_brought_back_without_help(sandbox: Sandbox, state: str) -> None:
    sandbox.on_host(f"printf wrong-wrong-wrong-wrong > {TOKEN}")
    script = f"release={CURRENT}; python3 - {state} $release"
    done = run("docker", "exec", "-i", sandbox.host, "bash", "-c", script, stdin=KILL_AT)
    outcome = json.loads(done.stdout)
    assert state in outcome["reached"]
    assert "committed" not in outcome["ended"]
    if outcome["ended"][-1] != "rolled-back":
        # Killed before the guard was armed: nothing had changed yet, and the next run has to deal with the rest.
        assert outcome["ended"] == ["staged"]
        assert activate(sandbox).returncode == 5


def test_a_restart_of_the_host_in_the_middle_is_brought_back(sandbox: Sandbox) -> None:
    """Power loss while services are being replaced: the guard runs at boot."""
    sandbox.on_host(f"printf wrong-wrong-wrong-wrong > {TOKEN}")
    activation = f"memoryctl activate {CURRENT} >/dev/null 2>&1 &"
    wait = (
        "until tail -n 1 /var/lib/memory/journal/activations.jsonl | grep -q activating; do sleep 0.05; done"
    )
    sandbox.on_host(f"{activation} {wait}")
    run("docker", "kill", sandbox.host)
    run("docker", "start", sandbox.host)
    assert await_end(sandbox)["state"] == "rolled-back"


def test_a_lost_controller_does_not_commit(sandbox: Sandbox) -> None:
    """ansible-playbook and its connection are killed while services are being replaced."""
    before = len(entries(sandbox))
    words = ["./scripts/sandbox", "playbook", "site.yml", "-e", '{"memory_router_timeout_seconds": 77}']
    controller = subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while "activating" not in [entry["state"] for entry in entries(sandbox)[before:]]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(controller.pid, signal.SIGKILL)
    controller.wait()
    sandbox.on_host("pkill -9 sshd-session", check=False)
    assert await_end(sandbox)["state"] == "rolled-back"
    assert "committed" not in [entry["state"] for entry in entries(sandbox)[before:]]


def test_two_operators_at_once(sandbox: Sandbox) -> None:
    """D7: the second one is refused and told who is at work."""
    holder = "flock /var/lib/memory/lock sleep 8 >/dev/null 2>&1 & sleep 1;"
    done = run(
        "docker", "exec", sandbox.host, "bash", "-c", f"{holder} memoryctl activate {CURRENT}", check=False
    )
    assert done.returncode == 75 and "another run is at work" in done.stderr
    time.sleep(8)


def test_what_cannot_be_proved_is_closed(sandbox: Sandbox) -> None:
    """The canary's key is gone, so neither release can be asked: the edge answers 503 until a run has proved one."""
    key = "/etc/memory/device-keys/canary.key"
    sandbox.on_host(f"mv {key} /root/canary && printf wrong-wrong-wrong-wrong > {TOKEN}")
    try:
        done = activate(sandbox)
        assert done.returncode == 6 and "the edge answers 503" in done.stderr
        assert status(sandbox)["state"] == "failed-closed" and status(sandbox)["closed"] is True
        assert sandbox.status_of("/v1/memory", "-d", "{}") == "503"
    finally:
        sandbox.on_host(f"mv /root/canary {key}")
    sandbox.playbook("site.yml")
    assert status(sandbox)["closed"] is False


def test_going_back_by_playbook(sandbox: Sandbox) -> None:
    """A committed change, and back: the router alone is replaced, by the same path, behind the same gates."""
    start = (
        "docker inspect -f '{{.State.StartedAt}}' $(docker ps -qf label=com.docker.compose.service=postgres)"
    )
    database = sandbox.on_host(start)
    before = status(sandbox)["release"]
    sandbox.playbook("site.yml", "-e", '{"memory_router_timeout_seconds": 99}')
    assert status(sandbox)["release"] != before and status(sandbox)["previous"] == before
    sandbox.playbook("rollback.yml")
    assert status(sandbox)["release"] == before
    assert sandbox.on_host(start) == database
    assert before[:12] in sandbox.playbook("status.yml").stdout
