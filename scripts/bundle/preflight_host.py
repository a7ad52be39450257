"""Rules for the host, as the module memory_probe described it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .lock import Lock
from .preflight_settings import Settings

SYSTEMS = frozenset({("debian", "12"), ("debian", "13"), ("ubuntu", "24.04")})
PLATFORMS: Mapping[str, str] = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}
MIN_PYTHON = (3, 11)
MIN_INODES = 50_000
SECRET_DIRECTORIES = ("postgres", "hindsight", "router", "edge", "store")
STATE_DIRECTORIES = ("releases", "config", "journal", "router-keys", "edge-data")
ETC_DIRECTORIES = ("secrets", "device-keys", "edge")

Probe = Mapping[str, Any]


def request(good: Settings) -> dict[str, Any]:
    """Options of the module memory_probe, from the settings that are good enough to ask about."""

    def value(name: str) -> Any:
        return good[name] if good.has(name) else ""

    etc, state, policy = (
        value(name)
        for name in ("memory_activation_etc_dir", "memory_activation_state_dir", "memory_policy_dir")
    )
    port = value("memory_edge_https_port")
    addresses = value("memory_edge_bind_addresses") or []
    groups = [
        {"name": good[name], "id": good[number]}
        for name, number in (
            ("memory_policy_reader_group", "memory_policy_reader_gid"),
            ("memory_router_user", "memory_router_gid"),
        )
        if good.has(name, number)
    ]
    user_known = good.has("memory_router_user", "memory_router_uid")
    users = [{"name": good["memory_router_user"], "id": good["memory_router_uid"]}] if user_known else []
    return {
        "project": value("memory_activation_project"),
        "volume": value("hindsight_stack_volume_name"),
        "subnet": value("hindsight_stack_origin_subnet"),
        "listen": [{"address": address, "port": port} for address in addresses] if port else [],
        "directories": [path for path in (*_inner(etc, state), policy) if path],
        "space": [path for path in (state,) if path],
        "policy_dir": policy,
        "users": users,
        "groups": groups,
    }


def _inner(etc: str, state: str) -> list[str]:
    below_etc = (*ETC_DIRECTORIES, *(f"secrets/{name}" for name in SECRET_DIRECTORIES))
    found = [etc, *(f"{etc}/{name}" for name in below_etc)] if etc else []
    return found + ([state, *(f"{state}/{name}" for name in STATE_DIRECTORIES)] if state else [])


def examine(good: Settings, probe: Probe, locked: Lock | None, now: float) -> None:
    """Apply all rules for the host.

    Args:
        good: the settings.
        probe: result of memory_probe.
        locked: the image lock, when there is a valid one.
        now: time on the controller, in seconds since 1970.
    """
    supported = _system(good, probe, locked)
    _resources(good, probe)
    _clock(good, probe, now)
    _engine(good, probe, supported)
    _containers(good, probe)
    _volume(good, probe, locked)
    _network(good, probe)
    _directories(good, probe, locked)
    _identities(good, probe)


def version(text: str) -> tuple[int, ...]:
    """Leading numbers of a version; `20.10.24+dfsg1` gives (20, 10, 24), other text gives ()."""
    match = re.match(r"v?([0-9]+(?:\.[0-9]+)*)", text)
    return tuple(int(part) for part in match.group(1).split(".")) if match else ()


def _system(good: Settings, probe: Probe, locked: Lock | None) -> bool:
    """Rules for the system itself. Returns whether its kind is supported."""
    system = probe["os"]
    supported = (system["id"], system["version"]) in SYSTEMS
    if not supported:
        good.findings.add("host-os", f"the host runs {system['name']} {system['version']}")
    platform = PLATFORMS.get(probe["machine"])
    if platform is None:
        good.findings.add("host-arch", f"the host is a {probe['machine']} machine")
    for image in locked.images if locked and platform else ():
        if platform not in image.platforms:
            good.findings.add("lock-platform", f"the image {image.name} is not locked for {platform}")
    if version(probe["python"]) < MIN_PYTHON:
        good.findings.add("host-python", f"the modules run with Python {probe['python']}")
    if probe["uid"] != 0:
        good.findings.add("host-user", f"the modules run as the user {probe['uid']}")
    if not probe["systemd"]:
        good.findings.add("host-systemd", "there is no /run/systemd/system")
    return supported


def _resources(good: Settings, probe: Probe) -> None:
    if good.has("memory_preflight_min_memory_bytes"):
        wanted = good["memory_preflight_min_memory_bytes"]
        if probe["memory_total_bytes"] < wanted:
            have, need = _mebibytes(probe["memory_total_bytes"]), _mebibytes(wanted)
            good.findings.add("host-memory", f"the host has {have} of memory, {need} is due")
    for place in probe["space"]:
        if good.has("memory_preflight_min_free_disk_bytes"):
            wanted = good["memory_preflight_min_free_disk_bytes"]
            if place["free_bytes"] < wanted:
                have, need = _mebibytes(place["free_bytes"]), _mebibytes(wanted)
                good.findings.add("host-disk", f"{have} is free for {place['path']}, {need} is due")
        if place["free_inodes"] is not None and place["free_inodes"] < MIN_INODES:
            good.findings.add("host-inodes", f"{place['free_inodes']} inodes are free for {place['path']}")


def _mebibytes(count: int) -> str:
    return f"{count // 2**20} MiB"


def _clock(good: Settings, probe: Probe, now: float) -> None:
    """The host took its time between the moment the call was sent and now, so its clock has to lie in between."""
    if not good.has("memory_preflight_clock_tolerance_seconds"):
        return
    tolerance = good["memory_preflight_clock_tolerance_seconds"]
    ahead, behind = probe["time"] - now, probe["controller_time"] - probe["time"]
    if ahead > tolerance or behind > tolerance:
        side = f"{ahead:.0f} s ahead of" if ahead > tolerance else f"{behind:.0f} s behind"
        good.findings.add(
            "host-clock", f"the clock of the host is {side} the controller's; {tolerance} s is allowed"
        )


def _engine(good: Settings, probe: Probe, supported: bool) -> None:
    docker = probe["docker"]
    if not docker["installed"]:
        system = f"{probe['os']['name']} {probe['os']['version']}"
        if (
            supported
            and good.has("container_engine_packages")
            and system not in good["container_engine_packages"]
        ):
            good.findings.add("engine-absent", f"there is no Docker Engine on this {system} host")
        return
    if not docker["running"]:
        good.findings.add("engine-stopped", f"Docker Engine does not answer: {docker['error']}")
        return
    if docker["product"] not in ("", "Engine"):
        good.findings.add("engine-product", f"{docker['product']} answers at the socket of the engine")
        return
    if good.has("container_engine_min_version"):
        wanted = good["container_engine_min_version"]
        if version(docker["engine_version"]) < version(wanted):
            good.findings.add(
                "engine-version", f"Docker Engine is {docker['engine_version']}, {wanted} is due"
            )
    for option, meaning in (("name=rootless", "runs rootless"), ("name=userns", "remaps users")):
        if any(item.split(",")[0] == option for item in docker["security_options"]):
            good.findings.add("engine-mode", f"Docker Engine {meaning}")
    if good.has("container_engine_min_compose_version"):
        wanted = good["container_engine_min_compose_version"]
        if version(docker["compose_version"]) < version(wanted):
            have = (
                f"Compose is {docker['compose_version']}"
                if docker["compose_version"]
                else "docker compose is missing"
            )
            good.findings.add("compose-version", f"{have}, {wanted} is due")


def _containers(good: Settings, probe: Probe) -> None:
    if not good.has("memory_activation_project", "memory_activation_state_dir"):
        return
    project, state = good["memory_activation_project"], good["memory_activation_state_dir"]
    foreign_files = set()
    for container in probe["containers"]:
        if container["project"] != project:
            good.findings.add(
                "container-name", f"the container {container['name']} ({container['id']}) is not ours"
            )
        elif not container["config_files"].startswith(f"{state}/"):
            foreign_files.add(container["config_files"])
    for files in sorted(foreign_files):
        good.findings.add(
            "project-taken", f"containers of the project {project} were made from {files or 'no file'}"
        )


def _volume(good: Settings, probe: Probe, locked: Lock | None) -> None:
    volume = probe["volume"]
    if not volume["exists"] or not good.has("memory_activation_project"):
        return
    project = good["memory_activation_project"]
    if volume["project"] != project and (volume["project"] or not volume["empty"]):
        owner = f"the project {volume['project']}" if volume["project"] else "no project"
        good.findings.add(
            "volume-project", f"the volume {volume['name']} belongs to {owner}, not to {project}"
        )
        return
    facts = (
        next((image.facts for image in locked.images if image.name == "postgres"), None) if locked else None
    )
    if volume["empty"] or facts is None:
        return
    if volume["postgres_major"] != facts["postgres_major"]:
        made_by = (
            f"PostgreSQL {volume['postgres_major']}"
            if volume["postgres_major"]
            else "something else than PostgreSQL"
        )
        good.findings.add(
            "volume-major",
            f"the volume {volume['name']} was made by {made_by}, the lock has PostgreSQL {facts['postgres_major']}",
        )
    if volume["uid"] != facts["uid"]:
        good.findings.add(
            "volume-owner",
            f"the volume {volume['name']} belongs to uid {volume['uid']}, the image runs as {facts['uid']}",
        )


def _network(good: Settings, probe: Probe) -> None:
    project = good["memory_activation_project"] if good.has("memory_activation_project") else ""
    for network in probe["networks"]:
        if network["project"] != project or not project:
            good.findings.add(
                "subnet-overlap",
                f"hindsight_stack_origin_subnet overlaps {network['subnet']} of the container network {network['name']}",
            )
    for route in probe["routes"]:
        good.findings.add(
            "subnet-overlap",
            f"hindsight_stack_origin_subnet overlaps the route {route['destination']} by {route['interface']}",
        )
    for place in probe["listen"]:
        where = f"{place['address']} port {place['port']}"
        if place["state"] == "absent":
            known = ", ".join(probe["addresses"][:12])
            good.findings.add(
                "bind-absent",
                f"memory_edge_bind_addresses: the host has no {place['address']}; it has {known}",
            )
        elif place["state"] == "busy" and not (
            place["holder"] and project and place["holder"]["project"] == project
        ):
            holder = place["holder"]
            who = (
                f"the {holder['kind']} {holder['name']} ({holder['id']})" if holder else "an unknown program"
            )
            good.findings.add("port-in-use", f"{who} listens at {where}")


def _directories(good: Settings, probe: Probe, locked: Lock | None) -> None:
    """Look at each component once: what is wrong with a parent is said once, not for every directory below it."""
    tops = {
        good[name]
        for name in ("memory_activation_etc_dir", "memory_activation_state_dir", "memory_policy_dir")
        if good.has(name)
    }
    seen = set()
    for directory in probe["directories"]:
        for part in directory["components"]:
            if part["path"] in seen or part["kind"] == "absent":
                continue
            seen.add(part["path"])
            if part["kind"] == "symlink":
                good.findings.add(
                    "path-symlink", f"{part['path']} is a symbolic link, on the way to {directory['path']}"
                )
            elif part["kind"] != "directory":
                good.findings.add(
                    "path-type", f"{part['path']} is a {part['kind']}, on the way to {directory['path']}"
                )
            elif directory["path"] in tops and (part["uid"] != 0 or int(part["mode"], 8) & 0o022):
                good.findings.add(
                    "path-unsafe",
                    f"{part['path']} has the owner {part['uid']} and the mode {part['mode']}, on the way to {directory['path']}",
                )
    if probe["policy_leftover"] and good.has("memory_policy_dir"):
        good.findings.add("policy-leftover", f"{good['memory_policy_dir']}/.access.json.publish is there")
    _data_owners(good, probe, locked)


def _data_owners(good: Settings, probe: Probe, locked: Lock | None) -> None:
    if not good.has("memory_activation_state_dir"):
        return
    state = good["memory_activation_state_dir"]
    edge = (
        next((image.facts["uid"] for image in locked.images if image.name == "edge"), None)
        if locked
        else None
    )
    router = good["memory_router_uid"] if good.has("memory_router_uid") else None
    wanted = {f"{state}/router-keys": router, f"{state}/edge-data": edge}
    for directory in probe["directories"]:
        owner = wanted.get(directory["path"])
        if owner is not None and directory["kind"] == "directory" and directory["uid"] != owner:
            good.findings.add(
                "data-owner", f"{directory['path']} belongs to uid {directory['uid']}, {owner} is due"
            )


def _identities(good: Settings, probe: Probe) -> None:
    for rule_id, kind, entries in (
        ("user-conflict", "user", probe["users"]),
        ("group-conflict", "group", probe["groups"]),
    ):
        for entry in entries:
            name, number = entry["name"], entry["id"]
            if entry["id_of_name"] is not None and entry["id_of_name"] != number:
                good.findings.add(
                    rule_id, f"the {kind} {name} has the number {entry['id_of_name']}, {number} is due"
                )
            elif entry["name_of_id"] is not None and entry["name_of_id"] != name:
                good.findings.add(
                    rule_id, f"the number {number} belongs to the {kind} {entry['name_of_id']}, not to {name}"
                )
