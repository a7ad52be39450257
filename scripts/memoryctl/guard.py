"""The dead man's guard: armed on the host before anything changes, it brings an activation back whose run has died.

A run holds the lock of this host for as long as it lives. A guard that finds `armed.json` and a free lock knows that
the run died; one that finds the lock held after the deadline ends the run first. The guard's program is a copy made when
it was armed: it needs neither the release that failed nor the controller.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from . import files, process
from .layout import Layout

UNITS = Path("/etc/systemd/system")
SERVICE = "memory-guard.service"
TIMER = "memory-guard.timer"
INTERVAL_SECONDS = 5
PACKAGE = "memoryctl"


@dataclass(frozen=True)
class Armed:
    """An unfinished activation. `deadline` is in seconds since the epoch; `pid` is the process of the run."""

    release: str
    previous: str | None
    deadline: float
    pid: int


def units(layout: Layout) -> dict[str, str]:
    """Text of the systemd units by name. The service runs at every boot too, so that a restart ends nothing half-way."""
    return {
        SERVICE: (
            "[Unit]\n"
            "Description=Bring back an activation of the memory service whose run has died\n"
            "After=docker.service\n"
            f"ConditionPathExists={layout.armed}\n"
            "\n"
            "[Service]\n"
            "Type=oneshot\n"
            "TimeoutStartSec=900\n"
            f'ExecStart=/usr/bin/python3 -B -s -c \'import sys; sys.path.insert(0, "{layout.guard}"); '
            "from memoryctl.__main__ import main; sys.exit(main())' "
            f"--state-dir {layout.state} --etc-dir {layout.etc} guard\n"
            "\n"
            "[Install]\n"
            "WantedBy=multi-user.target\n"
        ),
        TIMER: (
            "[Unit]\n"
            "Description=Look after a running activation of the memory service\n"
            f"ConditionPathExists={layout.armed}\n"
            "\n"
            "[Timer]\n"
            f"OnActiveSec={INTERVAL_SECONDS}\n"
            f"OnUnitInactiveSec={INTERVAL_SECONDS}\n"
            "AccuracySec=1\n"
            f"Unit={SERVICE}\n"
        ),
    }


def ensure_units(layout: Layout, check: bool) -> list[str]:
    """Install and enable the units. Returns what changes."""
    changed = []
    for name, text in units(layout).items():
        if files.ensure_file(UNITS / name, text.encode(), files.ROOT_PUBLIC, check):
            changed.append(str(UNITS / name))
    if changed and not check:
        process.run(["systemctl", "daemon-reload"], gate="guard")
        process.run(["systemctl", "enable", SERVICE], gate="guard")
    return changed


def remove_units(check: bool) -> list[str]:
    """Disable and delete the units. Returns what changes."""
    present = [UNITS / name for name in (TIMER, SERVICE) if (UNITS / name).exists()]
    if present and not check:
        process.run(["systemctl", "disable", "--now", TIMER, SERVICE], check=False, gate="guard")
        for path in present:
            path.unlink()
        process.run(["systemctl", "daemon-reload"], gate="guard")
    return [str(path) for path in present]


def arm(layout: Layout, armed: Armed) -> None:
    """Write down what to go back to and start looking after this run."""
    program = _program(layout, armed)
    shutil.rmtree(layout.guard, ignore_errors=True)
    (layout.guard / PACKAGE).mkdir(parents=True, mode=0o755)
    for source in sorted(program.glob("*.py")):
        files.write_atomic(layout.guard / PACKAGE / source.name, source.read_bytes(), files.ROOT_PUBLIC)
    files.write_atomic(layout.armed, files.canonical(asdict(armed)) + b"\n", files.ROOT_PRIVATE)
    process.run(["systemctl", "restart", TIMER], gate="guard")


def _program(layout: Layout, armed: Armed) -> Path:
    """The program of the release to go back to; before there is one, that of the release being activated."""
    accepted = layout.release(armed.previous) / PACKAGE if armed.previous else None
    if accepted is not None and (accepted / "guard.py").exists():
        return accepted
    return layout.release(armed.release) / PACKAGE


def disarm(layout: Layout) -> None:
    """Forget the run: it committed, or it was brought back."""
    layout.armed.unlink(missing_ok=True)
    files.fsync_directory(layout.state)
    process.run(["systemctl", "stop", TIMER], check=False, gate="guard")


def armed(layout: Layout) -> Armed | None:
    """The unfinished activation, or None."""
    try:
        return Armed(**json.loads(layout.armed.read_text()))
    except FileNotFoundError:
        return None


def end_overdue_run(found: Armed) -> bool:
    """End a run that is past its deadline; tell whether it was. Its process is known by the lock it holds."""
    if time.time() < found.deadline:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(found.pid, signal.SIGKILL)
    return True
