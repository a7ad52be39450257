"""The managed host of the scenario, seen through the engine it runs on: a way that the bundle itself does not use."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import testinfra

STATE = Path(os.environ["MEMORY_SANDBOX_STATE"])
PREFIX = os.environ.get("MEMORY_SANDBOX", "memory-sandbox")


@pytest.fixture(scope="session")
def host() -> Any:
    return testinfra.get_host(f"docker://{PREFIX}-molecule-default")


@pytest.fixture(scope="session")
def lock() -> dict[str, Any]:
    return {image["name"]: image for image in json.loads((STATE / "images.lock.json").read_text())["images"]}


@pytest.fixture(scope="session")
def manifest(host: Any) -> dict[str, Any]:
    text: dict[str, Any] = json.loads(host.check_output("cat /var/lib/memory/current/release.json"))
    return text


@pytest.fixture(scope="session")
def containers(host: Any) -> dict[str, Any]:
    """`docker inspect` of every container of the project, by service."""
    listed = host.check_output("docker ps -q --filter label=com.docker.compose.project=memory").split()
    raw = json.loads(host.check_output("docker inspect " + " ".join(listed)))
    found = {item["Config"]["Labels"]["com.docker.compose.service"]: item for item in raw}
    assert len(found) == 6, sorted(found)
    return found
