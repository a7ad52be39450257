"""Questions to, and commands for, the Docker Engine and Compose of this host."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import process
from .errors import Exit, Refused

INSPECT_TIMEOUT = 30.0
PROJECT_LABEL = "com.docker.compose.project"
SERVICE_LABEL = "com.docker.compose.service"
CONFIG_HASH_LABEL = "com.docker.compose.config-hash"
ONE_OFF_LABEL = "com.docker.compose.oneoff"


@dataclass(frozen=True)
class Container:
    """What the engine says of one service container."""

    id: str
    service: str
    image_reference: str
    config_hash: str
    status: str
    health: str
    started_at: str


def inspect_images(references: Sequence[str]) -> dict[str, dict[str, Any] | None]:
    """Engine description of each image reference; None where the image is not on this host."""
    found: dict[str, dict[str, Any] | None] = {}
    for reference in references:
        answer = process.run(["docker", "image", "inspect", reference], check=False, timeout=INSPECT_TIMEOUT)
        if answer.code != 0 and "no such image" not in answer.err.lower():
            raise Refused(
                "engine",
                f"the engine did not answer: {answer.err.strip()[:300]}",
                "images and containers cannot be compared with the lock",
                "start the Docker Engine (systemctl start docker) and run again",
            )
        found[reference] = json.loads(answer.out)[0] if answer.code == 0 else None
    return found


def containers(project: str) -> dict[str, Container]:
    """Service containers of a Compose project by service name (one-off containers are left out)."""
    listed = process.run(
        ["docker", "ps", "-aq", "--no-trunc", "--filter", f"label={PROJECT_LABEL}={project}"],
        timeout=INSPECT_TIMEOUT,
    ).out.split()
    if not listed:
        return {}
    found = {}
    for raw in json.loads(process.run(["docker", "inspect", *listed], timeout=INSPECT_TIMEOUT).out):
        labels = raw["Config"]["Labels"]
        if labels.get(ONE_OFF_LABEL, "False") == "True":
            continue
        state = raw["State"]
        found[labels[SERVICE_LABEL]] = Container(
            id=raw["Id"],
            service=labels[SERVICE_LABEL],
            image_reference=raw["Config"]["Image"],
            config_hash=labels.get(CONFIG_HASH_LABEL, ""),
            status=state["Status"],
            health=state.get("Health", {}).get("Status", "none"),
            started_at=state["StartedAt"],
        )
    return found


def remove(ids: Sequence[str]) -> None:
    """Stop and remove containers; their named volumes stay."""
    if ids:
        process.run(["docker", "stop", "--time", "60", *ids], timeout=180, gate="engine")
        process.run(["docker", "rm", *ids], timeout=60, gate="engine")


@dataclass(frozen=True)
class Compose:
    """Compose commands on one rendered file of one project."""

    project: str
    file: Path
    variables: Mapping[str, str]

    def _run(self, *arguments: str, timeout: float, gate: str, check: bool = True) -> process.Output:
        return process.run(
            [
                "docker",
                "compose",
                "--ansi",
                "never",
                "--progress",
                "quiet",
                "-p",
                self.project,
                "-f",
                str(self.file),
                *arguments,
            ],
            extra_env=self.variables,
            timeout=timeout,
            gate=gate,
            check=check,
        )

    def config_hashes(self) -> dict[str, str]:
        """The hash by which Compose decides whether a service's container has to be replaced."""
        lines = self._run(
            "--profile", "*", "config", "--hash", "*", timeout=60, gate="compose"
        ).out.splitlines()
        return {line.split()[0]: line.split()[1] for line in lines}

    def up(self, services: Sequence[str], timeout: int, gate: str, stale: Collection[str] = ()) -> None:
        """Start or replace `services` alone and wait, at most `timeout` seconds, until they are healthy.

        Those that are in `stale` too are replaced even if their definition is unchanged.
        """
        for names, force in (
            ([name for name in services if name not in stale], []),
            ([name for name in services if name in stale], ["--force-recreate"]),
        ):
            if names:
                wait = ("--wait", "--wait-timeout", str(timeout))
                command = ("up", "-d", "--no-build", "--no-deps", *force, *wait, *names)
                self._run(*command, timeout=timeout + 60, gate=gate)

    def run_once(self, service: str, timeout: int, gate: str) -> None:
        """Run `service` to its end in a container of its own.

        Raises:
            Refused: one is running already, or this one failed; then its container is gone too.
        """
        listing = ["docker", "ps", "-aq", "--filter", f"label={PROJECT_LABEL}={self.project}"]
        listing += ["--filter", f"label={ONE_OFF_LABEL}=True", "--filter", f"label={SERVICE_LABEL}={service}"]
        running = process.run([*listing, "--filter", "status=running"], gate=gate).out.split()
        if running:
            raise Refused(
                gate,
                f"{service} is running already, in container {running[0]}",
                "two at once would work on one schema",
                "wait until that container ends (docker ps), then run again",
                Exit.BUSY,
            )
        try:
            self._run("--profile", "*", "run", "--rm", "--no-deps", "-T", service, timeout=timeout, gate=gate)
        except Refused:
            # The client may have given up while the container goes on.
            remove(process.run(listing, gate=gate).out.split())
            raise

    def exec(
        self, service: str, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 60, gate: str
    ) -> str:
        """Run `argv` in the running container of `service`."""
        listing = ["docker", "ps", "-q", "--filter", f"label={PROJECT_LABEL}={self.project}"]
        found = process.run([*listing, "--filter", f"label={SERVICE_LABEL}={service}"], gate=gate).out.split()
        if len(found) != 1:
            raise Refused(
                gate,
                f"{service} has {len(found)} running containers",
                "the question can be put to exactly one",
                "look at `memoryctl status`, then run playbooks/site.yml",
                Exit.COULD_NOT_ASK,
            )
        return process.run(
            ["docker", "exec", "-i", found[0], *argv], stdin=stdin, timeout=timeout, gate=gate
        ).out
