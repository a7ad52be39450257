"""The container engine of this machine: used as it is, or installed and started where there is none."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from .controller import as_root, ensure_packages, exclusive
from .errors import BundleError
from .process import run, run_to_log

_START_SECONDS = 60.0
_EARLY_SECONDS = 5.0
_STOP_SECONDS = 60.0
_DAEMON_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"
_SYSTEMD = Path("/run/systemd/system")
_SOCKET = "/var/run/docker.sock"


def ensure_engine(state: Path) -> str:
    """Make sure that a Docker Engine answers; return its version.

    An engine that answers is used as it is and never reconfigured. Without one, the distribution's package is
    installed and started: by systemd where that runs the machine, else as a process of its own.

    Raises:
        BundleError: this user may not use the engine, or it cannot be installed or started.
    """
    with exclusive(state, "engine"):
        found = version()
        if found is not None:
            return found
        _refuse_chosen_endpoint()
        log = state / "logs" / "engine.log"
        if not installed():
            ensure_packages(["docker.io", "iptables"], log)
        if shutil.which("docker") is None:
            ensure_packages(["docker-cli"], log)
        if _SYSTEMD.is_dir():
            run_to_log(as_root(["systemctl", "start", "docker.service"]), log, timeout=120)
            return _wait_until_answering(None, log)
        pid_file, daemon_log = _pid_file(state), _daemon_log(state)
        if engine_pid(pid_file) is None:
            pid_file.unlink(missing_ok=True)
            _start(pid_file, daemon_log)
        return _wait_until_answering(pid_file, daemon_log)


def installed() -> bool:
    """Tell whether the engine's program is on this machine, running or not."""
    return shutil.which("dockerd", path=_DAEMON_PATH) is not None


def version() -> str | None:
    """Return the version of the engine that answers, or None.

    Raises:
        BundleError: this user may not use it.
    """
    if shutil.which("docker") is None:
        return None
    answer = run(["docker", "version", "--format", "{{.Server.Version}}"], timeout=60, check=False)
    return classify(answer.returncode, answer.stdout, answer.stderr)


def stop_engine_if_ours(state: Path) -> bool:
    """Stop the engine if this bundle started it as a process and no container runs; tell whether it did.

    An engine that systemd or anybody else started is left alone.
    """
    with exclusive(state, "engine"):
        pid = started_by_us(state)
        if pid is None or version() is None:
            return False
        if run(["docker", "ps", "--quiet"], timeout=60).stdout.strip():
            return False
        run(as_root(["sh", "-c", 'kill -TERM "$1"', "sh", str(pid)]), timeout=30)
        deadline = time.monotonic() + _STOP_SECONDS
        while started_by_us(state) == pid:
            if time.monotonic() > deadline:
                raise BundleError(
                    f"the Docker Engine (process {pid}) did not stop within {_STOP_SECONDS:.0f} seconds",
                    "it was asked to because this sandbox started it and nothing runs in it",
                    f"look at its log {_daemon_log(state)} and stop it by hand",
                )
            time.sleep(0.1)
        return True


def started_by_us(state: Path) -> int | None:
    """Return the process number of the engine that this bundle started, None when there is none."""
    return engine_pid(_pid_file(state))


def engine_pid(pid_file: Path) -> int | None:
    """Return the process number in `pid_file` if that process is a Docker Engine and lives, else None."""
    try:
        pid = int(pid_file.read_text())
        status = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, ValueError):
        return None
    name, _, rest = status.partition("(")[2].rpartition(") ")
    return pid if name == "dockerd" and rest[:1] not in ("Z", "X") else None


def classify(returncode: int, stdout: str, stderr: str) -> str | None:
    """Return the engine's version from what `docker version` answered, None when no engine is there.

    Raises:
        BundleError: there is one, and this user may not use it.
    """
    version = stdout.strip()
    if returncode == 0 and version:
        return version
    if "permission denied" in stderr.lower():
        raise BundleError(
            "this user may not use the Docker Engine of this machine",
            "the sandbox's managed host, registry and network are made with it",
            "run the command with sudo, or add the user to the group docker and log in again",
        )
    return None


def _refuse_chosen_endpoint() -> None:
    chosen = os.environ.get("DOCKER_HOST", "")
    if chosen and chosen not in (f"unix://{_SOCKET}", "unix:///run/docker.sock"):
        raise BundleError(
            f"the Docker Engine that DOCKER_HOST names ({chosen}) does not answer",
            "an engine was chosen explicitly, so no other one is started in its place",
            "start that engine, or unset DOCKER_HOST",
        )


def _pid_file(state: Path) -> Path:
    return state / "dockerd.pid"


def _daemon_log(state: Path) -> Path:
    return state / "logs" / "dockerd.log"


def _start(pid_file: Path, log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    script = 'exec setsid --fork dockerd --log-level warn --pidfile "$1" >>"$2" 2>&1 </dev/null'
    run(as_root(["sh", "-c", script, "sh", str(pid_file), str(log)]), timeout=60)


def _wait_until_answering(pid_file: Path | None, log: Path) -> str:
    begin = time.monotonic()
    while time.monotonic() < begin + _START_SECONDS:
        found = version()
        if found is not None:
            return found
        if (
            pid_file is not None
            and time.monotonic() > begin + _EARLY_SECONDS
            and engine_pid(pid_file) is None
        ):
            break
        time.sleep(0.2)
    raise _not_answering(log)


def _not_answering(log: Path) -> BundleError:
    tail = log.read_text(errors="replace").strip().splitlines()[-15:] if log.exists() else []
    return BundleError(
        "the Docker Engine was started and does not answer",
        "nothing can be deployed without it; the end of its log:\n    " + "\n    ".join(tail),
        f"correct the cause named there (all of it is in {log}) and run the command again",
    )
