#!/usr/bin/python
"""Ansible module that gathers, in one call, everything that the preflight has to know of a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: memory_probe
short_description: Describe a host before anything is changed on it
description:
  - Gathers in one call what the preflight of the memory service decides on. Nothing on the host is changed.
  - A container engine that is absent or stopped is reported, not an error.
  - Each address and port is tried by a bind that is closed at once.
options:
  project:
    description: Name of the Compose project of the memory service.
    type: str
    default: ""
  volume:
    description: Name of the database volume.
    type: str
    default: ""
  subnet:
    description: Network (CIDR) for which overlapping networks and routes are reported. Empty for none.
    type: str
    default: ""
  listen:
    description: Addresses and ports that the service is to listen on.
    type: list
    elements: dict
    default: []
    suboptions:
      address:
        description: Literal IPv4 or IPv6 address.
        type: str
        required: true
      port:
        description: TCP port.
        type: int
        required: true
  directories:
    description: Directories to describe with all their ancestors.
    type: list
    elements: str
    default: []
  space:
    description: Paths whose file systems are measured, besides the one of the container engine.
    type: list
    elements: str
    default: []
  policy_dir:
    description: Policy directory, searched for an unfinished publication.
    type: str
    default: ""
  users:
    description: Users to look up by name and by number.
    type: list
    elements: dict
    default: []
    suboptions: &identity
      name:
        description: Name.
        type: str
        required: true
      id:
        description: Number.
        type: int
        required: true
  groups:
    description: Groups to look up by name and by number.
    type: list
    elements: dict
    default: []
    suboptions: *identity
  controller_time:
    description: Time on the controller when the call was sent, in seconds since 1970. It is handed back.
    type: float
    required: true
attributes:
  check_mode:
    description: Runs the same in check mode; it never changes anything.
    support: full
author: memory deployment bundle
"""

EXAMPLES = r"""
- name: Describe the host
  memory_probe:
    project: memory
    listen:
      - {address: 192.0.2.10, port: 443}
    controller_time: "{{ now().timestamp() }}"
  check_mode: false
  register: probe
"""

RETURN = r"""
os:
  description: C(id), C(name) and C(version) of the operating system.
  returned: success
  type: dict
machine:
  description: Machine architecture, as the kernel calls it.
  returned: success
  type: str
kernel:
  description: Kernel release.
  returned: success
  type: str
python:
  description: Version of the interpreter that ran the module.
  returned: success
  type: str
uid:
  description: Effective user of the module.
  returned: success
  type: int
systemd:
  description: Whether systemd runs the host.
  returned: success
  type: bool
memory_total_bytes:
  description: Memory of the host.
  returned: success
  type: int
time:
  description: Time on the host when the module started, in seconds since 1970.
  returned: success
  type: float
controller_time:
  description: The option of that name.
  returned: success
  type: float
docker:
  description: >-
    C(installed), C(running), C(cli), C(product), C(engine_version), C(compose_version), C(storage_driver),
    C(security_options), C(data_root), and C(error), the reason why the engine did not answer.
  returned: success
  type: dict
space:
  description: For each file system C(path), C(measured) (the ancestor that exists), C(free_bytes), C(free_inodes).
  returned: success
  type: list
  elements: dict
addresses:
  description: Addresses of the host.
  returned: success
  type: list
  elements: str
listen:
  description: For each address and port C(state) (free, busy or absent) and C(holder).
  returned: success
  type: list
  elements: dict
directories:
  description: For each directory C(kind), C(uid), C(gid), C(mode), and the same of its C(components) from the root.
  returned: success
  type: list
  elements: dict
policy_leftover:
  description: Whether an unfinished publication lies in the policy directory.
  returned: success
  type: bool
users:
  description: For each user C(id_of_name) and C(name_of_id).
  returned: success
  type: list
  elements: dict
groups:
  description: For each group C(id_of_name) and C(name_of_id).
  returned: success
  type: list
  elements: dict
containers:
  description: Containers of the project, and others that hold a name of the project.
  returned: success
  type: list
  elements: dict
volume:
  description: The database volume, C(exists), C(project), C(empty), C(uid), C(postgres_major).
  returned: success
  type: dict
networks:
  description: Container networks that overlap the subnet.
  returned: success
  type: list
  elements: dict
routes:
  description: Routes of the host, other than those of container networks, that overlap the subnet.
  returned: success
  type: list
  elements: dict
"""

import contextlib
import grp
import http.client
import ipaddress
import json
import os
import platform
import pwd
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
import urllib.parse
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

SOCKET = "/var/run/docker.sock"
DEFAULT_DATA_ROOT = "/var/lib/docker"
LEFTOVER = ".access.json.publish"
ENGINE_TIMEOUT = 15
PROJECT_LABEL = "com.docker.compose.project"
SERVICE_LABEL = "com.docker.compose.service"
CONFIG_FILES_LABEL = "com.docker.compose.project.config_files"
KINDS = ((stat.S_ISLNK, "symlink"), (stat.S_ISDIR, "directory"), (stat.S_ISREG, "file"))


class EngineConnection(http.client.HTTPConnection):
    """HTTP over the socket of the container engine."""

    def __init__(self) -> None:
        super().__init__("localhost", timeout=ENGINE_TIMEOUT)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(ENGINE_TIMEOUT)
        self.sock.connect(SOCKET)


def ask_engine(path: str):
    """Answer of the engine to GET `path`, or None for 404.

    Raises:
        OSError, ValueError, http.client.HTTPException: the engine did not answer as it should.
    """
    connection = EngineConnection()
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    if answer.status == 404:
        return None
    if answer.status != 200:
        raise ValueError(f"the engine answered {answer.status} to {path}")
    return json.loads(body)


def operating_system() -> dict:
    """Identity of the operating system from os-release."""
    values = {}
    for candidate in ("/etc/os-release", "/usr/lib/os-release"):
        if os.path.exists(candidate):
            for line in Path(candidate).read_text(encoding="utf-8", errors="replace").splitlines():
                key, separator, value = line.partition("=")
                if separator:
                    values[key.strip()] = value.strip().strip("\"'")
            break
    name = values.get("ID", "unknown")
    return {"id": name, "name": name.capitalize(), "version": values.get("VERSION_ID", "")}


def memory_total() -> int:
    """Bytes of memory of the host."""
    match = re.search(
        r"^MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE
    )
    return int(match.group(1)) * 1024 if match else 0


def compose_version() -> str:
    """Version of the Compose plugin, empty when there is none."""
    try:
        answer = subprocess.run(
            ["docker", "compose", "version", "--short"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=ENGINE_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.decode("utf-8", "replace").strip() if answer.returncode == 0 else ""


def docker() -> dict:
    """The container engine and its client."""
    client = shutil.which("docker")
    found = {
        "installed": bool(shutil.which("dockerd")),
        "running": False,
        "cli": bool(client),
        "product": "",
        "engine_version": "",
        "compose_version": compose_version() if client else "",
        "storage_driver": "",
        "security_options": [],
        "data_root": DEFAULT_DATA_ROOT,
        "error": "",
    }
    if not found["installed"] and not os.path.exists(SOCKET):
        return found
    try:
        version = ask_engine("/version") or {}
        info = ask_engine("/info") or {}
    except (OSError, ValueError, http.client.HTTPException) as error:
        found["error"] = str(error)
        return found
    components = version.get("Components") or [{}]
    found.update(
        installed=True,
        running=True,
        product=components[0].get("Name", ""),
        engine_version=version.get("Version", ""),
        storage_driver=info.get("Driver", ""),
        security_options=list(info.get("SecurityOptions") or []),
        data_root=info.get("DockerRootDir") or DEFAULT_DATA_ROOT,
    )
    return found


def containers(project: str) -> tuple:
    """Containers of the project or with its names, and the ports that any container publishes."""
    pattern = re.compile(r"(?:[0-9a-f]{8,64}_)?" + re.escape(project) + r"-[a-z0-9_-]+-[0-9]+\Z")
    relevant = []
    published = []
    for item in ask_engine("/containers/json?all=1") or []:
        labels = item.get("Labels") or {}
        name = (item.get("Names") or ["/"])[0].lstrip("/")
        described = {
            "id": item["Id"][:12],
            "name": name,
            "project": labels.get(PROJECT_LABEL, ""),
            "service": labels.get(SERVICE_LABEL, ""),
            "config_files": labels.get(CONFIG_FILES_LABEL, ""),
            "state": item.get("State", ""),
        }
        if project and (described["project"] == project or pattern.match(name)):
            relevant.append(described)
        for port in item.get("Ports") or []:
            if port.get("PublicPort") and port.get("Type") == "tcp":
                published.append((port.get("IP") or "0.0.0.0", port["PublicPort"], described))
    return relevant, published


def volume(name: str, running: bool) -> dict:
    """The database volume: whose it is, and what kind of data directory it holds."""
    found = {"name": name, "exists": False, "project": "", "empty": True, "uid": None, "postgres_major": None}
    described = ask_engine("/volumes/" + urllib.parse.quote(name, safe="")) if running and name else None
    if described is None:
        return found
    found["exists"] = True
    found["project"] = (described.get("Labels") or {}).get(PROJECT_LABEL, "")
    root = Path(described.get("Mountpoint") or "/nonexistent")
    try:
        entries = [entry.name for entry in root.iterdir()]
    except OSError:
        return found
    found["empty"] = not entries
    found["uid"] = root.stat().st_uid
    if "PG_VERSION" in entries and root.joinpath("PG_VERSION").is_file():
        text = root.joinpath("PG_VERSION").read_text(encoding="ascii", errors="replace").strip()
        found["postgres_major"] = int(text) if text.isdigit() else None
    return found


def overlapping_networks(subnet, running: bool) -> tuple:
    """Container networks that overlap `subnet`, and the interfaces of all container networks."""
    found = []
    interfaces = {"docker0"}
    for item in (ask_engine("/networks") or []) if running else []:
        options = item.get("Options") or {}
        interfaces.add(options.get("com.docker.network.bridge.name") or "br-" + item["Id"][:12])
        for config in (item.get("IPAM") or {}).get("Config") or []:
            try:
                other = ipaddress.ip_network(config.get("Subnet", ""), strict=False)
            except ValueError:
                continue
            if subnet is not None and other.version == 4 and other.overlaps(subnet):
                labels = item.get("Labels") or {}
                found.append(
                    {"name": item["Name"], "subnet": str(other), "project": labels.get(PROJECT_LABEL, "")}
                )
    return found, interfaces


def overlapping_routes(subnet, ignored) -> list:
    """IPv4 routes, but not the default route, that overlap `subnet` and do not leave by an ignored interface."""
    found = []
    if subnet is None or not os.path.exists("/proc/net/route"):
        return found
    for line in Path("/proc/net/route").read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        destination, mask = (int(fields[index], 16).to_bytes(4, sys.byteorder) for index in (1, 7))
        prefix = f"{ipaddress.IPv4Address(destination)}/{ipaddress.IPv4Address(mask)}"
        network = ipaddress.ip_network(prefix, strict=False)
        if network.prefixlen and fields[0] not in ignored and network.overlaps(subnet):
            found.append({"destination": str(network), "interface": fields[0]})
    return found


def host_addresses() -> list:
    """Addresses that are local to the host and the same on every link, from the kernel's tables."""
    found = set()
    trie = Path("/proc/net/fib_trie")
    candidate = ""
    for line in trie.read_text(encoding="ascii").splitlines() if trie.exists() else []:
        leaf = re.match(r"\s+\|-- (\S+)", line)
        if leaf:
            candidate = leaf.group(1)
        elif "/32 host LOCAL" in line:
            found.add(candidate)
    table = Path("/proc/net/if_inet6")
    for line in table.read_text(encoding="ascii").splitlines() if table.exists() else []:
        address = ipaddress.IPv6Address(int(line.split()[0], 16))
        if not address.is_link_local:
            found.add(str(address))
    return sorted(found)


def listening_process(address: str, port: int):
    """The process that listens on `port` at `address` or at the wildcard, as {kind, name, id}."""
    wanted = ipaddress.ip_address(address)
    inodes = set()
    for table, size in (("/proc/net/tcp", 4), ("/proc/net/tcp6", 16)):
        if not os.path.exists(table):
            continue
        for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            raw, number = fields[1].split(":")
            if fields[3] != "0A" or int(number, 16) != port:
                continue
            words = [
                int(raw[index : index + 8], 16).to_bytes(4, sys.byteorder) for index in range(0, size * 2, 8)
            ]
            found = ipaddress.ip_address(b"".join(words))
            if found == wanted or found.is_unspecified or wanted.is_unspecified:
                inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            if any(os.readlink(str(entry)) in inodes for entry in process.joinpath("fd").iterdir()):
                name = process.joinpath("comm").read_text(encoding="utf-8", errors="replace").strip()
                return {"kind": "process", "name": name, "id": process.name, "project": ""}
        except OSError:
            continue
    return None


def published_by(address: str, port: int, published):
    """The container that publishes `port` at `address` or at the wildcard."""
    wanted = ipaddress.ip_address(address)
    for other, number, container in published:
        holder = ipaddress.ip_address(other)
        same_family = holder.version == wanted.version
        if number == port and (
            holder == wanted or (same_family and (holder.is_unspecified or wanted.is_unspecified))
        ):
            return {
                "kind": "container",
                "name": container["name"],
                "id": container["id"],
                "project": container["project"],
            }
    return None


def listen(address: str, port: int, local: list, published) -> dict:
    """Whether the service could listen there."""
    wanted = ipaddress.ip_address(address)
    found = {"address": address, "port": port, "state": "free", "holder": None}
    if not (wanted.is_unspecified or wanted.is_loopback) and str(wanted) not in local:
        found["state"] = "absent"
        return found
    found["holder"] = published_by(address, port, published)
    if found["holder"]:
        found["state"] = "busy"
        return found
    family = socket.AF_INET6 if wanted.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if wanted.version == 6:
            attempt.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            attempt.bind((str(wanted), port))
        except OSError:
            found["state"] = "busy"
            found["holder"] = listening_process(address, port)
    return found


def described(path: Path) -> dict:
    """Kind, owner, group and mode of `path` itself."""
    try:
        info = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return {"path": str(path), "kind": "absent", "uid": None, "gid": None, "mode": None}
    kind = next((name for test, name in KINDS if test(info.st_mode)), "special")
    return {
        "path": str(path),
        "kind": kind,
        "uid": info.st_uid,
        "gid": info.st_gid,
        "mode": f"{stat.S_IMODE(info.st_mode):04o}",
    }


def directory(text: str) -> dict:
    """`described` of a directory with its ancestors from the root, up to the first that is no directory."""
    path = Path(text)
    components = []
    for component in [*reversed(path.parents), path]:
        components.append(described(component))
        if components[-1]["kind"] != "directory":
            break
    complete = (
        components[-1]
        if components[-1]["path"] == str(path)
        else {**described(Path("/nonexistent")), "path": text}
    )
    return {**complete, "components": components}


def space(text: str) -> dict:
    """Free space and inodes of the file system that holds, or would hold, `text`."""
    path = Path(text)
    while not path.exists():
        path = path.parent
    info = os.statvfs(str(path))
    return {
        "path": text,
        "measured": str(path),
        "free_bytes": info.f_bavail * info.f_frsize,
        "free_inodes": info.f_favail if info.f_files else None,
    }


def identity(name: str, number: int, by_name, by_number, key: str) -> dict:
    """What the host knows of a user or group name and of a number."""
    found = {"name": name, "id": number, "id_of_name": None, "name_of_id": None}
    with contextlib.suppress(KeyError):
        found["id_of_name"] = getattr(by_name(name), key + "id")
    with contextlib.suppress(KeyError):
        found["name_of_id"] = by_number(number)[0]
    return found


def probe(options: dict) -> dict:
    """Everything the module reports."""
    engine = docker()
    subnet = ipaddress.ip_network(options["subnet"], strict=False) if options["subnet"] else None
    relevant, published = containers(options["project"]) if engine["running"] else ([], [])
    networks, interfaces = overlapping_networks(subnet, engine["running"])
    local = host_addresses()
    measured = [engine["data_root"], *(path for path in options["space"] if path != engine["data_root"])]
    return {
        "os": operating_system(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "uid": os.geteuid(),
        "systemd": os.path.isdir("/run/systemd/system"),
        "memory_total_bytes": memory_total(),
        "docker": engine,
        "space": [space(path) for path in measured],
        "addresses": local,
        "listen": [listen(item["address"], item["port"], local, published) for item in options["listen"]],
        "directories": [directory(path) for path in options["directories"]],
        "policy_leftover": bool(options["policy_dir"])
        and os.path.lexists(os.path.join(options["policy_dir"], LEFTOVER)),
        "users": [
            identity(item["name"], item["id"], pwd.getpwnam, pwd.getpwuid, "pw_u")
            for item in options["users"]
        ],
        "groups": [
            identity(item["name"], item["id"], grp.getgrnam, grp.getgrgid, "gr_g")
            for item in options["groups"]
        ],
        "containers": relevant,
        "volume": volume(options["volume"], engine["running"]),
        "networks": networks,
        "routes": overlapping_routes(subnet, interfaces),
    }


def main() -> None:
    """Run the module."""
    started = time.time()
    identities = {"name": {"type": "str", "required": True}, "id": {"type": "int", "required": True}}
    places = {"address": {"type": "str", "required": True}, "port": {"type": "int", "required": True}}
    module = AnsibleModule(
        argument_spec={
            "project": {"type": "str", "default": ""},
            "volume": {"type": "str", "default": ""},
            "subnet": {"type": "str", "default": ""},
            "listen": {"type": "list", "elements": "dict", "default": [], "options": places},
            "directories": {"type": "list", "elements": "str", "default": []},
            "space": {"type": "list", "elements": "str", "default": []},
            "policy_dir": {"type": "str", "default": ""},
            "users": {"type": "list", "elements": "dict", "default": [], "options": identities},
            "groups": {"type": "list", "elements": "dict", "default": [], "options": identities},
            "controller_time": {"type": "float", "required": True},
        },
        supports_check_mode=True,
    )
    try:
        found = probe(module.params)
    except (OSError, ValueError, http.client.HTTPException) as error:
        module.fail_json(
            msg=(
                f"the host cannot be examined: {error}\n"
                "  why it matters: nothing is changed on a host whose state is not known\n"
                "  how to fix it:  look at the named file or at the container engine (docker version), and run again"
            )
        )
    module.exit_json(changed=False, time=started, controller_time=module.params["controller_time"], **found)


if __name__ == "__main__":
    main()
