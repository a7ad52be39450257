"""Files and directories with exact type, owner, group and mode, and durable atomic writes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import Refused


@dataclass(frozen=True)
class Ownership:
    """Numeric owner and group plus permission bits (for example 0o640)."""

    uid: int
    gid: int
    mode: int

    def __str__(self) -> str:
        return f"{self.mode:04o} {self.uid}:{self.gid}"


ROOT_PRIVATE = Ownership(0, 0, 0o600)
ROOT_PRIVATE_DIR = Ownership(0, 0, 0o700)
ROOT_PUBLIC = Ownership(0, 0, 0o644)
ROOT_PUBLIC_DIR = Ownership(0, 0, 0o755)


def canonical(value: Any) -> bytes:
    """Canonical JSON: sorted keys, no white space, UTF-8. The input of every hash in this program."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def sha256(data: bytes) -> str:
    """Hex SHA-256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def tree_hash(files: Mapping[str, str]) -> str:
    """Hash of a set of text files: SHA-256 over the canonical map of relative path to content hash."""
    return sha256(canonical({path: sha256(text.encode()) for path, text in files.items()}))


def observed(path: Path) -> Ownership | None:
    """Ownership of `path` itself (links not followed), or None when nothing is there."""
    try:
        info = path.lstat()
    except FileNotFoundError:
        return None
    return Ownership(info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode))


def require_kind(path: Path, kind: str) -> bool:
    """Whether `path` exists; refuses when it is not a plain `kind` ("directory" or "file").

    Raises:
        Refused: a symbolic link, or another type of file, is in the way.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISLNK(mode):
        raise Refused(
            "paths",
            f"{path} is a symbolic link, a {kind} is due",
            "a link can be pointed elsewhere after it was checked, and the router refuses linked paths",
            f"move the {kind} to {path} itself and remove the link",
        )
    if not (stat.S_ISDIR(mode) if kind == "directory" else stat.S_ISREG(mode)):
        raise Refused(
            "paths",
            f"{path} is not a {kind}",
            "the bundle would write into something it does not own",
            f"remove {path}",
        )
    return True


def ensure_directory(path: Path, want: Ownership, check: bool) -> bool:
    """Make `path` a directory with exactly the ownership `want`. Returns whether that is a change."""
    exists = require_kind(path, "directory")
    if exists and observed(path) == want:
        return False
    if not check:
        if not exists:
            with _umask(0o077):
                path.mkdir(parents=False)
        apply_ownership(path, want)
        fsync_directory(path.parent)
    return True


def apply_ownership(path: Path, want: Ownership) -> None:
    """Set owner, group and mode of `path` (owner first: a change of owner clears mode bits)."""
    os.chown(path, want.uid, want.gid, follow_symlinks=False)
    os.chmod(path, want.mode)


def ensure_file(path: Path, data: bytes, want: Ownership, check: bool) -> bool:
    """Make `path` a regular file holding `data` with exactly the ownership `want`. Returns whether that is a change."""
    if require_kind(path, "file") and path.stat().st_nlink == 1 and path.read_bytes() == data:
        if observed(path) == want:
            return False
        if not check:
            apply_ownership(path, want)
        return True
    if not check:
        write_atomic(path, data, want)
    return True


def write_atomic(path: Path, data: bytes, want: Ownership) -> None:
    """Replace `path` by rename: readers see the old content or the new one, and it survives a power loss."""
    partial = path.with_name(f".{path.name}.partial")
    with contextlib.suppress(FileNotFoundError):
        partial.unlink()
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as handle:
        handle.write(data)
        handle.flush()
        os.fchown(handle.fileno(), want.uid, want.gid)
        os.fchmod(handle.fileno(), want.mode)
        os.fsync(handle.fileno())
    partial.replace(path)
    fsync_directory(path.parent)


def replace_symlink(link: Path, target: str) -> None:
    """Point `link` at `target` by rename."""
    partial = link.with_name(f".{link.name}.partial")
    with contextlib.suppress(FileNotFoundError):
        partial.unlink()
    partial.symlink_to(target)
    partial.replace(link)
    fsync_directory(link.parent)


def fsync_directory(path: Path) -> None:
    """Flush the entries of directory `path`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _umask(mask: int) -> Any:
    previous = os.umask(mask)
    try:
        yield
    finally:
        os.umask(previous)
