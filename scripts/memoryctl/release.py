"""A release: everything rendered for one host, named by the hash of its content. It holds no secret."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import files
from .errors import Refused
from .layout import Layout

MANIFEST = "release.json"
COMPOSE = "compose.yaml"
LOCK = "images.lock.json"
SCHEMA = "memory-bundle.release/v1"
CONFIG_PREFIX = "config/"
COMMAND = Path("/usr/local/sbin/memoryctl")


@dataclass(frozen=True)
class Release:
    """A release on this host whose files were compared with its name."""

    id: str
    directory: Path
    manifest: Mapping[str, Any]

    @property
    def compose_file(self) -> Path:
        return self.directory / COMPOSE

    @property
    def image_references(self) -> dict[str, str]:
        """Reference of each image by its name in the lock."""
        return {name: image["reference"] for name, image in self.manifest["images"].items()}


def configuration_directories(contents: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Files below `config/<service>/` grouped into content-addressed directories.

    A directory is named `<service>-<first 16 digits of its hash>`: a service whose configuration is unchanged keeps its
    mounts, and so its container, in the next release.
    """
    services: dict[str, dict[str, str]] = {}
    for path, text in contents.items():
        if path.startswith(CONFIG_PREFIX):
            service, name = path.removeprefix(CONFIG_PREFIX).split("/", 1)
            services.setdefault(service, {})[name] = text
    return {f"{service}-{files.tree_hash(content)[:16]}": content for service, content in services.items()}


def stage(layout: Layout, contents: Mapping[str, str], check: bool) -> tuple[str, list[str]]:
    """Write a release and its configuration directories. Returns the release's id and what changes.

    The release directory appears under its final name only when it is complete and on disk.
    """
    release_id = files.tree_hash(contents)
    changed = []
    for directory in (layout.state, layout.releases, layout.config, layout.journal):
        if files.ensure_directory(directory, files.ROOT_PUBLIC_DIR, check):
            changed.append(str(directory))
    for name, content in configuration_directories(contents).items():
        if _write_tree(layout.config / name, content, check):
            changed.append(str(layout.config / name))
    if _write_tree(layout.release(release_id), contents, check):
        changed.append(str(layout.release(release_id)))
    return release_id, changed


def _write_tree(target: Path, contents: Mapping[str, str], check: bool) -> bool:
    if files.require_kind(target, "directory"):
        if read_tree(target) == dict(contents):
            return False
        raise Refused(
            "release",
            f"{target} does not hold what its name says",
            "somebody changed a file that is named by the hash of its content",
            f"find out who changed it, then move {target} away and run again",
        )
    if not check:
        partial = target.with_name(f".{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o755)
        for path, text in contents.items():
            destination = partial / path
            destination.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            files.write_atomic(destination, text.encode(), files.ROOT_PUBLIC)
        for directory in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
            files.apply_ownership(directory, files.ROOT_PUBLIC_DIR)
        partial.rename(target)
        files.fsync_directory(target.parent)
    return True


def read_tree(directory: Path) -> dict[str, str]:
    """Text of every file of a release directory by its relative path, byte code left out."""
    return {
        str(path.relative_to(directory)): path.read_bytes().decode()
        for path in directory.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def load(layout: Layout, release_id: str) -> Release:
    """A staged release, compared with its name.

    Raises:
        Refused: it is not on this host, was changed, or is of a schema that this program does not know.
    """
    directory = layout.release(release_id)
    if not files.require_kind(directory, "directory"):
        raise Refused(
            "release",
            f"there is no release {release_id} on this host",
            "nothing can be activated",
            "run playbooks/site.yml",
        )
    contents = read_tree(directory)
    if files.tree_hash(contents) != release_id:
        raise Refused(
            "release",
            f"the files of {directory} do not have the hash in its name",
            "what runs could not be compared with what was reviewed",
            f"move {directory} away and run playbooks/site.yml again",
        )
    manifest = json.loads(contents[MANIFEST])
    if manifest.get("schema") != SCHEMA:
        raise Refused(
            "release",
            f"release {release_id[:12]} has schema {manifest.get('schema')!r}, {SCHEMA!r} is due",
            "its settings cannot be read safely",
            "activate it with the memoryctl that came with it",
        )
    return Release(release_id, directory, manifest)


def differences(layout: Layout, contents: Mapping[str, str]) -> list[dict[str, str]]:
    """What `contents` changes against the current release, file by file, as Ansible shows it (the program left out)."""
    before = read_tree(layout.current.resolve()) if layout.current.is_symlink() else {}
    return [
        {
            "before": before.get(path, ""),
            "after": contents.get(path, ""),
            "before_header": f"release/{path}",
            "after_header": f"release/{path}",
        }
        for path in sorted({*before, *contents})
        if before.get(path) != contents.get(path) and not path.startswith("memoryctl/")
    ]


def ensure_command(layout: Layout, check: bool) -> list[str]:
    """Make the command `memoryctl` run the program of the current release. Returns what changes."""
    program = (
        "#!/bin/sh\n"
        "# Runs the program of the committed release; it needs nothing but the system's Python.\n"
        f'exec python3 -B -s -c \'import sys; sys.path.insert(0, "{layout.current}"); '
        "from memoryctl.__main__ import main; sys.exit(main())' "
        f'--state-dir {layout.state} --etc-dir {layout.etc} "$@"\n'
    )
    want = files.Ownership(files.ROOT_PUBLIC.uid, files.ROOT_PUBLIC.gid, 0o755)
    return [str(COMMAND)] if files.ensure_file(COMMAND, program.encode(), want, check) else []


def previous_id(layout: Layout) -> str | None:
    """Id of the release committed before the current one, or None."""
    return layout.previous.readlink().name if layout.previous.is_symlink() else None


def current_id(layout: Layout) -> str | None:
    """Id of the committed release, or None on a host that never had one."""
    return layout.current.readlink().name if layout.current.is_symlink() else None
