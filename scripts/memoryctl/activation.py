"""Activation: bring a staged release to life in dependency order, and commit it only on a complete readback."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import database, engine, evidence, files, guard, hindsight, journal, readback, release, secretstore
from .errors import PROGRAM_FAULTS, Exit, Refused
from .layout import Layout
from .release import Release

EDGE_CA = "caddy/pki/authorities/local/root.crt"
EDGE_CA_SECONDS = 15.0
EDGE_ANSWER_SECONDS = 90.0
CLOSED = "closed"
# Databases, API and worker, router, edge, and as much again for the readback.
DEADLINE_SERVICES = 6
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


def activate(layout: Layout, release_id: str, action: str = "activation") -> Outcome:
    """Make `release_id` the live release, or prove that it already is; otherwise bring the previous one back.

    Raises:
        Refused: a step or a gate failed; its name is in the message and in the journal. The message also says whether
            the previous release serves again, proved, or whether the edge was closed.
    """
    with journal.exclusive(layout, f"{action} of {release_id[:12]}"):
        recover(layout)
        subject = release.load(layout, release_id)
        current = release.current_id(layout)
        _require_images(subject)
        compose = compose_for(layout, subject)
        reasons = differences(subject, current, engine.containers(compose.project), compose.config_hashes())
        if not reasons and not is_closed(layout):
            banks = _ensure_banks(layout, subject)
            gates = _prove(layout, subject, compose, passes=1)
            _remember_secrets(layout)
            return Outcome(release_id, [], banks, gates)
        if current is not None and current != release_id:
            _require_images(release.load(layout, current))
        journal.append(layout, "staged", release=release_id, replaces=current, reasons=reasons)
        deadline = time.time() + MIGRATION_SECONDS + DEADLINE_SERVICES * int(subject.manifest["wait_seconds"])
        guard.arm(layout, guard.Armed(release_id, current, deadline, os.getpid()))
        journal.append(layout, "armed", release=release_id)
        try:
            journal.append(layout, "activating", release=release_id)
            changed = _bring_up(layout, subject, compose, migrate=True)
            journal.append(layout, "reading-back", release=release_id)
            gates = _prove(layout, subject, compose)
            _require_controller()
        except Refused as error:
            raise _back(layout, guard.Armed(release_id, current, 0, 0), error) from error
        except PROGRAM_FAULTS as error:
            raise _back(layout, guard.Armed(release_id, current, 0, 0), _program_fault(error)) from error
        _commit(layout, subject, gates)
        return Outcome(release_id, reasons, changed, gates)


def roll_back(layout: Layout) -> Outcome:
    """Make the release that was committed before the current one live again: the same path, the same gates."""
    current, previous = release.current_id(layout), release.previous_id(layout)
    if previous is None or previous == current:
        raise Refused(
            "rollback",
            "this host has no release before the current one",
            "there is nothing to go back to",
            "activate a release with playbooks/site.yml",
        )
    subject = release.load(layout, previous)
    running = release.load(layout, current) if current else subject
    _require_compatible(subject, database.state(compose_for(layout, running)).head)
    return activate(layout, previous, "roll-back")


def recover(layout: Layout) -> str | None:
    """Bring back an activation whose run has died. Returns how it ended, or None when there was none.

    Called with the lock held.
    """
    found = guard.armed(layout)
    if found is None:
        return None
    if release.current_id(layout) == found.release and _is_committed(layout, found.release):
        guard.disarm(layout)
        return "committed"
    cause = Refused(
        "interrupted",
        f"the run that activated {found.release[:12]} ended without a result",
        "nobody knows how far it came",
        "nothing: the host goes back by itself",
    )
    return str(_back(layout, found, cause).gate)


def is_closed(layout: Layout) -> bool:
    """Whether the edge answers 503 because a roll-back could not be proved."""
    return (layout.edge_state / CLOSED).exists()


def _back(layout: Layout, found: guard.Armed, cause: Refused) -> Refused:
    """Bring the previous release back and prove it, or close the edge. Returns the refusal that tells which."""
    journal.append(
        layout, "rolling-back", release=found.release, to=found.previous, gate=cause.gate, reason=cause.what
    )
    try:
        failed = release.load(layout, found.release)
        kept = evidence.keep(layout, failed.manifest["project"], cause.text())
        if found.previous is None:
            raise Refused(
                "rollback",
                "there is no committed release to go back to",
                "the first activation of this host failed",
                "mend the cause, then run playbooks/site.yml",
            )
        subject = release.load(layout, found.previous)
        restored = {path.parent.name for path in secretstore.restore(layout)}
        compose = compose_for(layout, subject)
        # What started while a file was wrong holds the wrong value, whatever its label says.
        stale = [
            name
            for consumer, names in subject.manifest["secret_consumers"].items()
            if consumer in restored
            for name in names
        ]
        _bring_up(layout, subject, compose, migrate=False, stale=stale)
        gates = _prove(layout, subject, compose)
    except Refused as error:
        return _fail_closed(layout, found, cause, error)
    except PROGRAM_FAULTS as error:
        return _fail_closed(layout, found, cause, _program_fault(error))
    entry = journal.append(
        layout, "rolled-back", release=found.previous, gates=gates, cause=cause.gate, evidence=kept
    )
    guard.disarm(layout)
    return Refused(
        cause.gate,
        f"{cause.what}\n    release {found.previous[:12]} serves again, proved by {len(gates)} gates (entry {entry['sequence']})",
        cause.why,
        f"{cause.fix}; logs are kept in {layout.evidence / kept}",
        Exit.ROLLED_BACK,
    )


def _program_fault(error: Exception) -> Refused:
    return Refused(
        "program",
        f"{type(error).__name__}: {error}",
        "this is a fault of the program, and nobody knows what it left undone",
        "report it with the evidence",
        Exit.FAILED,
    )


def _fail_closed(layout: Layout, found: guard.Armed, cause: Refused, error: Refused) -> Refused:
    (layout.edge_state / CLOSED).touch()
    journal.append(
        layout,
        "failed-closed",
        release=found.release,
        to=found.previous,
        cause=cause.gate,
        gate=error.gate,
        reason=error.what,
    )
    guard.disarm(layout)
    return Refused(
        cause.gate,
        f"{cause.what}\n    and the previous release could not be proved: [{error.gate}] {error.what}\n    the edge answers 503",
        "nothing that is not proved may serve",
        f"{error.fix}; then run playbooks/site.yml, which opens the edge again when every gate passed",
        Exit.FAILED_CLOSED,
    )


def _commit(layout: Layout, subject: Release, gates: list[dict[str, Any]]) -> None:
    current = release.current_id(layout)
    if current is not None and current != subject.id:
        files.replace_symlink(layout.previous, f"releases/{current}")
    _remember_secrets(layout)
    files.replace_symlink(layout.current, f"releases/{subject.id}")
    journal.append(
        layout,
        "committed",
        release=subject.id,
        lock=files.sha256((subject.directory / release.LOCK).read_bytes()),
        gates=gates,
        fingerprints=fingerprints(layout, subject),
    )
    guard.disarm(layout)


def _remember_secrets(layout: Layout) -> None:
    if not secretstore.same(layout):
        secretstore.snapshot(layout)


def _is_committed(layout: Layout, release_id: str) -> bool:
    newest = journal.entries(layout)[-1]
    return bool(newest["state"] == "committed" and newest["facts"]["release"] == release_id)


def _require_controller() -> None:
    """Refuse to commit when nobody is left to be told: the reader of standard output is gone."""
    poll = select.poll()
    poll.register(1, select.POLLERR | select.POLLHUP)
    if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        raise Refused(
            "controller",
            "whoever started this run has gone away",
            "a change that nobody watches is not committed",
            "run playbooks/site.yml again",
        )


def _require_compatible(subject: Release, head: str) -> None:
    expected = subject.manifest["hindsight"]["migration_head"]
    if head in (expected, *subject.manifest["hindsight"]["compatible_heads"]):
        return
    raise Refused(
        "schema-head",
        f"the database is at migration {head or 'none'}, release {subject.id[:12]} is made for {expected}",
        "an older Hindsight on a newer schema starts, looks healthy, and may lose what the newer one wrote",
        "stay on the current release, or restore a backup of the older one into a new volume; only a release that lists "
        "the newer head in memory_activation_compatible_heads may go back in place",
    )


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


def _bring_up(
    layout: Layout, subject: Release, compose: engine.Compose, migrate: bool, stale: Collection[str] = ()
) -> list[str]:
    """Start services in the order of their dependence. Those named in `stale` are replaced in any case."""
    wait = int(subject.manifest["wait_seconds"])
    services = list(subject.manifest["service_images"])
    first = [service for service in services if service in (database.SERVICE, "embeddings")]
    compose.up(first, wait, "database", stale)
    if migrate:
        changed = _migrate(subject, compose, wait)
    else:
        changed = []
        _require_compatible(subject, database.state(compose).head)
    compose.up(["api", "worker"], wait, "hindsight", stale)
    changed += _ensure_banks(layout, subject)
    compose.up(["router"], wait, "router", stale)
    compose.up(["edge"], wait, "edge", stale)
    found = engine.containers(compose.project)
    engine.remove([found[service].id for service in sorted(set(found) - set(services))])
    changed += _publish_edge_ca(layout, subject)
    (layout.edge_state / CLOSED).unlink(missing_ok=True)
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


def _prove(
    layout: Layout, subject: Release, compose: engine.Compose, passes: int | None = None
) -> list[dict[str, Any]]:
    """Ask every gate as often as the release says, or `passes` times; all passes must see the same containers.

    Returns the verdicts of the last pass.
    """
    started = _start_times(subject)
    verdicts: list[readback.Verdict] = []
    for _ in range(passes or int(subject.manifest["readback_passes"])):
        verdicts = readback.run(readback.Context(layout, subject, compose))
        bad = readback.failures(verdicts)
        if bad:
            raise gate_failure(bad)
    if _start_times(subject) != started:
        raise Refused(
            "steady",
            "a container was replaced or restarted while it was being asked",
            "the answers are not those of what runs now",
            "look at `docker ps -a` and the logs of the container that is younger than the others",
            Exit.FAILED,
        )
    return readback.as_records(verdicts)


def _start_times(subject: Release) -> dict[str, str]:
    return {name: item.started_at for name, item in engine.containers(subject.manifest["project"]).items()}


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
