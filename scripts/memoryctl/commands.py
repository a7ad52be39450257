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
    images,
    journal,
    policy,
    readback,
    release,
    routerkeys,
    secretstore,
    teardown,
)
from .errors import Refused
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


def ask_readback(layout: Layout, given: Data, check: bool) -> Data:
    """Ask every gate of the current release. Returns `gates`; the caller judges."""
    subject = _current(layout)
    with journal.exclusive(layout, "readback"):
        verdicts = readback.run(readback.Context(layout, subject, activation.compose_for(layout, subject)))
    bad = readback.failures(verdicts)
    return {"changed": False, "changes": [], "gates": readback.as_records(verdicts), "passed": not bad}


def status(layout: Layout, given: Data, check: bool) -> Data:
    """What runs, since when, of which release."""
    current = release.current_id(layout)
    project = release.load(layout, current).manifest["project"] if current else given.get("project", "memory")
    containers = engine.containers(project)
    committed = journal.last(layout, "committed")
    return {
        "changed": False,
        "changes": [],
        "release": current,
        "committed_at": committed["at"] if committed else None,
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
    "status": status,
    "teardown": remove,
}

# These hold the lock while they work, or change nothing.
LOCKING_THEMSELVES = ("activate", "readback", "status")


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
