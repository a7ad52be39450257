"""Activation: bring a staged release to life in dependency order, and commit it only on a complete readback."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import database, engine, files, hindsight, journal, readback, release, secretstore
from .errors import Exit, Refused
from .layout import Layout
from .release import Release

EDGE_CA = "caddy/pki/authorities/local/root.crt"
EDGE_CA_SECONDS = 15.0
EDGE_ANSWER_SECONDS = 90.0
MIGRATION_SECONDS = 1800


@dataclass(frozen=True)
class Outcome:
    """How an activation ended well. `reasons` says what differed before; empty means that nothing was changed."""

    release: str
    reasons: list[str]
    changed: list[str]
    gates: list[dict[str, Any]] = field(default_factory=list)


def compose_for(layout: Layout, subject: Release) -> engine.Compose:
    """Compose commands on the release, with the fingerprints of its consumers' secrets as variables."""
    return engine.Compose(subject.manifest["project"], subject.compose_file, fingerprints(layout, subject))


def fingerprints(layout: Layout, subject: Release) -> dict[str, str]:
    """Variables of the Compose file: one fingerprint for each consumer of secrets."""
    return {
        f"MEMORY_SECRETS_{consumer.upper()}": secretstore.fingerprint(layout, consumer)
        for consumer in subject.manifest["secret_consumers"]
    }


def differences(
    subject: Release, current: str | None, running: Mapping[str, engine.Container], hashes: Mapping[str, str]
) -> list[str]:
    """Why the host is not yet what the release says; empty when it is. Pure: decides, does nothing."""
    reasons = []
    if current != subject.id:
        reasons.append(f"release {(current or 'none')[:12]} is current, not {subject.id[:12]}")
    for service in subject.manifest["service_images"]:
        container = running.get(service)
        if container is None:
            reasons.append(f"{service} has no container")
        elif container.config_hash != hashes.get(service):
            reasons.append(f"the definition or a secret of {service} changed")
        elif container.status != "running" or container.health != "healthy":
            reasons.append(f"{service} is {container.status}, {container.health}")
    reasons += [
        f"{service} is not part of the release"
        for service in running
        if service not in subject.manifest["service_images"]
    ]
    return reasons


def activate(layout: Layout, release_id: str) -> Outcome:
    """Make `release_id` the live release, or prove that it already is.

    Raises:
        Refused: a step or a gate failed; its name is in the message and in the journal.
    """
    with journal.exclusive(layout, f"activation of {release_id[:12]}"):
        subject = release.load(layout, release_id)
        _require_images(subject)
        compose = compose_for(layout, subject)
        current = release.current_id(layout)
        reasons = differences(subject, current, engine.containers(compose.project), compose.config_hashes())
        if not reasons:
            banks = _ensure_banks(layout, subject)
            return Outcome(release_id, [], banks, _prove(layout, subject, compose))
        journal.append(layout, "activating", release=release_id, replaces=current, reasons=reasons)
        try:
            changed = _bring_up(layout, subject, compose)
            journal.append(layout, "reading-back", release=release_id)
            gates = _prove(layout, subject, compose)
        except Refused as error:
            journal.append(layout, "failed", release=release_id, gate=error.gate, reason=error.what)
            raise
        except Exception as error:
            journal.append(
                layout,
                "failed",
                release=release_id,
                gate="program",
                reason=f"{type(error).__name__}: {error}",
            )
            raise
        files.replace_symlink(layout.current, f"releases/{release_id}")
        journal.append(
            layout,
            "committed",
            release=release_id,
            gates=len(gates),
            fingerprints=fingerprints(layout, subject),
        )
        return Outcome(release_id, reasons, changed, gates)


def _require_images(subject: Release) -> None:
    held = engine.inspect_images(list(subject.image_references.values()))
    missing = [reference for reference, found in held.items() if found is None]
    if missing:
        raise Refused(
            "images",
            "not on this host: " + ", ".join(missing),
            "nothing is pulled while services are being replaced",
            "run playbooks/site.yml, which fetches images first",
        )


def _bring_up(layout: Layout, subject: Release, compose: engine.Compose) -> list[str]:
    wait = int(subject.manifest["wait_seconds"])
    services = list(subject.manifest["service_images"])
    first = [service for service in services if service in (database.SERVICE, "embeddings")]
    compose.up(first, wait, "database")
    changed = _migrate(subject, compose, wait)
    compose.up(["api", "worker"], wait, "hindsight")
    changed += _ensure_banks(layout, subject)
    compose.up(["router"], wait, "router")
    compose.up(["edge"], wait, "edge")
    found = engine.containers(compose.project)
    engine.remove([found[service].id for service in sorted(set(found) - set(services))])
    changed += _publish_edge_ca(layout, subject)
    _await_edge(layout, subject, compose)
    return changed


def _migrate(subject: Release, compose: engine.Compose, wait: int) -> list[str]:
    expected = subject.manifest["hindsight"]["migration_head"]
    images = subject.manifest["images"]
    state = database.state(compose)
    if state.major != images["postgres"]["facts"]["postgres_major"] or not state.vector:
        raise Refused(
            "database",
            f"the database is PostgreSQL {state.major} with vector extension {state.vector or 'absent'}",
            f"the lock names PostgreSQL {images['postgres']['facts']['postgres_major']} with pgvector",
            "move to another major by a restore into a new volume; an absent extension means that the first start of the "
            "database was interrupted: look at its log",
            Exit.FAILED,
        )
    if state.head == expected:
        return []
    compose.run_once("migrate", max(wait, MIGRATION_SECONDS), "migration")
    found = database.state(compose).head
    if found != expected:
        raise Refused(
            "schema-head",
            f"the database is at migration {found or 'none'}, the locked image is at {expected}",
            "an older Hindsight on a newer schema starts and looks healthy",
            "activate the release that made this schema, or restore a backup of the older one into a new volume",
            Exit.FAILED,
        )
    return [f"schema {state.head or 'empty'} to {found}"]


def _ensure_banks(layout: Layout, subject: Release) -> list[str]:
    client: hindsight.Hindsight = readback.upstream_client(layout, subject)
    existing = client.banks()
    return [change for bank in subject.manifest["banks"] for change in client.ensure_bank(bank, existing)]


def _publish_edge_ca(layout: Layout, subject: Release) -> list[str]:
    if subject.manifest["edge"]["tls_mode"] != "internal":
        return []
    source = layout.edge_data / EDGE_CA
    deadline = time.monotonic() + EDGE_CA_SECONDS
    while not source.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    if not source.exists():
        raise Refused(
            "edge",
            f"the edge has written no authority to {source}",
            "clients and the readback could not verify its certificate",
            "look at the log of the edge container",
            Exit.FAILED,
        )
    target = layout.edge / "ca.crt"
    return (
        [str(target)]
        if files.ensure_file(target, source.read_bytes(), files.ROOT_PUBLIC, check=False)
        else []
    )


def _await_edge(layout: Layout, subject: Release, compose: engine.Compose) -> None:
    """Wait, bounded, until the edge has its certificate. Judges nothing: the gates do."""
    endpoint = readback.Context(layout, subject, compose).edge
    deadline = time.monotonic() + EDGE_ANSWER_SECONDS
    while endpoint.request("GET", "/", timeout=5).status == 0 and time.monotonic() < deadline:
        time.sleep(0.3)


def _prove(layout: Layout, subject: Release, compose: engine.Compose) -> list[dict[str, Any]]:
    verdicts = readback.run(readback.Context(layout, subject, compose))
    bad = readback.failures(verdicts)
    if bad:
        raise gate_failure(bad)
    return readback.as_records(verdicts)


def rehearse(layout: Layout, subject: Release, compose: engine.Compose) -> list[dict[str, Any]]:
    """Ask the gates that store nothing, and refuse when one does not pass: what check mode can say of a live release."""
    verdicts = readback.run(readback.Context(layout, subject, compose), readback.STORING)
    bad = readback.failures(verdicts)
    if bad:
        raise gate_failure(bad)
    return readback.as_records(verdicts)


def gate_failure(bad: Sequence[readback.Verdict]) -> Refused:
    """The refusal that names the gates that did not pass."""
    lines = "\n    ".join(
        f"{item.id}: {item.verdict}, expected {item.expected}, observed {item.observed}" for item in bad
    )
    asked = any(item.verdict == "fail" for item in bad)
    return Refused(
        f"readback/{bad[0].id}",
        f"{len(bad)} of the gates did not pass:\n    {lines}",
        "a release counts as live only when every gate was asked and passed",
        "docs/gates.md says for each gate what it proves and what to do",
        Exit.FAILED if asked else Exit.COULD_NOT_ASK,
    )
