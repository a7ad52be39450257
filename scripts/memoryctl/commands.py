"""The commands of memoryctl, as Ansible and the command line call them.

Each takes plain data and returns plain data: `changed` (whether the host differs from before, or in check mode would),
`changes` (what), and the facts that the caller needs. None of the data returned holds a secret.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import (
    activation,
    engine,
    files,
    guard,
    images,
    journal,
    policy,
    readback,
    release,
    routerkeys,
    secretstore,
    teardown,
)
from .errors import Exit, Refused
from .files import Ownership
from .layout import Layout

Data = dict[str, Any]


def layout_from(raw: Mapping[str, str]) -> Layout:
    """The directories named by the caller."""
    return Layout(Path(raw["state_dir"]), Path(raw["etc_dir"]))


def _changes(changes: list[str], **facts: Any) -> Data:
    return {"changed": bool(changes), "changes": changes, **facts}


def ensure_paths(layout: Layout, given: Data, check: bool) -> Data:
    """Directories with exact ownership. Input `directories`: list of `path`, `uid`, `gid`, `mode` (octal text)."""
    changes = []
    for item in given["directories"]:
        want = Ownership(int(item["uid"]), int(item["gid"]), int(item["mode"], 8))
        if files.ensure_directory(Path(item["path"]), want, check):
            changes.append(f"{item['path']} {want}")
    return _changes(changes)


def ensure_images(layout: Layout, given: Data, check: bool) -> Data:
    """Registry authorities, and images by digest. Input `authorities`, `references`, `timeout_seconds`."""
    return _changes(
        images.ensure(given["authorities"], given["references"], float(given["timeout_seconds"]), check)
    )


def ensure_secrets(layout: Layout, given: Data, check: bool) -> Data:
    """Secrets and their consumers' files. Input `wanted`, `given` (values by name), `consumers`."""
    consumers = [secretstore.consumer_from(raw) for raw in given["consumers"]]
    values = {name: value for name, value in given["given"].items() if value}
    return _changes(secretstore.ensure(layout, given["wanted"], values, consumers, check))


def ensure_material(layout: Layout, given: Data, check: bool) -> Data:
    """Files from the controller for one consumer, such as a certificate. Input `consumer`, `gid`, `given` (text by name)."""
    return _changes(
        secretstore.ensure_material(layout, given["consumer"], int(given["gid"]), given["given"], check)
    )


def ensure_policy(layout: Layout, given: Data, check: bool) -> Data:
    """The policy directory. Input `directory`, `reader_gid`, `users` (null when another program owns the file)."""
    return _changes(policy.ensure(Path(given["directory"]), int(given["reader_gid"]), given["users"], check))


def ensure_keys(layout: Layout, given: Data, check: bool) -> Data:
    """Device keys. Input `image`, `uid`, `gid`, `principals`. Returns `key_ids` by principal."""
    store = routerkeys.Store(layout, given["image"], int(given["uid"]), int(given["gid"]))
    principals = [routerkeys.principal_from(raw) for raw in given["principals"]]
    changes, ids = routerkeys.ensure(store, principals, check)
    return _changes(changes, key_ids=ids)


def stage(layout: Layout, given: Data, check: bool) -> Data:
    """Write a release. Input `contents` (text by relative path). Returns `release` and a diff against the current one."""
    release_id, changes = release.stage(layout, given["contents"], check)
    changes += release.ensure_command(layout, check)
    changes += guard.ensure_units(layout, check)
    current = release.current_id(layout)
    diff = [] if current == release_id else release.differences(layout, given["contents"])
    return _changes(changes, release=release_id, current=current, diff=diff)


def activate(layout: Layout, given: Data, check: bool) -> Data:
    """Activate a staged release. Input `release`. In check mode: report why an activation would be needed."""
    if check:
        current = release.current_id(layout)
        if current != given["release"]:
            return _changes(
                [f"release {given['release'][:12]} in place of {(current or 'none')[:12]}"], gates=[]
            )
        subject = release.load(layout, given["release"])
        compose = activation.compose_for(layout, subject)
        running = engine.containers(compose.project)
        reasons = activation.differences(subject, current, running, compose.config_hashes())
        return _changes(reasons, gates=[] if reasons else activation.rehearse(layout, subject, compose))
    outcome = activation.activate(layout, given["release"])
    return _changes(outcome.reasons + outcome.changed, release=outcome.release, gates=outcome.gates)


def roll_back(layout: Layout, given: Data, check: bool) -> Data:
    """Go back to the release committed before the current one."""
    if check:
        return _changes(
            [f"release {(release.previous_id(layout) or 'none')[:12]} in place of the current one"], gates=[]
        )
    outcome = activation.roll_back(layout)
    return _changes(outcome.reasons + outcome.changed, release=outcome.release, gates=outcome.gates)


def watch(layout: Layout, given: Data, check: bool) -> Data:
    """What the guard's timer calls: bring back an activation whose run has died. Returns `ended` (null: nothing to do)."""
    found = guard.armed(layout)
    if found is None:
        return {"changed": False, "changes": [], "ended": None}
    overdue = guard.end_overdue_run(found)
    try:
        with journal.exclusive(layout, "guard"):
            ended = activation.recover(layout)
    except Refused as error:
        if error.code == Exit.BUSY and not overdue:
            return {"changed": False, "changes": [], "ended": None}
        raise
    return _changes([f"unfinished activation: {ended}"] if ended else [], ended=ended)


def ask_readback(layout: Layout, given: Data, check: bool) -> Data:
    """Ask every gate of the current release. Returns `gates`; the caller judges."""
    subject = _current(layout)
    with journal.exclusive(layout, "readback"):
        verdicts = readback.run(readback.Context(layout, subject, activation.compose_for(layout, subject)))
    bad = readback.failures(verdicts)
    return {"changed": False, "changes": [], "gates": readback.as_records(verdicts), "passed": not bad}


def status(layout: Layout, given: Data, check: bool) -> Data:
    """What runs, since when, of which release; how the last change ended; whether a guard is armed."""
    current = release.current_id(layout)
    project = release.load(layout, current).manifest["project"] if current else given.get("project", "memory")
    containers = engine.containers(project)
    history = journal.entries(layout)
    committed = next((entry for entry in reversed(history) if entry["state"] == "committed"), None)
    armed = guard.armed(layout)
    return {
        "changed": False,
        "changes": [],
        "release": current,
        "previous": release.previous_id(layout),
        "committed_at": committed["at"] if committed else None,
        "state": history[-1]["state"] if history else None,
        "entry": history[-1]["sequence"] if history else None,
        "reason": history[-1]["facts"].get("cause") or history[-1]["facts"].get("gate") if history else None,
        "armed_for": armed.release if armed else None,
        "closed": activation.is_closed(layout),
        "services": {
            name: {
                "status": item.status,
                "health": item.health,
                "since": item.started_at,
                "image": item.image_reference,
            }
            for name, item in sorted(containers.items())
        },
    }


def remove(layout: Layout, given: Data, check: bool) -> Data:
    """Take the deployment down. Input `project`, `delete_data`."""
    delete_data = given["delete_data"]
    if not isinstance(delete_data, bool):
        raise Refused(
            "teardown",
            "delete_data is no boolean",
            "data would be lost by a misunderstanding",
            "give true or false",
        )
    changed, kept = teardown.remove(layout, given["project"], delete_data, check)
    return _changes(changed, kept=kept)


def _current(layout: Layout) -> release.Release:
    current = release.current_id(layout)
    if current is None:
        raise Refused(
            "release",
            "this host has no committed release",
            "there is nothing to ask",
            "run playbooks/site.yml",
        )
    return release.load(layout, current)


COMMANDS = {
    "paths": ensure_paths,
    "images": ensure_images,
    "secrets": ensure_secrets,
    "material": ensure_material,
    "policy": ensure_policy,
    "keys": ensure_keys,
    "stage": stage,
    "activate": activate,
    "readback": ask_readback,
    "rollback": roll_back,
    "guard": watch,
    "status": status,
    "teardown": remove,
}

# These hold the lock while they work, or change nothing.
LOCKING_THEMSELVES = ("activate", "guard", "readback", "rollback", "status")


def call(name: str, directories: Mapping[str, str], given: Data, check: bool) -> Data:
    """Run a command by name. Commands that change the host hold its lock, one at a time."""
    layout = layout_from(directories)
    if check or name in LOCKING_THEMSELVES or not layout.state.is_dir():
        return COMMANDS[name](layout, given, check)
    with journal.exclusive(layout, name):
        return COMMANDS[name](layout, given, check)


def to_json(value: Data) -> str:
    """Result as one JSON document."""
    return json.dumps(value, indent=2, sort_keys=True)
