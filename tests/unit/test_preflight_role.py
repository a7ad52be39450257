"""The role as an operator runs it, against this machine and in check mode: it ends before anything could change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CANARY = "CANARY-9f3c-0123456789"
ROLES = (
    "memory_preflight",
    "container_engine",
    "image_supply",
    "memory_policy",
    "hindsight_stack",
    "memory_router",
    "memory_edge",
    "memory_router_keys",
    "hindsight_banks",
    "memory_activation",
)


def run(directory: Path, *options: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run the roles of site.yml with `settings`; they are inventory variables."""
    play = {
        "hosts": "all",
        "gather_facts": False,
        "any_errors_fatal": True,
        "roles": list(ROLES),
    }
    host = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "memory_edge_names": ["memory.example.org"],
        "memory_edge_bind_addresses": ["127.0.0.1"],
        "memory_edge_https_port": 61443,
        "hindsight_stack_api_key": CANARY,
        **settings,
    }
    (directory / "play.yml").write_text(json.dumps([play]))
    (directory / "hosts.yml").write_text(json.dumps({"all": {"hosts": {"here": host}}}))
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_ROLES_PATH": str(ROOT / "roles"),
        "ANSIBLE_LOCAL_TEMP": str(directory / "tmp"),
        "ANSIBLE_REMOTE_TEMP": str(directory / "tmp"),
        "ANSIBLE_LOCALHOST_WARNING": "false",
    }
    command = [
        sys.executable,
        "-m",
        "ansible",
        "playbook",
        "-i",
        "hosts.yml",
        "play.yml",
        "--check",
        "--diff",
    ]
    return subprocess.run(
        [*command, *options], cwd=directory, env=environment, capture_output=True, text=True, check=False
    )


def test_all_reasons_are_told_before_any_other_role_runs(tmp_path: Path) -> None:
    done = run(
        tmp_path, "-vvv", hindsight_stack_database_password=81237, memory_edge_bind_adresses=["127.0.0.1"]
    )
    told = done.stdout + done.stderr
    assert done.returncode == 2, told
    for rule in ("setting-unknown", "secret-type", "lock-invalid"):
        assert f"[{rule}]" in told
    assert "hindsight_stack_database_password is a number" in told
    assert "81237" not in told
    assert CANARY not in told
    assert "changed=0" in told
    assert "TASK [container_engine" not in told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--tags", "always"), "the run is limited by --tags or --skip-tags"),
        (("--skip-tags", "always"), "the run is limited by --tags or --skip-tags"),
        (("--start-at-task", "memory_preflight : Examine the host"), "the run is limited by --start-at-task"),
    ],
)
def test_a_limited_run_is_refused(tmp_path: Path, options: tuple[str, ...], told: str) -> None:
    done = run(tmp_path, *options)
    assert done.returncode == 2, done.stdout + done.stderr
    assert told in done.stdout + done.stderr
    assert "TASK [container_engine" not in done.stdout
