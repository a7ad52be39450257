"""What is kept of a failed activation: logs and definitions of its containers, without any secret."""

from __future__ import annotations

import json
import time
from pathlib import Path

from . import engine, files, process, secretstore
from .layout import Layout

LOG_LINES = "300"
REDACTED = "[secret]"


def keep(layout: Layout, project: str, reason: str) -> str:
    """Write a new directory below `evidence` and return its name. Nothing here may fail the roll-back that follows."""
    name = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    directory = layout.evidence / name
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    values = secretstore.known_values(layout)
    _write(directory / "reason.txt", reason + "\n", values)
    for service, container in engine.containers(project).items():
        log = process.run(["docker", "logs", "--tail", LOG_LINES, "--timestamps", container.id], check=False)
        _write(directory / f"{service}.log", log.out + log.err, values)
        definition = process.run(["docker", "inspect", container.id], check=False).out
        _write(directory / f"{service}.json", json.dumps(json.loads(definition or "[]"), indent=2), values)
    return name


def _write(path: Path, text: str, values: list[str]) -> None:
    for value in values:
        text = text.replace(value, REDACTED)
    files.write_atomic(path, text.encode(), files.ROOT_PRIVATE)
