"""The sandbox: one managed host with the whole stack, from nothing to a memory service that answers."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import controller, engine, hosts, localregistry
from .controller import PROJECT, Venv
from .errors import BundleError
from .process import run, run_to_log

#: Alias and name of the principal that the sandbox's inventory declares.
ALIAS = "memory.sandbox"
PRINCIPAL = "sandbox"

_AUTHORITY_ON_HOST = "/etc/memory/edge/ca.crt"
_DEVICE_KEY_ON_HOST = f"/etc/memory/device-keys/{PRINCIPAL}.key"
_BUILD_SECONDS = 3600.0
_PLAYBOOK_SECONDS = 3600.0


class Progress:
    """Numbered progress lines on standard error, with the seconds since the start."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._step = 0
        self._start = time.monotonic()

    def step(self, text: str) -> None:
        """Begin the next numbered step."""
        self._step += 1
        self._print(f"{self._step}/{self._steps}", text)

    def note(self, text: str) -> None:
        """Say something within the step."""
        self._print("", text)

    def _print(self, number: str, text: str) -> None:
        elapsed = time.monotonic() - self._start
        print(f"{number:>4} [{elapsed:6.1f}s] {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Sandbox:
    """A sandbox family: its prefix and its state directory."""

    prefix: str
    state: Path

    @classmethod
    def from_environment(cls) -> Sandbox:
        """Return the sandbox that `MEMORY_SANDBOX` and `MEMORY_SANDBOX_STATE` name, or the default one."""
        return cls(controller.prefix(), controller.state_dir())

    @property
    def host_name(self) -> str:
        """Container name of the managed host."""
        return f"{self.prefix}-host"

    @property
    def lock_file(self) -> Path:
        """The image lock that the sandbox deploys."""
        return self.state / "images.lock.json"

    @property
    def authority(self) -> Path:
        """Certificate authority of the edge, on this machine."""
        return self.state / "client" / "ca.crt"

    @property
    def device_key(self) -> Path:
        """Device key of the sandbox's principal, on this machine."""
        return self.state / "client" / "device.key"

    def log(self, name: str) -> Path:
        """Return the log file `name` of the state directory."""
        return self.state / "logs" / f"{name}.log"

    def host(self) -> hosts.Host | None:
        """Return the managed host as the engine sees it, or None."""
        found = [host for host in hosts.list_hosts(self.prefix) if host.name == self.host_name]
        return found[0] if found else None

    def url(self, address: str) -> str:
        """Return the https origin of the edge at `address`."""
        return f"https://{address}"


PREPARATION_STEPS = 5


def prepare(sandbox: Sandbox, progress: Progress) -> Venv:
    """Provide everything but hosts: packages, virtual environment, engine, network, host image, images, lock.

    It takes `PREPARATION_STEPS` steps of `progress`. What is there already is kept.
    """
    progress.step("system packages")
    installed = controller.ensure_packages(hosts.CONTROLLER_PACKAGES, sandbox.log("packages"))
    if installed:
        progress.note(f"installed {', '.join(installed)}")
    progress.step("Python environment of Ansible and the tests")
    venv = controller.ensure_venv(sandbox.state)
    progress.step("Docker Engine")
    progress.note(f"version {engine.ensure_engine(sandbox.state)} answers")
    progress.step("network and base image of managed hosts")
    with controller.exclusive(sandbox.state, "hosts"):
        network = hosts.ensure_network(sandbox.prefix)
    progress.note(
        f"network {network.name} is {network.subnet}, image {hosts.ensure_host_image(sandbox.state)}"
    )
    progress.step("container images, their registry and their lock (the first time takes minutes)")
    build = [sys.executable, str(PROJECT / "scripts" / "images"), "build", "--output", str(sandbox.lock_file)]
    run_to_log(
        build, sandbox.log("images"), env=_environment(sandbox), timeout=_BUILD_SECONDS, on_line=progress.note
    )
    return venv


def up(sandbox: Sandbox) -> None:
    """Bring the sandbox up, or bring what is there up to date; safe to repeat and after an interruption."""
    progress = Progress(PREPARATION_STEPS + 3)
    venv = prepare(sandbox, progress)
    progress.step(f"managed host {sandbox.host_name}")
    with controller.exclusive(sandbox.state, "hosts"):
        network = hosts.ensure_network(sandbox.prefix)
        address = hosts.choose_address(sandbox.host_name, network, hosts.SANDBOX_INDEX)
        image = hosts.ensure_host_image(sandbox.state)
        host = hosts.create_host(sandbox.host_name, address, network, image, sandbox.state)
    progress.note(f"systemd is running at {host.address}")
    progress.step("ansible-playbook -i inventories/sandbox playbooks/site.yml")
    run_to_log(
        playbook_command(venv, PROJECT / "playbooks" / "site.yml", []),
        sandbox.log("site"),
        env={**_environment(sandbox), **venv.environment(), **_ansible_environment(sandbox)},
        cwd=PROJECT,
        timeout=_PLAYBOOK_SECONDS,
        on_line=_role_lines(progress.note),
    )
    progress.step("certificate authority and device key for a client on this machine")
    _fetch_client_files(sandbox)
    progress.note("the memory service answers; next:")
    print(
        '\n  eval "$(./scripts/sandbox env)"        # MEMORY_URL, _CA, _ALIAS, _KEY_FILE, _HOST for clients\n'
        "  ./scripts/sandbox status\n"
        "  ./scripts/sandbox shell                # root on the managed host\n"
        "  ./scripts/sandbox playbook site.yml    # changes nothing on a converged host\n"
        "  ./scripts/sandbox down\n",
        file=sys.stderr,
    )


def down(sandbox: Sandbox, purge: bool, say: Callable[[str], None]) -> None:
    """Remove every container, volume and network of the sandbox family; with `purge` the state directory too.

    Args:
        sandbox: the family.
        purge: also remove cache, virtual environment, keys and the base image of hosts.
        say: receives one line per thing removed or deliberately kept.
    """
    if engine.version() is None and not engine.installed():
        say("no container engine on this machine, so nothing of the sandbox runs")
    else:
        engine.ensure_engine(sandbox.state)
        _remove_containers(sandbox, say)
        if purge:
            for image in _listed(
                "image", "ls", hosts.IMAGE_REPOSITORY, "--format", "{{.Repository}}:{{.Tag}}"
            ):
                answer = run(["docker", "image", "rm", image], timeout=120, check=False)
                say(f"removed image {image}" if answer.returncode == 0 else f"kept image {image}: in use")
    shutil.rmtree(sandbox.state / "client", ignore_errors=True)
    if engine.stop_engine_if_ours(sandbox.state):
        say("stopped the Docker Engine that the sandbox had started")
    if purge:
        _purge_state(sandbox, say)
    else:
        say(f"kept {sandbox.state} (cache, Python environment, logs); `down --purge` removes it too")


def status(sandbox: Sandbox) -> dict[str, Any]:
    """Return what is there as plain data; `ready` tells whether a client can use the service."""
    found: dict[str, Any] = {
        "prefix": sandbox.prefix,
        "state_directory": str(sandbox.state),
        "engine": engine.version(),
        "network": None,
        "registry": None,
        "host": None,
        "containers": [],
        "url": None,
        "ready": False,
    }
    if found["engine"] is None:
        return found
    network = hosts.find_network(sandbox.prefix)
    found["network"] = str(network.subnet) if network else None
    registry = localregistry.container_name(sandbox.prefix)
    answer = run(["docker", "inspect", "-f", "{{.State.Status}}", registry], timeout=30, check=False)
    found["registry"] = answer.stdout.strip() if answer.returncode == 0 else None
    host = sandbox.host()
    if host is None:
        return found
    found["host"] = {"name": host.name, "address": host.address, "state": host.state}
    if host.state == "running":
        found["containers"] = _containers_on(host.name)
    found["url"] = sandbox.url(host.address)
    found["ready"] = (
        bool(found["containers"])
        and all(
            item["state"] == "running" and item["health"] in ("healthy", "") for item in found["containers"]
        )
        and sandbox.device_key.is_file()
    )
    return found


def environment_lines(sandbox: Sandbox) -> list[str]:
    """Return the `export` lines a client on this machine needs.

    Raises:
        BundleError: the sandbox is not up.
    """
    host = require_host(sandbox)
    if not (sandbox.authority.is_file() and sandbox.device_key.is_file()):
        raise _not_up("the certificate authority and the device key are not on this machine yet")
    values = {
        "MEMORY_URL": sandbox.url(host.address),
        "MEMORY_CA": str(sandbox.authority),
        "MEMORY_ALIAS": ALIAS,
        "MEMORY_KEY_FILE": str(sandbox.device_key),
        "MEMORY_HOST": host.name,
    }
    return [f"export {name}={shlex.quote(value)}" for name, value in values.items()]


def require_host(sandbox: Sandbox) -> hosts.Host:
    """Return the running managed host.

    Raises:
        BundleError: there is none.
    """
    host = sandbox.host() if engine.version() is not None else None
    if host is None or host.state != "running":
        raise _not_up(f"the managed host {sandbox.host_name} does not run")
    return host


def run_playbook(sandbox: Sandbox, name: str, arguments: list[str]) -> None:
    """Become `ansible-playbook` for playbooks/`name` on the sandbox; returns only by raising.

    Raises:
        BundleError: no such playbook, or the sandbox is not up.
    """
    book = PROJECT / "playbooks" / name
    if Path(name).name != name or not book.is_file():
        known = ", ".join(sorted(path.name for path in (PROJECT / "playbooks").glob("*.yml")))
        raise BundleError(
            f"there is no playbook {name}",
            "playbooks are taken from the directory playbooks by their file name",
            f"name one of: {known}",
        )
    require_host(sandbox)
    venv = controller.ensure_venv(sandbox.state)
    words = playbook_command(venv, book, arguments)
    environment = {**_environment(sandbox), **venv.environment(), **_ansible_environment(sandbox)}
    os.execve(words[0], words, environment)


def open_shell(sandbox: Sandbox, command: list[str]) -> None:
    """Become a root shell on the managed host, or `command` there; returns only by raising.

    Raises:
        BundleError: the sandbox is not up.
    """
    host = require_host(sandbox)
    terminal = ["--interactive", "--tty"] if sys.stdin.isatty() and sys.stdout.isatty() else ["--interactive"]
    words = ["docker", "exec", *terminal, "--workdir", "/root", host.name, *(command or ["bash", "--login"])]
    os.execvp(words[0], words)


def playbook_command(venv: Venv, book: Path, arguments: list[str]) -> list[str]:
    """Return the command line that runs a playbook against the sandbox."""
    inventory = str(PROJECT / "inventories" / "sandbox")
    return [venv.program("ansible-playbook"), "-i", inventory, str(book), *arguments]


def _environment(sandbox: Sandbox) -> dict[str, str]:
    return {**os.environ, "MEMORY_SANDBOX": sandbox.prefix, "MEMORY_SANDBOX_STATE": str(sandbox.state)}


def _ansible_environment(sandbox: Sandbox) -> dict[str, str]:
    return {
        "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"),
        "MEMORY_SANDBOX": sandbox.prefix,
        "MEMORY_SANDBOX_STATE": str(sandbox.state),
    }


def _role_lines(say: Callable[[str], None]) -> Callable[[str], None]:
    """Return a listener that says which role a playbook's output has come to, and its recap."""
    current = ""
    recap = False

    def listen(line: str) -> None:
        nonlocal current, recap
        if line.startswith("PLAY RECAP"):
            recap = True
        elif recap and line.strip():
            say(" ".join(line.split()))
        elif line.startswith("TASK [") and " : " in line:
            role = line.removeprefix("TASK [").partition(" : ")[0]
            if role != current:
                current = role
                say(f"role {role}")

    return listen


def _fetch_client_files(sandbox: Sandbox) -> None:
    directory = sandbox.state / "client"
    directory.mkdir(mode=0o700, exist_ok=True)
    directory.chmod(0o700)
    for source, target in (
        (_AUTHORITY_ON_HOST, sandbox.authority),
        (_DEVICE_KEY_ON_HOST, sandbox.device_key),
    ):
        text = run(["docker", "exec", sandbox.host_name, "cat", source], timeout=30).stdout
        partial = target.with_name(f".{target.name}.new")
        partial.touch(mode=0o600)
        partial.write_text(text)
        partial.replace(target)


def _containers_on(host: str) -> list[dict[str, str]]:
    words = ["docker", "exec", host, "docker", "ps", "--all", "--format", "{{json .}}"]
    answer = run(words, timeout=60, check=False)
    containers = []
    for line in answer.stdout.splitlines() if answer.returncode == 0 else ():
        data = json.loads(line)
        if data["Status"].startswith("Exited (0)"):
            continue
        _, opened, rest = data["Status"].rpartition("(")
        health = rest.rstrip(")").removeprefix("health: ") if opened and data["State"] == "running" else ""
        containers.append({"name": data["Names"], "state": data["State"], "health": health})
    return sorted(containers, key=lambda item: item["name"])


def _remove_containers(sandbox: Sandbox, say: Callable[[str], None]) -> None:
    for host in hosts.list_hosts(sandbox.prefix):
        hosts.destroy_host(host.name, sandbox.prefix, sandbox.state)
        say(f"removed managed host {host.name} with its data")
    registry = localregistry.container_name(sandbox.prefix)
    if registry in _listed("ps", "--all", "--format", "{{.Names}}") or registry in _listed(
        "volume", "ls", "--format", "{{.Name}}"
    ):
        localregistry.remove(sandbox.prefix)
        say(f"removed registry {registry} with its storage")
    for image in _listed("image", "ls", "--format", "{{.Repository}}:{{.Tag}}", f"{registry}*"):
        run(["docker", "image", "rm", image], timeout=120)
        say(f"removed image {image}")
    label = f"label={hosts.LABEL}={sandbox.prefix}"
    for name in _listed("ps", "--all", "--filter", label, "--format", "{{.Names}}"):
        run(["docker", "rm", "--force", "--volumes", name], timeout=180)
        say(f"removed container {name}")
    for name in _listed("volume", "ls", "--filter", label, "--format", "{{.Name}}"):
        run(["docker", "volume", "rm", name], timeout=180)
        say(f"removed volume {name}")
    for name in _listed("network", "ls", "--filter", label, "--format", "{{.Name}}"):
        run(["docker", "network", "rm", name], timeout=60)
        say(f"removed network {name}")


def _listed(*words: str) -> list[str]:
    return run(["docker", *words], timeout=60).stdout.split()


def _purge_state(sandbox: Sandbox, say: Callable[[str], None]) -> None:
    if engine.started_by_us(sandbox.state) is not None:
        say(f"kept {sandbox.state}: it holds the record of the Docker Engine that other containers still use")
        return
    shutil.rmtree(sandbox.state)
    say(f"removed {sandbox.state}")


def _not_up(what: str) -> BundleError:
    return BundleError(
        what,
        "this command works on a sandbox that is up",
        "bring it up with `./scripts/sandbox up` and run the command again",
    )
