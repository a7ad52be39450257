"""Managed hosts for the sandbox and the tests: Debian with systemd and a container engine, in a container.

Everything made here carries the label `memory-bundle.prefix`, and nothing without it is ever removed.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .controller import PROJECT, DebianMirror, apt_options, as_root, debian_mirror, exclusive
from .errors import BundleError
from .process import run, run_to_log

SUITE = "trixie"
LABEL = "memory-bundle.prefix"
ROLE_LABEL = "memory-bundle.role"
IMAGE_REPOSITORY = "memory-bundle/host"
REGISTRY_NAME = "registry.memory.test"

#: Position of addresses in the network.
REGISTRY_INDEX = 2
SANDBOX_INDEX = 10
FIRST_TEST_INDEX = 20

_RANGE = ipaddress.IPv4Network("10.213.0.0/16")
_SOURCES = PROJECT / "images" / "host"
_PACKAGES = (
    "ca-certificates",
    "curl",
    "dbus",
    "iproute2",
    "iptables",
    "libpam-systemd",
    "openssh-server",
    "procps",
    "python3",
    "python3-apt",
    "sudo",
    "systemd",
    "systemd-sysv",
)
_UNSHIPPED = ("/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/man/*")
_KEYRINGS = (
    "/usr/share/keyrings/debian-archive-keyring.pgp",
    "/usr/share/keyrings/debian-archive-keyring.gpg",
)

#: Packages of the controller that programs used here and by clients of the sandbox come from.
CONTROLLER_PACKAGES = ("ca-certificates", "curl", "debian-archive-keyring", "mmdebstrap", "openssh-client")

# What a privileged container has, minus what some machines lack: there the engine cannot give "all".
_NARROW_FLAGS = (
    "--cap-add=ALL",
    "--cap-drop=SYS_RESOURCE",
    "--security-opt=seccomp=unconfined",
    "--security-opt=apparmor=unconfined",
    "--security-opt=systempaths=unconfined",
    "--device-cgroup-rule=a *:* rwm",
)
_HOST_FLAGS = (
    "--cgroupns=private",
    "--stop-signal=SIGRTMIN+3",
    "--pull=never",
    "--tmpfs=/run:exec",
    "--tmpfs=/run/lock",
    "--tmpfs=/tmp:exec",
)
_INIT = "/usr/local/sbin/memory-host-init"

# What images/host/init gives up: the clock and the kernel modules are the machine's.
_GIVEN_UP = "-sys_time,-sys_module"

_BOOT_SECONDS = 90.0


@dataclass(frozen=True)
class Network:
    """The bridge network of a sandbox family."""

    name: str
    subnet: ipaddress.IPv4Network

    @property
    def gateway(self) -> str:
        """Address of the machine itself in the network."""
        return self.address(1)

    def address(self, index: int) -> str:
        """Return the address at position `index` (1 to 254)."""
        if not 1 <= index <= 254:
            raise BundleError(
                f"address index {index} is outside the network {self.subnet}",
                "a managed host has a fixed address in it",
                "give an index from 20 to 254",
            )
        return str(self.subnet.network_address + index)


@dataclass(frozen=True)
class Host:
    """A managed host. `state` is the engine's word for it: running, exited, created..."""

    name: str
    address: str
    state: str


# Network


def ensure_network(prefix: str) -> Network:
    """Return the network called `prefix`, made when absent in a range that nothing here uses.

    Raises:
        BundleError: a network of that name is not ours, or no range is free.
    """
    found = find_network(prefix)
    if found is not None:
        return found
    subnet = free_subnet(_used_ranges())
    network = Network(prefix, subnet)
    create = ["docker", "network", "create", "--driver", "bridge", "--label", f"{LABEL}={prefix}"]
    create += ["--subnet", str(subnet), "--gateway", network.gateway, prefix]
    run(create, timeout=60)
    return network


def find_network(prefix: str) -> Network | None:
    """Return the network called `prefix`, or None when there is none.

    Raises:
        BundleError: a network of that name exists and is not ours.
    """
    names = run(["docker", "network", "ls", "--format", "{{.Name}}"], timeout=60).stdout.split()
    if prefix not in names:
        return None
    (data,) = json.loads(run(["docker", "network", "inspect", prefix], timeout=60).stdout)
    if (data["Labels"] or {}).get(LABEL) != prefix:
        raise _foreign("network", prefix)
    return Network(prefix, ipaddress.IPv4Network(data["IPAM"]["Config"][0]["Subnet"]))


def free_subnet(used: Iterable[ipaddress.IPv4Network]) -> ipaddress.IPv4Network:
    """Return the first /24 of the sandbox range that overlaps none of `used`.

    Raises:
        BundleError: there is none.
    """
    taken = list(used)
    for subnet in _RANGE.subnets(new_prefix=24):
        if not any(subnet.overlaps(other) for other in taken):
            return subnet
    raise BundleError(
        f"no /24 of {_RANGE} is free on this machine",
        "managed hosts need a network of their own that no route and no container network uses",
        "remove unused container networks (`docker network prune`) or run it on another machine",
    )


def _used_ranges() -> list[ipaddress.IPv4Network]:
    used = parse_routes(Path("/proc/net/route").read_text())
    identifiers = run(["docker", "network", "ls", "--quiet"], timeout=60).stdout.split()
    for data in json.loads(run(["docker", "network", "inspect", *identifiers], timeout=60).stdout):
        for config in data["IPAM"]["Config"] or []:
            subnet = ipaddress.ip_network(config["Subnet"])
            if isinstance(subnet, ipaddress.IPv4Network):
                used.append(subnet)
    return used


def parse_routes(table: str) -> list[ipaddress.IPv4Network]:
    """Return the destinations of the kernel's IPv4 routing table, the default route left out."""
    networks = []
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 8:
            continue
        destination, mask = (int.from_bytes(bytes.fromhex(fields[n])[::-1], "big") for n in (1, 7))
        if mask:
            networks.append(ipaddress.IPv4Network((destination, mask.bit_count())))
    return networks


# Image


def ensure_host_image(state: Path) -> str:
    """Return the tag of the managed host's image, built when absent.

    It is a plain Debian with systemd and ssh, without a container engine: installing that is a role's work.
    The tag carries the hash of everything that goes in, so a change of any of it makes a new image.

    Raises:
        BundleError: the file system could not be made (output in logs/host-image.log).
    """
    log = state / "logs" / "host-image.log"
    mirror = debian_mirror()
    options = apt_options()
    tag = f"{IMAGE_REPOSITORY}:{SUITE}-{_image_hash(mirror, options)}"
    with exclusive(state, "host-image"):
        if run(["docker", "image", "inspect", tag], timeout=60, check=False).returncode == 0:
            return tag
        archive = state / "host-image.tar"
        words = ["mmdebstrap", "--quiet", "--variant=apt", f"--include={','.join(_PACKAGES)}"]
        words += [f"--keyring={_keyring()}", "--dpkgopt=force-unsafe-io", "--skip=cleanup/apt/lists"]
        words += [f"--dpkgopt=path-exclude={pattern}" for pattern in _UNSHIPPED]
        words += [f"--aptopt={option}" for option in options]
        words += [f"--customize-hook={_SOURCES / 'customize'}"]
        words += [SUITE, str(archive), *mirror.sources(SUITE)]
        try:
            run_to_log(as_root(words), log, timeout=1800)
            run(
                ["docker", "import", "--change", f"CMD {json.dumps([_INIT])}", str(archive), tag], timeout=600
            )
        finally:
            archive.unlink(missing_ok=True)
    return tag


def _image_hash(mirror: DebianMirror, options: list[str]) -> str:
    digest = hashlib.sha256()
    digest.update(json.dumps([SUITE, _PACKAGES, _UNSHIPPED, mirror.sources(SUITE), options]).encode())
    local_authorities = Path("/usr/local/share/ca-certificates")
    for file in [*sorted(_SOURCES.iterdir()), *sorted(local_authorities.rglob("*.crt"))]:
        digest.update(f"\n{file.name}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _keyring() -> str:
    for path in _KEYRINGS:
        if Path(path).exists():
            return path
    raise BundleError(
        "the keyring of the Debian archive is not on this machine",
        "the packages of a managed host are verified with it",
        "install the package debian-archive-keyring",
    )


# Hosts


def create_host(name: str, address: str, network: Network, image: str, state: Path) -> Host:
    """Make the managed host `name` and wait until systemd is up; a host that exists is started and kept.

    Root may log in over ssh with the key of the state directory; the host's key is recorded there as known.

    Raises:
        BundleError: the name is taken by something else, or the host does not boot or answer on ssh.
    """
    with exclusive(state, "ssh"):
        public_key = _ensure_ssh_key(state)
    existing = _inspect(name, network.name)
    if existing is None:
        _run_host(name, address, network, image)
    elif existing.address != address:
        raise BundleError(
            f"the host {name} exists with the address {existing.address}, not {address}",
            "its certificate and the inventory name that address",
            f"remove it (`scripts/hosts destroy {name}`) and run the command again",
        )
    elif existing.state != "running":
        run(["docker", "start", name], timeout=60)
    _wait_for_boot(name)
    _authorize(name, public_key)
    _record(state, name, address, _host_key(name))
    _wait_for_ssh(state, name)
    return Host(name, address, "running")


def destroy_host(name: str, network: str, state: Path) -> bool:
    """Remove the managed host `name` with its volume; tell whether there was anything to remove.

    Raises:
        BundleError: the container or the volume of that name is not ours.
    """
    existing = _inspect(name, network)
    if existing is not None:
        run(["docker", "rm", "--force", "--volumes", name], timeout=180)
    volume = remove_volume(f"{name}-docker", network)
    _record(state, name, None)
    return existing is not None or volume


def remove_volume(name: str, prefix: str) -> bool:
    """Remove the volume `name` if it exists; tell whether it did.

    Raises:
        BundleError: it exists and is not ours.
    """
    answer = run(["docker", "volume", "inspect", name], timeout=60, check=False)
    if answer.returncode != 0:
        return False
    (data,) = json.loads(answer.stdout)
    if (data["Labels"] or {}).get(LABEL) != prefix:
        raise _foreign("volume", name)
    run(["docker", "volume", "rm", name], timeout=180)
    return True


def list_hosts(prefix: str) -> list[Host]:
    """Return the managed hosts of `prefix`, by name."""
    words = ["docker", "ps", "--all", "--format", "{{.Names}}"]
    words += ["--filter", f"label={LABEL}={prefix}", "--filter", f"label={ROLE_LABEL}=host"]
    names = sorted(run(words, timeout=60).stdout.split())
    return [host for host in (_inspect(name, prefix) for name in names) if host is not None]


def choose_address(name: str, network: Network, index: int | None = None) -> str:
    """Return the address for the host `name`: the one it has, else that of `index`, else the first free one.

    Raises:
        BundleError: another host holds the address of `index`, or none is free.
    """
    taken = {host.address: host.name for host in list_hosts(network.name)}
    if index is None:
        for address, holder in taken.items():
            if holder == name:
                return address
        for candidate in range(FIRST_TEST_INDEX, 255):
            if network.address(candidate) not in taken:
                return network.address(candidate)
    elif taken.get(network.address(index), name) == name:
        return network.address(index)
    raise BundleError(
        f"the network {network.name} has no free address for the host {name}",
        "every managed host has a fixed one of its own",
        "remove hosts that are no longer needed (`scripts/hosts list`, `scripts/hosts destroy NAME`)",
    )


def _inspect(name: str, prefix: str) -> Host | None:
    answer = run(["docker", "container", "inspect", name], timeout=60, check=False)
    if answer.returncode != 0:
        return None
    (data,) = json.loads(answer.stdout)
    if (data["Config"]["Labels"] or {}).get(LABEL) != prefix:
        raise _foreign("container", name)
    networks = data["NetworkSettings"]["Networks"]
    fixed = (networks.get(prefix) or {}).get("IPAMConfig") or {}
    return Host(name, fixed.get("IPv4Address", ""), data["State"]["Status"])


def _foreign(kind: str, name: str) -> BundleError:
    return BundleError(
        f"a {kind} named {name} exists that was not made by this sandbox",
        "it may be in use, so it is neither used nor removed",
        "choose another prefix with MEMORY_SANDBOX, or rename or remove it yourself",
    )


def _run_host(name: str, address: str, network: Network, image: str) -> None:
    labels = ["--label", f"{LABEL}={network.name}", "--label", f"{ROLE_LABEL}=host"]
    volume = f"{name}-docker"
    run(["docker", "volume", "create", *labels[:2], volume], timeout=60)
    words = ["docker", "run", "--detach", "--name", name, "--hostname", name, *labels, *_HOST_FLAGS]
    words += [*_privilege_flags(image), "--volume", f"{volume}:/var/lib/docker"]
    words += ["--network", network.name, "--ip", address]
    words += ["--add-host", f"{REGISTRY_NAME}:{network.address(REGISTRY_INDEX)}", image, _INIT]
    try:
        run(words, timeout=120)
    except BundleError:
        run(["docker", "rm", "--force", name], timeout=60, check=False)
        raise


def _privilege_flags(image: str) -> tuple[str, ...]:
    probe = ["docker", "run", "--rm", "--privileged", "--network", "none", "--pull", "never", image, "true"]
    if run(probe, timeout=120, check=False).returncode == 0:
        return ("--privileged",)
    return _NARROW_FLAGS


def _wait_for_boot(name: str) -> None:
    deadline = time.monotonic() + _BOOT_SECONDS
    state = "not answering"
    while time.monotonic() < deadline:
        words = ["docker", "exec", name, "systemctl", "is-system-running", "--wait"]
        answer = run(words, timeout=_BOOT_SECONDS, check=False)
        state = answer.stdout.strip() or state
        if state == "running":
            return
        if state == "degraded":
            failed = run(
                ["docker", "exec", name, "systemctl", "--failed", "--plain"], timeout=30, check=False
            )
            raise BundleError(
                f"systemd on the host {name} is degraded",
                "a host with failed units proves nothing about a real one:\n    " + failed.stdout.strip(),
                f"look at it with `docker exec -it {name} journalctl -b`, then destroy and create it again",
            )
        running = run(["docker", "inspect", "-f", "{{.State.Running}}", name], timeout=30, check=False)
        if running.stdout.strip() != "true":
            break
        time.sleep(0.2)
    logs = run(["docker", "logs", "--tail", "15", name], timeout=30, check=False)
    raise BundleError(
        f"systemd on the host {name} did not come up (last state: {state})",
        "nothing can be deployed to it; its last output was:\n    " + (logs.stdout + logs.stderr).strip(),
        "check that the Docker Engine of this machine allows privileged containers (rootless ones do not)",
    )


# SSH


def _ensure_ssh_key(state: Path) -> str:
    directory = state / "ssh"
    directory.mkdir(mode=0o700, exist_ok=True)
    directory.chmod(0o700)
    key = directory / "id_ed25519"
    if not key.with_suffix(".pub").is_file() or not key.is_file():
        key.unlink(missing_ok=True)
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "sandbox", "-f", str(key)], timeout=60)
    return key.with_suffix(".pub").read_text()


def _record(state: Path, name: str, address: str | None, host_key: str = "") -> None:
    """Note address and host key of a host, or forget it: `hosts.json`, `ssh/known_hosts` and `ssh/config`."""
    with exclusive(state, "ssh"):
        directory = state / "ssh"
        if not directory.is_dir():
            return
        index, known = state / "hosts.json", directory / "known_hosts"
        addresses: dict[str, str] = json.loads(index.read_text()) if index.exists() else {}
        addresses = {key: value for key, value in addresses.items() if key != name and value != address}
        lines = known.read_text().splitlines() if known.exists() else []
        gone = {name, address}
        lines = [line for line in lines if gone.isdisjoint(line.split(" ", 1)[0].split(","))]
        if address is not None:
            addresses[name] = address
            lines.append(f"{name},{address} {host_key}")
        _replace(index, json.dumps(addresses, indent=2, sort_keys=True) + "\n")
        _replace(known, "".join(f"{line}\n" for line in lines))
        _replace(directory / "config", ssh_config(directory, addresses))


def ssh_config(directory: Path, names: Iterable[str]) -> str:
    """Return the ssh client configuration with which the managed hosts `names` are reached."""
    key, known = (str(directory / file).replace("%", "%%") for file in ("id_ed25519", "known_hosts"))
    # A managed host listens on nothing of its own: each session starts a server through the outer engine, with
    # the capabilities that the host's first process keeps.
    server = f"setpriv --bounding-set={_GIVEN_UP} /usr/sbin/sshd -i"
    blocks = [f"Host {name}\n  ProxyCommand docker exec -i {name} {server}\n" for name in sorted(names)]
    blocks.append(
        "Host *\n"
        "  User root\n"
        f'  IdentityFile "{key}"\n'
        "  IdentitiesOnly yes\n"
        "  IdentityAgent none\n"
        f'  UserKnownHostsFile "{known}"\n'
        "  GlobalKnownHostsFile /dev/null\n"
        "  StrictHostKeyChecking yes\n"
        "  PreferredAuthentications publickey\n"
        "  ConnectTimeout 10\n"
        "  ServerAliveInterval 15\n"
    )
    return "".join(blocks)


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.new")
    partial.touch(mode=0o600)
    partial.write_text(text)
    partial.replace(path)


def _authorize(name: str, public_key: str) -> None:
    script = "ssh-keygen -A >/dev/null && umask 077 && mkdir -p /root/.ssh && cat >/root/.ssh/authorized_keys"
    run(["docker", "exec", "-i", name, "sh", "-c", script], stdin=public_key, timeout=30)


def _host_key(name: str) -> str:
    words = ["docker", "exec", name, "cat", "/etc/ssh/ssh_host_ed25519_key.pub"]
    return " ".join(run(words, timeout=30).stdout.split()[:2])


def _wait_for_ssh(state: Path, name: str) -> None:
    ssh = ["ssh", "-F", str(state / "ssh" / "config"), "-o", "BatchMode=yes", name, "true"]
    deadline = time.monotonic() + 30
    while True:
        answer = run(ssh, timeout=30, check=False)
        if answer.returncode == 0:
            return
        if time.monotonic() > deadline:
            raise BundleError(
                f"the host {name} runs but does not answer ssh: {answer.stderr.strip()}",
                "Ansible reaches it that way, through `docker exec`",
                f"look at `docker exec {name} /usr/sbin/sshd -t`, and at the log of the host: `docker logs {name}`",
            )
        time.sleep(0.5)
