"""An append-only journal: each entry carries the hash of the one before it, and is on disk before the state is entered."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import files
from .errors import Exit, Refused
from .layout import Layout

FILE = "activations.jsonl"
GENESIS = "0" * 64


def entries(layout: Layout) -> list[dict[str, Any]]:
    """All entries, oldest first.

    Raises:
        Refused: the chain is broken; the message names the entry.
    """
    path = layout.journal / FILE
    found: list[dict[str, Any]] = []
    previous = GENESIS
    for number, line in enumerate(_complete(path).decode().splitlines(), start=1):
        try:
            entry: dict[str, Any] = json.loads(line)
            intact = entry["previous"] == previous and entry["hash"] == _entry_hash(entry)
        except (ValueError, KeyError):
            intact = False
        if not intact:
            raise Refused(
                "journal",
                f"entry {number} of {path} does not fit the one before it",
                "what this host did before can no longer be proved",
                f"keep a copy of {path}, find out who changed it, and move it away to begin a new journal",
                Exit.FAILED,
            )
        previous = entry["hash"]
        found.append(entry)
    return found


def append(layout: Layout, state: str, **facts: Any) -> dict[str, Any]:
    """Add an entry and return it once it is on disk."""
    known = entries(layout)
    entry: dict[str, Any] = {
        "sequence": len(known) + 1,
        "previous": known[-1]["hash"] if known else GENESIS,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "state": state,
        "facts": facts,
    }
    entry["hash"] = _entry_hash(entry)
    path = layout.journal / FILE
    length = len(_complete(path))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o640)
    with os.fdopen(descriptor, "r+b") as handle:
        handle.truncate(length)
        handle.seek(length)
        handle.write(files.canonical(entry) + b"\n")
        handle.flush()
        os.fsync(handle.fileno())
    files.fsync_directory(path.parent)
    return entry


def _complete(path: Path) -> bytes:
    """The journal up to its last line end: an entry without one was cut off by a power loss and never counted."""
    data = path.read_bytes() if path.exists() else b""
    return data[: data.rfind(b"\n") + 1]


def _entry_hash(entry: dict[str, Any]) -> str:
    return files.sha256(files.canonical({key: value for key, value in entry.items() if key != "hash"}))


@contextlib.contextmanager
def exclusive(layout: Layout, purpose: str) -> Iterator[None]:
    """Hold the one lock of this host; the holder is named in the lock file and in the refusal of the second.

    Raises:
        Refused: another run holds the lock (exit code 75). A dead holder's lock is free by itself.
    """
    with layout.lock.open("a+") as handle:
        os.chmod(layout.lock, 0o640)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            handle.seek(0)
            raise Refused(
                "lock",
                f"another run is at work on this host: {handle.read().strip()}",
                "two runs at once would undo each other",
                "wait for it to end, then run again",
                Exit.BUSY,
            ) from error
        handle.truncate(0)
        handle.write(
            f"{purpose}, process {os.getpid()}, since {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n"
        )
        handle.flush()
        yield
