"""Taking a deployment down. Data stays unless its deletion is asked for explicitly."""

from __future__ import annotations

import shutil
from pathlib import Path

from . import engine, files, guard, process, release
from .errors import Refused
from .layout import Layout


def remove(layout: Layout, project: str, delete_data: bool, check: bool) -> tuple[list[str], list[str]]:
    """Remove containers and networks of the project; with `delete_data` also its volumes, keys, secrets and releases.

    Everything is found by the project's label. Returns what was removed and what stays, each by name.
    """
    for directory in (layout.state, layout.etc):
        files.require_kind(directory, "directory")
    foreign = _foreign_policy(layout)
    if guard.armed(layout) is not None:
        raise Refused(
            "teardown",
            "an activation was begun on this host and has not ended",
            "its guard would bring back what is being removed",
            "wait until `memoryctl status` shows no guarded activation",
        )
    label = f"{engine.PROJECT_LABEL}={project}"
    changed = []
    for kind, listing, removal in (
        (
            "container",
            ["docker", "ps", "-aq", "--filter", f"label={label}"],
            ["docker", "rm", "--force", "--volumes"],
        ),
        (
            "network",
            ["docker", "network", "ls", "-q", "--filter", f"label={label}"],
            ["docker", "network", "rm"],
        ),
    ):
        found = process.run(listing, gate="teardown").out.split()
        changed += [f"{kind} {identity}" for identity in found]
        if found and not check:
            if kind == "container":
                process.run(["docker", "stop", "--time", "60", *found], timeout=180, gate="teardown")
            process.run([*removal, *found], timeout=120, gate="teardown")
    volumes = process.run(
        ["docker", "volume", "ls", "-q", "--filter", f"label={label}"], gate="teardown"
    ).out.split()
    kept = ["images, registry authorities and accounts of the host"]
    if not delete_data:
        changed += _unlink([layout.current, layout.previous, release.COMMAND], check) + guard.remove_units(
            check
        )
        return changed, [*kept, *(f"volume {name}" for name in volumes), str(layout.state), str(layout.etc)]
    changed += (
        [f"volume {name}" for name in volumes] + _unlink([release.COMMAND], check) + guard.remove_units(check)
    )
    if volumes and not check:
        process.run(["docker", "volume", "rm", *volumes], gate="teardown")
    for directory in (layout.state, layout.etc):
        changed += _delete(directory, foreign, check)
    return changed, kept + ([f"{foreign}, which another program owns"] if foreign else [])


def _foreign_policy(layout: Layout) -> Path | None:
    """The policy directory when another program writes it."""
    current = release.current_id(layout)
    if current is None:
        return None
    settings = release.load(layout, current).manifest["policy"]
    return Path(settings["directory"]) if settings["owner"] == "connect" else None


def _unlink(paths: list[Path], check: bool) -> list[str]:
    found = [path for path in paths if path.is_symlink() or path.exists()]
    if not check:
        for path in found:
            path.unlink()
    return [str(path) for path in found]


def _delete(directory: Path, spared: Path | None, check: bool) -> list[str]:
    if not directory.is_dir():
        return []
    if spared is None or directory not in spared.parents:
        if not check:
            shutil.rmtree(directory)
        return [str(directory)]
    changed = []
    for entry in sorted(directory.iterdir()):
        if entry == spared or entry in spared.parents:
            continue
        changed.append(str(entry))
        if not check:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    return changed
