"""Secret values on the host, and the files in which each consumer reads them.

Every secret has one source file, `<etc>/secrets/store/<name>` (0600 root). From these the files of each consumer are
rendered, in a directory of its own that is mounted into its container. Values reach neither arguments, nor the
environment of a container, nor any output of this program.
"""

from __future__ import annotations

import hmac
import re
import secrets
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import files
from .errors import Refused
from .files import Ownership
from .layout import Layout

GENERATED_BYTES = 32
NAME = re.compile(r"[a-z][a-z0-9-]{0,62}")
# The database reads these once, when its volume is empty.
FIXED_AT_FIRST_START = ("postgres-hindsight-password", "postgres-superuser-password")
MINIMUM_LENGTH = 16
MAXIMUM_LENGTH = 512


@dataclass(frozen=True)
class Consumer:
    """A directory of files for one container, readable by its group only."""

    name: str
    gid: int
    files: tuple[ConsumerFile, ...]


@dataclass(frozen=True)
class ConsumerFile:
    """One rendered file. `entries` maps a key of the format to the name of a secret.

    Formats: `raw` (one value), `dotenv` (KEY='value' lines), `pgpass` (user to secret, any host and database).
    """

    name: str
    format: str
    entries: Mapping[str, str]
    ownership: Ownership


def refuse_unusable(name: str, value: str) -> None:
    """Refuse a value that some reader between here and the process would change or drop.

    Raises:
        Refused: too short, too long, blank, control or non-ASCII characters, or `${` (which dotenv readers expand).
    """
    problem = None
    if not MINIMUM_LENGTH <= len(value) <= MAXIMUM_LENGTH:
        problem = f"is {len(value)} characters long, {MINIMUM_LENGTH} to {MAXIMUM_LENGTH} are due"
    elif any(not 0x21 <= ord(character) <= 0x7E for character in value):
        problem = "holds a blank, a control character or a character outside ASCII"
    elif "${" in value:
        problem = "holds the characters ${, which a dotenv reader expands"
    if problem:
        raise Refused(
            "secret-value",
            f"the secret {name} {problem}",
            "it would reach the process changed, or be dropped by the router at start",
            f"write another value to the source of {name} (one line, printable ASCII without blanks)",
        )


def dotenv_quote(value: str) -> str:
    """`value` as a single-quoted dotenv value."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def pgpass_escape(value: str) -> str:
    """`value` as a field of a PostgreSQL password file."""
    return value.replace("\\", "\\\\").replace(":", "\\:")


def render(item: ConsumerFile, values: Mapping[str, str]) -> bytes:
    """Content of a consumer's file."""
    if item.format == "raw":
        (name,) = item.entries.values()
        return values[name].encode()
    if item.format == "dotenv":
        return "".join(
            f"{key}={dotenv_quote(values[name])}\n" for key, name in sorted(item.entries.items())
        ).encode()
    if item.format == "pgpass":
        lines = (
            f"*:*:*:{user}:{pgpass_escape(values[name])}\n" for user, name in sorted(item.entries.items())
        )
        return "".join(lines).encode()
    raise Refused(
        "secret-format",
        f"unknown format {item.format}",
        "the file cannot be rendered",
        "use raw, dotenv or pgpass",
    )


def read_source(path: Path) -> str | None:
    """The value in a source file (one final newline is not part of it), or None when there is no file."""
    if not files.require_kind(path, "file"):
        return None
    text = path.read_bytes().decode("utf-8", errors="replace")
    return text.removesuffix("\n")


def ensure(
    layout: Layout,
    wanted: Sequence[str],
    given: Mapping[str, str],
    consumers: Sequence[Consumer],
    check: bool,
) -> list[str]:
    """Make sources and consumer files exist. Returns the paths that change.

    Args:
        wanted: names of secrets that must exist; a missing one is generated.
        given: values chosen by the operator; they replace what is on the host.
        consumers: the rendered directories.

    Raises:
        Refused: an unusable value; nothing has been written then.
    """
    store = layout.secrets / "store"
    values: dict[str, str] = {}
    for name in wanted:
        if not NAME.fullmatch(name):
            raise Refused(
                "secret-value", f"{name!r} is no secret name", "it becomes a file name", "use a-z, 0-9 and -"
            )
        present = read_source(store / name)
        value = given.get(name) or present or secrets.token_urlsafe(GENERATED_BYTES)
        if name in FIXED_AT_FIRST_START and present is not None and value != present:
            raise Refused(
                "database-password",
                f"the inventory gives another {name} than this host holds",
                "the database keeps the password of its first start; the one that works would be overwritten",
                f"take it out of the inventory, or change the role's password inside the database first and write the same "
                f"value to {store / name}",
            )
        refuse_unusable(name, value)
        values[name] = value
    changed = []
    for directory in (layout.secrets, store):
        if files.ensure_directory(directory, files.ROOT_PRIVATE_DIR, check):
            changed.append(str(directory))
    for name, value in values.items():
        if read_source(store / name) == value and files.observed(store / name) == files.ROOT_PRIVATE:
            continue
        if files.ensure_file(store / name, value.encode(), files.ROOT_PRIVATE, check):
            changed.append(str(store / name))
    for consumer in consumers:
        directory = layout.secrets / consumer.name
        if files.ensure_directory(directory, Ownership(0, consumer.gid, 0o750), check):
            changed.append(str(directory))
        for item in consumer.files:
            if files.ensure_file(directory / item.name, render(item, values), item.ownership, check):
                changed.append(str(directory / item.name))
        changed += _remove_leftovers(directory, {item.name for item in consumer.files}, check)
    return changed


def ensure_material(
    layout: Layout, consumer: str, gid: int, texts: Mapping[str, str], check: bool
) -> list[str]:
    """Make the directory of `consumer` hold exactly the files `texts`, readable by its group. Returns what changes."""
    directory = layout.secrets / consumer
    changed = []
    for path, want in ((layout.secrets, files.ROOT_PRIVATE_DIR), (directory, Ownership(0, gid, 0o750))):
        if files.ensure_directory(path, want, check):
            changed.append(str(path))
    for name, text in texts.items():
        if files.ensure_file(directory / name, text.encode(), Ownership(0, gid, 0o640), check):
            changed.append(str(directory / name))
    return changed + _remove_leftovers(directory, set(texts), check)


def _remove_leftovers(directory: Path, expected: set[str], check: bool) -> list[str]:
    if not directory.is_dir():
        return []
    leftovers = [path for path in sorted(directory.iterdir()) if path.name not in expected]
    if not check:
        for path in leftovers:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    return [f"{path} (removed)" for path in leftovers]


def consumer_from(raw: Mapping[str, Any]) -> Consumer:
    """A consumer as declared by the roles (modes as octal text)."""
    return Consumer(
        name=raw["name"],
        gid=int(raw["gid"]),
        files=tuple(
            ConsumerFile(
                name=item["name"],
                format=item["format"],
                entries=item["entries"],
                ownership=Ownership(int(item["uid"]), int(item["gid"]), int(item["mode"], 8)),
            )
            for item in raw["files"]
        ),
    )


def fingerprint(layout: Layout, consumer: str) -> str:
    """Keyed hash of all files of a consumer: equal when no value changed, and of no use without the host's own key.

    Containers carry it as a label, so that a changed secret, and nothing else, recreates them.
    """
    key_path = layout.secrets / "store" / "fingerprint-key"
    digest = hmac.new(key_path.read_bytes(), digestmod="sha256")
    directory = layout.secrets / consumer
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        digest.update(files.canonical([path.name, files.sha256(path.read_bytes())]))
    return digest.hexdigest()[:32]


def known_values(layout: Layout) -> list[str]:
    """Every secret value of this host, longest first: what must not be in anything that is kept or shown."""
    values = set()
    for directory in (layout.secrets / "store", layout.committed_secrets / "store"):
        for path in directory.iterdir() if directory.is_dir() else []:
            values.add(read_source(path) or "")
    for path in layout.device_keys.glob("*.key"):
        values.add(path.read_text().strip())
    return sorted((value for value in values if len(value) >= MINIMUM_LENGTH), key=len, reverse=True)


def snapshot(layout: Layout) -> None:
    """Keep the secrets as they are now: what a roll-back to the release committed with them needs."""
    partial = layout.committed_secrets.with_name(f".{layout.committed_secrets.name}.partial")
    _copy_tree(layout.secrets, partial)
    outdated = layout.committed_secrets.with_name(f".{layout.committed_secrets.name}.outdated")
    shutil.rmtree(outdated, ignore_errors=True)
    if layout.committed_secrets.exists():
        layout.committed_secrets.rename(outdated)
    partial.rename(layout.committed_secrets)
    files.fsync_directory(layout.committed_secrets.parent)
    shutil.rmtree(outdated, ignore_errors=True)


def same(layout: Layout) -> bool:
    """Whether the secrets equal the last snapshot."""
    return _contents(layout.secrets) == _contents(layout.committed_secrets)


def _contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def restore(layout: Layout) -> list[Path]:
    """Bring the secrets back to the last snapshot. Returns the files that differed."""
    changed = []
    for source in sorted(path for path in layout.committed_secrets.rglob("*") if path.is_file()):
        info = source.stat()
        target = layout.secrets / source.relative_to(layout.committed_secrets)
        want = Ownership(info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode))
        files.ensure_directory(target.parent, _ownership(source.parent), check=False)
        if files.ensure_file(target, source.read_bytes(), want, check=False):
            changed.append(target)
    return changed


def _ownership(path: Path) -> Ownership:
    info = path.stat()
    return Ownership(info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode))


def _copy_tree(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(mode=0o700)
    for path in sorted(source.rglob("*")):
        destination = target / path.relative_to(source)
        if path.is_dir():
            files.ensure_directory(destination, _ownership(path), check=False)
        else:
            files.write_atomic(destination, path.read_bytes(), _ownership(path))
