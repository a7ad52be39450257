"""The policy directory: who may reach which bank through the dynamic route."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import files
from .errors import Refused
from .files import Ownership

SCHEMA = "anvil-memory-access/v1"
FILE = "access.json"
LEFTOVER = ".access.json.publish"


def ensure(directory: Path, reader_gid: int, users: Mapping[str, Any] | None, check: bool) -> list[str]:
    """Make the policy directory exist with exact ownership; with `users` also publish `access.json`.

    Args:
        directory: becomes 0750 root:<reader_gid>.
        users: grants by principal, or None when another program owns the file; then only its ownership is checked.

    Returns:
        The paths that change.

    Raises:
        Refused: an unfinished publication is present, or a file of another owner is unsafe.
    """
    changed = []
    if files.ensure_directory(directory, Ownership(0, reader_gid, 0o750), check):
        changed.append(str(directory))
    if (directory / LEFTOVER).exists():
        raise Refused(
            "policy",
            f"{directory / LEFTOVER} is there",
            "a publication of the policy was interrupted; its writer refuses to go on until somebody has looked",
            f"compare it with {directory / FILE}, keep the right content, remove {LEFTOVER}, and run again",
        )
    path = directory / FILE
    want = Ownership(0, reader_gid, 0o640)
    if users is None:
        if files.require_kind(path, "file") and (path.stat().st_nlink != 1 or files.observed(path) != want):
            raise Refused(
                "policy",
                f"{path} is {files.observed(path)} with {path.stat().st_nlink} links, {want} with 1 is due",
                "the router refuses an unsafe policy file, which closes the dynamic route for everybody",
                "let the program that owns the file publish it again",
            )
        return changed
    text = json.dumps({"schema": SCHEMA, "users": users}, indent=2, sort_keys=True, ensure_ascii=True) + "\n"
    if files.ensure_file(path, text.encode(), want, check):
        changed.append(str(path))
    return changed
