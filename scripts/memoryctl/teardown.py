"""Taking a deployment down. Data stays unless its deletion is asked for explicitly."""

from __future__ import annotations

import shutil

from . import engine, files, process, release
from .layout import Layout


def remove(layout: Layout, project: str, delete_data: bool, check: bool) -> list[str]:
    """Remove containers and networks of the project; with `delete_data` also its volumes, keys, secrets and releases.

    Everything is found by the project's label, and each thing removed is named in the result.
    """
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
    for path in (layout.current, release.COMMAND):
        if path.is_symlink() or path.exists():
            changed.append(str(path))
            if not check:
                path.unlink()
    if delete_data:
        changed += _delete_data(layout, label, check)
    return changed


def _delete_data(layout: Layout, label: str, check: bool) -> list[str]:
    volumes = process.run(
        ["docker", "volume", "ls", "-q", "--filter", f"label={label}"], gate="teardown"
    ).out.split()
    changed = [f"volume {name}" for name in volumes]
    if volumes and not check:
        process.run(["docker", "volume", "rm", *volumes], gate="teardown")
    for directory in (layout.state, layout.etc):
        if files.require_kind(directory, "directory"):
            changed.append(str(directory))
            if not check:
                shutil.rmtree(directory)
    return changed
