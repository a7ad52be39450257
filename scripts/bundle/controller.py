"""The machine the bundle runs from: its packages, package mirror and Python environment."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .errors import BundleError
from .process import run, run_to_log

#: Root of the project's checkout.
PROJECT = Path(__file__).resolve().parents[2]

#: The lock file of everything that is installed into the virtual environment.
REQUIREMENTS = PROJECT / "locks" / "controller-requirements.txt"

_DEFAULT_MIRROR = "http://deb.debian.org/debian"
_DEFAULT_SECURITY = "http://deb.debian.org/debian-security"
_OLDEST_PYTHON = (3, 11)
_CARRIED_APT_OPTIONS = re.compile(
    r"Acquire::(?:https?::Proxy(?:::[A-Za-z0-9.-]+)?|Check-Valid-Until|Check-Date)\Z", re.IGNORECASE
)


def state_dir() -> Path:
    """Return the directory of everything the bundle keeps on this machine, made when absent.

    Raises:
        BundleError: it cannot be made, or this user may not write there.
    """
    chosen = os.environ.get("MEMORY_SANDBOX_STATE", "")
    path = Path(chosen).absolute() if chosen else PROJECT / ".sandbox"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _state_fault(path, error) from error
    return path


def prefix() -> str:
    """Return the prefix of every container, network and volume of this sandbox family.

    Raises:
        BundleError: `MEMORY_SANDBOX` is not usable as one.
    """
    name = os.environ.get("MEMORY_SANDBOX", "") or "memory-sandbox"
    if not re.fullmatch(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?", name):
        raise BundleError(
            f"MEMORY_SANDBOX={name!r} cannot be a name prefix",
            "it begins the names of containers, networks, volumes and host names",
            "use 1 to 32 lowercase letters, digits and inner hyphens, or unset it",
        )
    return name


@contextmanager
def exclusive(state: Path, name: str) -> Iterator[None]:
    """Hold the lock `name` of the state directory, waiting for another command that holds it.

    Raises:
        BundleError: this user may not write in the state directory.
    """
    try:
        handle = (state / f"{name}.lock").open("w")
    except OSError as error:
        raise _state_fault(state, error) from error
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _state_fault(path: Path, error: OSError) -> BundleError:
    return BundleError(
        f"this user cannot write in the state directory {path}: {error.strerror}",
        "keys, caches, logs and the Python environment are kept there; it belongs to whoever ran this first",
        "run the command as that user (with sudo, if it was root), or name another in MEMORY_SANDBOX_STATE",
    )


# Packages


def as_root(argv: Iterable[str]) -> list[str]:
    """Return `argv` such that it runs as root: as it is for root, else through sudo.

    Raises:
        BundleError: this user is not root and there is no sudo.
    """
    words = list(argv)
    if os.geteuid() == 0:
        return words
    if shutil.which("sudo") is None:
        raise BundleError(
            f"{words[0]} needs root, and this user is neither root nor has sudo",
            "system packages and the container engine belong to root",
            "run the command as root, or install and configure sudo",
        )
    return ["sudo", "--", *words]


def missing_packages(names: Iterable[str]) -> list[str]:
    """Return those of the Debian packages `names` that are not installed."""
    _require_apt()
    missing = []
    for name in names:
        answer = run(["dpkg-query", "-W", "-f", "${db:Status-Status}", name], timeout=30, check=False)
        if answer.returncode != 0 or answer.stdout != "installed":
            missing.append(name)
    return missing


def ensure_packages(names: Iterable[str], log: Path) -> list[str]:
    """Install those of the system packages `names` that are missing; return their names.

    The package lists are refreshed only when they do not know a package or the archive no longer serves what
    they name. The configured package sources are used as they are.

    Raises:
        BundleError: no apt here, no way to become root, or apt failed (its output is in `log`).
    """
    missing = missing_packages(names)
    if not missing:
        return []
    if not all(_has_candidate(name) for name in missing):
        _apt(["update"], log)
        unknown = [name for name in missing if not _has_candidate(name)]
        if unknown:
            raise BundleError(
                f"the package sources of this machine have no package {', '.join(unknown)}",
                "the next step needs it, and package sources are never changed by this command",
                "enable the distribution's main (on Ubuntu also universe) component, then run it again",
            )
    try:
        _apt(["install", *missing], log)
    except BundleError:
        _apt(["update"], log)
        _apt(["install", *missing], log)
    return missing


def _require_apt() -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg-query") is None:
        raise BundleError(
            "this machine has no apt",
            "the sandbox sets up what it needs on Debian 12 or 13 and Ubuntu 24.04",
            "run it there; production hosts are managed from any machine with ansible-core and Python 3.11",
        )


def _has_candidate(name: str) -> bool:
    policy = run(["apt-cache", "policy", name], timeout=60, check=False).stdout
    return any(
        line.startswith("  Candidate: ") and not line.endswith("(none)") for line in policy.splitlines()
    )


def _apt(arguments: list[str], log: Path) -> None:
    words = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-y"]
    words += ["-o", "DPkg::Lock::Timeout=300", "--no-install-recommends", *arguments]
    run_to_log(as_root(words), log, timeout=1800)


# The package mirror that managed hosts and images use


@dataclass(frozen=True)
class DebianMirror:
    """Where Debian packages come from: URLs of the main and, when known, of the security archive."""

    main: str
    security: str | None

    def sources(self, suite: str) -> list[str]:
        """Return one-line apt sources for `suite` with its updates."""
        lines = [f"deb {self.main} {suite} main", f"deb {self.main} {suite}-updates main"]
        if self.security:
            lines.append(f"deb {self.security} {suite}-security main")
        return lines


def debian_mirror() -> DebianMirror:
    """Return the Debian mirror this machine's apt uses; Debian's own where it uses none."""
    targets = ""
    if shutil.which("apt-get") is not None:
        fields = "$(REPO_URI)|$(RELEASE)|$(ORIGIN)"
        command = ["apt-get", "indextargets", "--format", fields, "Identifier: Packages"]
        targets = run(command, timeout=60, check=False).stdout
    return parse_mirror(targets)


def parse_mirror(targets: str) -> DebianMirror:
    """Choose the mirror from lines `URL|release|origin` of apt's index targets."""
    main = security = None
    for line in targets.splitlines():
        url, _, rest = line.partition("|")
        release, _, origin = rest.partition("|")
        url = url.rstrip("/")
        if not url.startswith(("http://", "https://")):
            continue
        debian = origin == "Debian" or (not origin and url.endswith(("/debian", "/debian-security")))
        if not debian:
            continue
        if release.endswith("-security"):
            security = security or url
        elif re.fullmatch(r"[a-z]+", release):
            main = main or url
    if main is None:
        return DebianMirror(_DEFAULT_MIRROR, _DEFAULT_SECURITY)
    return DebianMirror(main, security)


def apt_options() -> list[str]:
    """Return the lines of this machine's apt configuration that decide how a mirror is reached."""
    dump = ""
    if shutil.which("apt-config") is not None:
        dump = run(["apt-config", "dump"], timeout=60, check=False).stdout
    return parse_apt_options(dump, os.environ)


def parse_apt_options(dump: str, environ: Mapping[str, str]) -> list[str]:
    """Select proxies and date checks from apt's configuration; proxies also from the environment."""
    options = {}
    for line in dump.splitlines():
        name, _, value = line.partition(" ")
        if _CARRIED_APT_OPTIONS.match(name) and value not in ('"";', ""):
            options[name] = value
    for scheme in ("http", "https"):
        name = f"Acquire::{scheme}::Proxy"
        proxy = environ.get(f"{scheme}_proxy") or environ.get(f"{scheme.upper()}_PROXY")
        if proxy and '"' not in proxy and name not in options:
            options[name] = f'"{proxy}";'
    return [f"{name} {value}" for name, value in sorted(options.items())]


# The virtual environment


@dataclass(frozen=True)
class Venv:
    """The virtual environment of the controller."""

    path: Path

    def program(self, name: str) -> str:
        """Return the path of the program `name` in it."""
        return str(self.path / "bin" / name)

    def environment(self) -> dict[str, str]:
        """Return the caller's environment with this virtual environment in front of PATH."""
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONHOME", "PYTHONPATH", "MOLECULE_EPHEMERAL_DIRECTORY")
        }
        environment["LC_ALL"] = "C.UTF-8"
        environment["VIRTUAL_ENV"] = str(self.path)
        environment["PATH"] = f"{self.path / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        return environment


def choose_python(log: Path) -> str:
    """Return the path of the newest Python here that can make the virtual environment.

    Tried in this order: `MEMORY_PYTHON` alone when set; else python3.13, python3.12 and the running one. A
    program that does not really run (a version manager's stand-in, for example) is passed over.

    Raises:
        BundleError: none of them can.
    """
    chosen = os.environ.get("MEMORY_PYTHON", "")
    if chosen:
        path = shutil.which(chosen)
        if path is not None and _can_make_venv(path):
            return path
        raise BundleError(
            f"MEMORY_PYTHON={chosen} is not a Python 3.11 or newer with the modules venv, ensurepip and ssl",
            "the virtual environment of Ansible and the tests is made with it",
            "name another interpreter, or unset MEMORY_PYTHON",
        )
    candidates = [shutil.which("python3.13"), shutil.which("python3.12"), sys.executable]
    for candidate in candidates:
        if candidate and _can_make_venv(candidate):
            return candidate
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if sys.version_info[:2] >= _OLDEST_PYTHON and os.path.realpath(sys.executable).startswith("/usr/bin/"):
        ensure_packages([f"python{version}-venv"], log)
        if _can_make_venv(sys.executable):
            return sys.executable
    raise BundleError(
        f"no Python here can make a virtual environment (running: {sys.executable}, {version})",
        "Ansible and the tests are installed into one, so that the system's own Python stays as it is",
        "install Python 3.11 or newer with its venv module, or name one in MEMORY_PYTHON",
    )


def _can_make_venv(python: str) -> bool:
    check = f"import ensurepip, ssl, sys, venv; sys.exit(sys.version_info[:2] < {_OLDEST_PYTHON!r})"
    try:
        return run([python, "-I", "-c", check], timeout=60, check=False).returncode == 0
    except BundleError:
        return False


def ensure_venv(state: Path) -> Venv:
    """Make the virtual environment as the lock file says, or find that it is so already.

    An environment of another lock or another Python, or one whose making was interrupted, is made anew.

    Raises:
        BundleError: no usable Python, or the packages could not be installed (output in logs/venv.log).
    """
    log = state / "logs" / "venv.log"
    path = state / "venv"
    ready = path / "ready"
    with exclusive(state, "venv"):
        python = choose_python(log)
        version = run([python, "-I", "-c", "import sys; print(sys.version)"], timeout=60).stdout
        key = hashlib.sha256(
            REQUIREMENTS.read_bytes() + f"\n{os.path.realpath(python)}\n{version}\n{path}".encode()
        ).hexdigest()
        if (path / "bin" / "python").exists() and ready.is_file() and ready.read_text() == key:
            return Venv(path)
        shutil.rmtree(path, ignore_errors=True)
        run_to_log([python, "-I", "-m", "venv", str(path)], log, timeout=300)
        install = [str(path / "bin" / "python"), "-m", "pip", "install", "--require-hashes", "--no-compile"]
        install += ["--no-input", "--disable-pip-version-check", "--requirement", str(REQUIREMENTS)]
        run_to_log(install, log, timeout=1800)
        ready.write_text(key)
        return Venv(path)
