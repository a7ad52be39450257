"""The preflight: one thing changed at a time, and exactly the one refusal that is due (S2-10, S2-12, S2-42, S2-43, S2-60)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bundle import lock, preflight, preflight_files, preflight_host, preflight_settings
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.preflight_fixture import (
    ETC,
    NAMES,
    NOW,
    POLICY,
    STATE,
    Case,
    good_case,
    image,
    issue,
    key_pem,
    leaf_hash,
    pem,
)

PERSON = "human:" + "a1" * 32
GRANT = {"default_bank": "desk", "admin": False, "banks": {"desk": ["recall"]}}
CONTAINER = {
    "id": "0123456789ab",
    "name": "memory-api-1",
    "project": "memory",
    "service": "api",
    "config_files": f"{STATE}/releases/ab/compose.yaml",
    "state": "running",
}
KEY = ec.generate_private_key(ec.SECP256R1())
OTHER_KEY = ec.generate_private_key(ec.SECP256R1())
ROOT = issue("Root", OTHER_KEY, authority=True)
LEAF = issue(NAMES[0], KEY, ROOT, OTHER_KEY, names=NAMES)
EXTERNAL = {
    "hindsight_stack_embeddings_provider": "openai",
    "hindsight_stack_embeddings_model": "small",
    "hindsight_stack_embeddings_base_url": "https://models.example.org/v1",
    "hindsight_stack_embeddings_api_key": "k" * 20,
    "hindsight_stack_embeddings_dimension": 1024,
}
LLM = {
    "hindsight_stack_llm_provider": "openai",
    "hindsight_stack_llm_model": "vendor/model-4:mini",
    "hindsight_stack_llm_api_key": "k" * 20,
}
ACME = {
    "memory_edge_tls_mode": "acme",
    "memory_edge_names": ["memory.example.org"],
    "memory_edge_acme_ca_url": "https://acme.example.org/directory",
    "memory_edge_acme_email": "ops@example.org",
}


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """Nothing to refuse."""
    return good_case(tmp_path)


def external(case: Case, **changes: Any) -> Case:
    """External embeddings, complete but for `changes`, and a lock that fits them."""
    case.images = [item for item in case.images if item.name != "embeddings"]
    return case.set(**{**EXTERNAL, **changes})


def principal(case: Case, **changes: Any) -> Case:
    """One principal, good but for `changes`."""
    return case.set(
        memory_router_keys_principals=[{"name": "desk", "alias": "memory.desk", "bank": "desk", **changes}]
    )


def user(case: Case, **changes: Any) -> Case:
    """One user of the policy, good but for `changes`."""
    return case.set(memory_policy_users={PERSON: {**GRANT, **changes}})


def provided(case: Case, **changes: Any) -> Case:
    """A provided certificate, good but for `changes`."""
    return case.certificate([LEAF, ROOT], KEY).set(**changes)


def listening(case: Case, state: str, holder: dict[str, str] | None = None) -> Case:
    """What the probe found at the port of the edge."""
    return case.host(listen=[{"address": "203.0.113.7", "port": 443, "state": state, "holder": holder}])


def without(mapping: dict[str, Any], *keys: str) -> dict[str, Any]:
    """`mapping` without some keys."""
    return {key: value for key, value in mapping.items() if key not in keys}


Change = Callable[[Case], Any]

REFUSED: list[tuple[str, str, Change]] = [
    ("partial-run", "one task after the other", lambda case: setattr(case, "options", ["step"])),
    ("setting-unknown", "a slip of the pen", lambda case: case.names.append("memory_edge_bind_adresses")),
    ("setting-type", "a number as text", lambda case: case.set(memory_edge_https_port="443")),
    ("setting-type", "text for a list", lambda case: case.set(memory_edge_names="memory.example.org")),
    ("setting-type", "a number in a list", lambda case: case.set(hindsight_banks_extra=[7])),
    ("setting-type", "a boolean for a number", lambda case: case.set(memory_router_uid=True)),
    ("setting-type", "no boolean", lambda case: case.set(memory_edge_bind_any="maybe")),
    ("setting-type", "no packages", lambda case: case.set(container_engine_packages={"Debian 13": "docker.io"})),
    ("setting-characters", "a dollar sign", lambda case: case.set(memory_activation_project="mem$ory")),
    ("setting-characters", "a hash", lambda case: case.set(hindsight_stack_worker_id="worker#1")),
    ("setting-characters", "a percent sign", lambda case: case.set(hindsight_stack_volume_name="memory%20data")),
    ("setting-characters", "a blank", lambda case: case.set(memory_policy_dir="/etc/memory policy")),
    ("setting-characters", "a letter outside ASCII", lambda case: case.set(memory_router_user="süd")),
    ("setting-characters", "a URL", lambda case: case.set(**LLM, hindsight_stack_llm_base_url="https://a.b/$x")),
    ("setting-grammar", "upper case", lambda case: case.set(memory_activation_project="Memory")),
    ("setting-grammar", "a relative path", lambda case: case.set(memory_activation_state_dir="var/lib/memory")),
    ("setting-grammar", "a way up", lambda case: case.set(memory_activation_etc_dir="/etc/../srv/memory")),
    ("setting-grammar", "no version", lambda case: case.set(container_engine_min_version="newest")),
    ("setting-choice", "another provider", lambda case: case.set(hindsight_stack_llm_provider="mock")),
    ("setting-choice", "another mode", lambda case: case.set(memory_edge_tls_mode="self-signed")),
    ("setting-range", "a long timeout", lambda case: case.set(memory_router_timeout_seconds=301)),
    ("setting-range", "no timeout", lambda case: case.set(memory_router_timeout_seconds=0)),
    ("setting-range", "a high port", lambda case: case.set(memory_edge_https_port=65536)),
    ("setting-range", "root", lambda case: case.set(memory_router_uid=0)),
    ("secret-type", "an octal number", lambda case: case.set(hindsight_stack_database_password=42798)),
    ("secret-type", "yes", lambda case: case.set(hindsight_stack_api_key=True)),
    ("secret-type", "a tilde", lambda case: case.set(memory_router_master_token=None)),
    ("secret-length", "short", lambda case: case.set(hindsight_stack_database_password="x" * 15)),
    ("secret-length", "long", lambda case: case.set(hindsight_stack_database_password="x" * 513)),
    ("secret-characters", "a blank", lambda case: case.set(hindsight_stack_api_key="0123456789 abcdef")),
    ("secret-characters", "a line end", lambda case: case.set(hindsight_stack_api_key="0123456789abcdef\n")),
    ("secret-characters", "a tabulator", lambda case: case.set(hindsight_stack_api_key="01234567\t9abcdef")),
    ("secret-characters", "an umlaut", lambda case: case.set(hindsight_stack_api_key="0123456789abcdöf")),
    ("secret-characters", "a variable", lambda case: case.set(hindsight_stack_api_key="0123456789${HOME}")),
    ("path-overlap", "one in the other", lambda case: case.set(memory_activation_state_dir="/etc/memory/state")),
    ("path-overlap", "the secrets", lambda case: case.set(memory_policy_dir="/etc/memory/secrets/policy")),
    ("path-overlap", "the system", lambda case: case.set(memory_activation_state_dir="/var/lib")),
    ("path-overlap", "lost at restart", lambda case: case.set(memory_activation_state_dir="/run/memory")),
    ("controller-path", "the lock", lambda case: case.set(image_supply_lock_file="images.lock.json")),
    ("controller-path", "a CA", lambda case: case.set(image_supply_registry_ca_files={"r.example.org:5000": "ca.crt"})),
    ("setting-characters", "a NUL", lambda case: case.set(image_supply_lock_file="/srv/lock\0.json")),
    ("url", "credentials", lambda case: case.set(**LLM, hindsight_stack_llm_base_url="https://me:pw@a.example.org")),
    ("url", "a query", lambda case: case.set(**LLM, hindsight_stack_llm_base_url="https://a.example.org/v1?key=1")),
    ("url", "another scheme", lambda case: case.set(**LLM, hindsight_stack_llm_base_url="ftp://a.example.org")),
    ("url", "loopback", lambda case: case.set(**LLM, hindsight_stack_llm_base_url="http://127.0.0.1:11434")),
    ("url", "localhost", lambda case: case.set(**LLM, hindsight_stack_llm_base_url="http://localhost:11434")),
    ("url", "a port too high", lambda case: case.set(**LLM, hindsight_stack_llm_base_url="http://a.example.org:70000")),
    ("memory-limits", "one missing", lambda case: case.settings["hindsight_stack_memory_limits"].pop("edge")),
    ("memory-limits", "no size", lambda case: case.settings["hindsight_stack_memory_limits"].update(api="lots")),
    ("memory-limits", "a number", lambda case: case.settings["hindsight_stack_memory_limits"].update(api=512)),
    ("address-pools", "covers the origin", lambda case: case.set(
        container_engine_address_pools=[{"base": "172.30.0.0/16", "size": 24}])),
    ("address-pools", "no size", lambda case: case.set(container_engine_address_pools=[{"base": "10.90.0.0/16"}])),
    ("origin-subnet", "public", lambda case: case.set(hindsight_stack_origin_subnet="203.0.113.0/24")),
    ("origin-subnet", "loopback", lambda case: case.set(hindsight_stack_origin_subnet="127.0.0.0/24")),
    ("origin-subnet", "link-local", lambda case: case.set(hindsight_stack_origin_subnet="169.254.7.0/24")),
    ("origin-subnet", "too large", lambda case: case.set(hindsight_stack_origin_subnet="10.0.0.0/8")),
    ("origin-subnet", "host bits", lambda case: case.set(hindsight_stack_origin_subnet="172.30.88.10/24")),
    ("origin-subnet", "IPv6", lambda case: case.set(hindsight_stack_origin_subnet="fd00::/64")),
    ("origin-address", "elsewhere", lambda case: case.set(hindsight_stack_origin_address="172.30.89.10")),
    ("origin-address", "a name", lambda case: case.set(hindsight_stack_origin_address="hindsight")),
    ("origin-address", "the gateway", lambda case: case.set(hindsight_stack_origin_address="172.30.88.1")),
    ("origin-address", "the broadcast", lambda case: case.set(hindsight_stack_origin_address="172.30.88.255")),
    ("llm-provider-forbidden", "a person's login", lambda case: case.set(hindsight_stack_llm_provider="claude-code")),
    ("llm-settings", "no model", lambda case: case.set(**without(LLM, "hindsight_stack_llm_model"))),
    ("llm-settings", "no key", lambda case: case.set(**without(LLM, "hindsight_stack_llm_api_key"))),
    ("llm-settings", "no URL", lambda case: case.set(
        hindsight_stack_llm_provider="ollama", hindsight_stack_llm_model="small")),
    ("llm-settings", "no provider", lambda case: case.set(hindsight_stack_llm_model="small")),
    ("embeddings-settings", "no model", lambda case: external(case, hindsight_stack_embeddings_model="")),
    ("embeddings-settings", "no key", lambda case: external(case, hindsight_stack_embeddings_api_key="")),
    ("embeddings-settings", "no URL", lambda case: external(case, hindsight_stack_embeddings_base_url="")),
    ("embeddings-settings", "local too", lambda case: case.set(
        hindsight_stack_embeddings_base_url="https://models.example.org")),
    ("embeddings-dimension", "missing", lambda case: external(case, hindsight_stack_embeddings_dimension=0)),
    ("embeddings-dimension", "too many", lambda case: external(case, hindsight_stack_embeddings_dimension=3072)),
    ("embeddings-dimension", "not the lock's", lambda case: case.set(hindsight_stack_embeddings_dimension=768)),
    ("reranker-settings", "no URL", lambda case: case.set(hindsight_stack_reranker_provider="tei")),
    ("principal-schema", "an unknown key", lambda case: principal(case, admin=True)),
    ("principal-schema", "a number as bank", lambda case: principal(case, bank=7)),
    ("principal-schema", "a missing key", lambda case: case.set(
        memory_router_keys_principals=[{"name": "desk", "alias": "memory.desk"}])),
    ("principal-name", "upper case", lambda case: principal(case, name="Desk")),
    ("principal-name", "a way up", lambda case: principal(case, name="../desk")),
    ("principal-alias", "a blank", lambda case: principal(case, alias="memory desk")),
    ("principal-alias", "upper case", lambda case: principal(case, alias="Memory.desk")),
    ("principal-paths", "none", lambda case: principal(case, paths=[])),
    ("principal-paths", "an unknown one", lambda case: principal(case, paths=["rest", "chat"])),
    ("principal-paths", "twice", lambda case: principal(case, paths=["rest", "rest"])),
    ("principal-limit", "no budget", lambda case: principal(case, rpm=0)),
    ("principal-limit", "too late", lambda case: principal(case, expires_days=3651)),
    ("bank-name", "an accent", lambda case: principal(case, bank="équipe")),
    ("bank-name", "a dot", lambda case: principal(case, bank="bank.v1")),
    ("bank-name", "65 characters", lambda case: principal(case, bank="b" * 65)),
    ("bank-name", "a digit first", lambda case: case.set(hindsight_banks_extra=["1team"])),
    ("reserved-name", "the name", lambda case: principal(case, name="canary")),
    ("reserved-name", "the alias", lambda case: principal(case, alias="memory.canary")),
    ("reserved-name", "the bank", lambda case: principal(case, bank="memory-canary")),
    ("reserved-name", "a further bank", lambda case: case.set(hindsight_banks_extra=["memory-canary"])),
    ("duplicate-entry", "two principals", lambda case: case.set(
        memory_router_keys_principals=case.settings["memory_router_keys_principals"] * 2)),
    ("duplicate-entry", "two banks", lambda case: case.set(hindsight_banks_extra=["team", "team"])),
    ("duplicate-entry", "two names", lambda case: case.set(memory_edge_names=[NAMES[0], NAMES[0]])),
    ("duplicate-entry", "two addresses", lambda case: case.set(memory_edge_bind_addresses=["203.0.113.7"] * 2)),
    ("duplicate-entry", "an address and all", lambda case: case.set(
        memory_edge_bind_addresses=["0.0.0.0", "203.0.113.7"], memory_edge_bind_any=True)),
    ("route-count", "one too many", lambda case: case.set(memory_router_keys_principals=[
        {"name": f"p{number}", "alias": "memory.desk", "bank": "desk"} for number in range(128)])),
    ("policy-owner", "two writers", lambda case: user(case).set(memory_policy_owner="connect")),
    ("policy-principal", "a display name", lambda case: case.set(memory_policy_users={"human:ada": GRANT})),
    ("policy-entry", "a further key", lambda case: user(case, note="x")),
    ("policy-entry", "text for a boolean", lambda case: user(case, admin="false")),
    ("policy-entry", "no operation", lambda case: user(case, banks={"desk": []})),
    ("policy-entry", "an unknown operation", lambda case: user(case, banks={"desk": ["delete"]})),
    ("policy-entry", "an operation twice", lambda case: user(case, banks={"desk": ["recall", "recall"]})),
    ("policy-entry", "a bank's name", lambda case: user(case, banks={"team bank": ["recall"]})),
    ("policy-entry", "another default", lambda case: user(case, default_bank="team")),
    ("policy-entry", "no bank", lambda case: user(case, banks={})),
    ("policy-bank-undeclared", "nobody's bank", lambda case: user(
        case, banks={"desk": ["recall"], "ghost": ["recall"]})),
    ("policy-size", "too many users", lambda case: case.set(
        memory_policy_users={f"human:{number:064x}": GRANT for number in range(4097)})),
    ("edge-names", "none", lambda case: case.set(memory_edge_names=[])),
    ("edge-name", "a wildcard", lambda case: case.set(memory_edge_names=["*.example.org"])),
    ("edge-name", "a URL", lambda case: case.set(memory_edge_names=["https://memory.example.org"])),
    ("edge-name", "no address", lambda case: case.set(memory_edge_names=["203.0.113.300"])),
    ("edge-name", "a dollar sign", lambda case: case.set(memory_edge_names=["memory.$DOMAIN"])),
    ("bind-missing", "none", lambda case: case.set(memory_edge_bind_addresses=[])),
    ("bind-address", "a name", lambda case: case.set(memory_edge_bind_addresses=["memory.example.org"])),
    ("bind-address", "multicast", lambda case: case.set(memory_edge_bind_addresses=["224.0.0.1"])),
    ("bind-address", "link-local", lambda case: case.set(memory_edge_bind_addresses=["fe80::1"])),
    ("bind-wildcard", "IPv4", lambda case: case.set(memory_edge_bind_addresses=["0.0.0.0"])),
    ("bind-wildcard", "IPv6", lambda case: case.set(memory_edge_bind_addresses=["::"])),
    ("tls-certificate", "missing", lambda case: provided(case, memory_edge_certificate_file="")),
    ("tls-certificate", "no PEM", lambda case: provided(
        case, memory_edge_certificate_file=case.file("bad.crt", b"not a certificate"))),
    ("tls-chain", "the wrong issuer", lambda case: case.certificate([LEAF, issue("Stranger", KEY)], KEY)),
    ("tls-chain", "for clients", lambda case: case.certificate(
        [issue(NAMES[0], KEY, names=NAMES, usage=ExtendedKeyUsageOID.CLIENT_AUTH)], KEY)),
    ("tls-chain", "an authority first", lambda case: case.certificate(
        [issue(NAMES[0], KEY, ROOT, OTHER_KEY, names=NAMES, authority=True)], KEY)),
    ("tls-key", "missing", lambda case: provided(case, memory_edge_private_key_file="")),
    ("tls-key", "no file", lambda case: provided(case, memory_edge_private_key_file="/nonexistent/tls.key")),
    ("tls-key", "a passphrase", lambda case: provided(
        case, memory_edge_private_key_file=case.file("locked.key", key_pem(KEY, b"opensesame")))),
    ("tls-key-mode", "for all", lambda case: provided(
        case, memory_edge_private_key_file=case.file("open.key", key_pem(KEY), 0o644))),
    ("tls-key-mismatch", "another key", lambda case: provided(
        case, memory_edge_private_key_file=case.file("other.key", key_pem(OTHER_KEY)))),
    ("tls-validity", "expired", lambda case: case.certificate(
        [issue(NAMES[0], KEY, names=NAMES, begins=NOW - 900, ends=NOW - 1)], KEY)),
    ("tls-validity", "not yet", lambda case: case.certificate(
        [issue(NAMES[0], KEY, names=NAMES, begins=NOW + 60)], KEY)),
    ("tls-names", "a name missing", lambda case: case.certificate([issue(NAMES[0], KEY, names=NAMES[:1])], KEY)),
    ("tls-names", "common name only", lambda case: case.certificate([issue(NAMES[0], KEY)], KEY)),
    ("tls-pin", "missing", lambda case: provided(case, memory_edge_certificate_sha256="")),
    ("tls-pin", "another", lambda case: provided(case, memory_edge_certificate_sha256=leaf_hash(ROOT))),
    ("acme-account", "no https", lambda case: case.set(**{
        **ACME, "memory_edge_acme_ca_url": "http://acme.example.org/directory"})),
    ("acme-account", "no address", lambda case: case.set(**{**ACME, "memory_edge_acme_email": "ops"})),
    ("acme-names", "an address", lambda case: case.set(**{**ACME, "memory_edge_names": ["203.0.113.7"]})),
    ("acme-names", "a private name", lambda case: case.set(**{**ACME, "memory_edge_names": ["memory.internal"]})),
    ("acme-root", "no file", lambda case: case.set(**{
        **ACME, "memory_edge_acme_ca_root_file": "/nonexistent/root.crt"})),
    ("registry-ca", "no port", lambda case: case.set(
        image_supply_registry_ca_files={"registry.example.org": case.file("ca.crt", pem(ROOT))})),
    ("registry-ca", "no file", lambda case: case.set(
        image_supply_registry_ca_files={"registry.example.org:5000": "/nonexistent/ca.crt"})),
    ("lock-invalid", "missing", lambda case: case.set(image_supply_lock_file="/nonexistent/images.lock.json")),
    ("lock-invalid", "damaged", lambda case: case.set(image_supply_lock_file=case.file("bad.json", b"{}"))),
    ("lock-image-missing", "the router", lambda case: case.images.pop(2)),
    ("lock-image-unused", "embeddings", lambda case: case.set(**EXTERNAL)),
    ("lock-platform", "amd64 alone", lambda case: (
        case.host(machine="aarch64").images.__setitem__(0, image("postgres", ["linux/amd64"])))),
    ("identity-shared", "the edge's uid", lambda case: case.set(memory_router_uid=10002).directory(
        f"{STATE}/router-keys", uid=10002)),
    ("identity-shared", "the readers", lambda case: case.set(memory_policy_reader_gid=10001)),
    ("host-os", "another release", lambda case: case.host(os={"id": "debian", "name": "Debian", "version": "11"})),
    ("host-os", "another system", lambda case: case.host(os={"id": "fedora", "name": "Fedora", "version": "42"})),
    ("host-arch", "a small board", lambda case: case.host(machine="armv7l")),
    ("host-python", "3.10", lambda case: case.host(python="3.10.12")),
    ("host-user", "nobody", lambda case: case.host(uid=65534)),
    ("host-systemd", "a plain container", lambda case: case.host(systemd=False)),
    ("host-memory", "1 GiB", lambda case: case.host(memory_total_bytes=2**30)),
    ("host-disk", "1 GiB", lambda case: case.probe["space"][0].update(free_bytes=2**30)),
    ("host-inodes", "few", lambda case: case.probe["space"][0].update(free_inodes=100)),
    ("host-clock", "ahead", lambda case: case.host(time=NOW + 61)),
    ("host-clock", "behind", lambda case: case.host(time=NOW - 62)),
    ("engine-absent", "no packages", lambda case: case.engine(installed=False, running=False).host(
        os={"id": "debian", "name": "Debian", "version": "12"})),
    ("engine-stopped", "no answer", lambda case: case.engine(running=False, error="Connection refused")),
    ("engine-product", "an emulation", lambda case: case.engine(product="Podman Engine")),
    ("engine-version", "19.03", lambda case: case.engine(engine_version="19.03.15")),
    ("engine-mode", "rootless", lambda case: case.engine(security_options=["name=rootless"])),
    ("engine-mode", "remapped", lambda case: case.engine(security_options=["name=userns"])),
    ("compose-version", "absent", lambda case: case.engine(compose_version="")),
    ("compose-version", "2.23", lambda case: case.engine(compose_version="v2.23.3")),
    ("project-taken", "another file", lambda case: case.probe["containers"].append(
        {**CONTAINER, "config_files": "/srv/old/docker-compose.yml"})),
    ("container-name", "by hand", lambda case: case.probe["containers"].append({**CONTAINER, "project": ""})),
    ("volume-project", "another project", lambda case: case.volume(project="old")),
    ("volume-project", "nobody's data", lambda case: case.volume(project="")),
    ("volume-major", "15", lambda case: case.volume(postgres_major=15)),
    ("volume-major", "no database", lambda case: case.volume(postgres_major=None)),
    ("volume-owner", "another uid", lambda case: case.volume(uid=70)),
    ("subnet-overlap", "a network", lambda case: case.host(
        networks=[{"name": "other", "subnet": "172.30.0.0/16", "project": "other"}])),
    ("subnet-overlap", "a route", lambda case: case.host(
        routes=[{"destination": "172.16.0.0/12", "interface": "wg0"}])),
    ("bind-absent", "another host", lambda case: listening(case, "absent")),
    ("port-in-use", "a program", lambda case: listening(
        case, "busy", {"kind": "process", "name": "nginx", "id": "812", "project": ""})),
    ("port-in-use", "a container", lambda case: listening(
        case, "busy", {"kind": "container", "name": "web-1", "id": "0123456789ab", "project": "web"})),
    ("port-in-use", "unknown", lambda case: listening(case, "busy")),
    ("path-symlink", "the directory", lambda case: case.directory(STATE, kind="symlink")),
    ("path-symlink", "a parent", lambda case: case.directory("/var", like=STATE, kind="symlink")),
    ("path-symlink", "below", lambda case: case.directory(f"{ETC}/secrets", kind="symlink")),
    ("path-type", "a file", lambda case: case.directory(POLICY, kind="file")),
    ("path-unsafe", "a parent's owner", lambda case: case.directory("/etc", like=ETC, uid=1000)),
    ("path-unsafe", "its own mode", lambda case: case.directory(POLICY, mode="0770")),
    ("path-unsafe", "sticky", lambda case: case.directory("/var", like=STATE, mode="1777")),
    ("policy-leftover", "interrupted", lambda case: case.host(policy_leftover=True)),
    ("data-owner", "the key store", lambda case: case.directory(f"{STATE}/router-keys", uid=10009)),
    ("user-conflict", "another uid", lambda case: case.probe["users"][0].update(id_of_name=998)),
    ("user-conflict", "another name", lambda case: case.probe["users"][0].update(name_of_id="backup")),
    ("group-conflict", "another gid", lambda case: case.probe["groups"][0].update(id_of_name=998)),
    ("group-conflict", "another name", lambda case: case.probe["groups"][1].update(name_of_id="staff")),
]  # fmt: skip

ACCEPTED: list[tuple[str, Change]] = [
    ("nothing changed", lambda case: None),
    ("Debian 12", lambda case: case.host(os={"id": "debian", "name": "Debian", "version": "12"})),
    ("Ubuntu 24.04", lambda case: case.host(os={"id": "ubuntu", "name": "Ubuntu", "version": "24.04"})),
    ("no engine yet", lambda case: case.engine(installed=False, running=False, compose_version="")),
    ("the oldest engine", lambda case: case.engine(engine_version="20.10.24+dfsg1", compose_version="2.24.0")),
    ("arm64", lambda case: case.host(machine="aarch64")),
    ("a provided certificate", provided),
    ("a self-signed one", lambda case: case.certificate([issue(NAMES[0], KEY, names=NAMES, authority=True)], KEY)),
    ("a wildcard", lambda case: case.certificate(
        [issue("x", KEY, names=["*.example.org", NAMES[1]])], KEY)),
    ("a key in a vault", lambda case: setattr(provided(case, memory_edge_private_key_file=case.file(
        "vault.key", b"$ANSIBLE_VAULT;1.1;AES256\n6162\n", 0o644)), "private_key", key_pem(KEY).decode())),
    ("a public authority", lambda case: case.set(**ACME)),
    ("a private authority", lambda case: case.set(**{
        **ACME, "memory_edge_names": ["memory.internal"],
        "memory_edge_acme_ca_root_file": case.file("root.crt", pem(ROOT))})),
    ("a registry's authority", lambda case: case.set(
        image_supply_registry_ca_files={"registry.example.org:5000": case.file("ca.crt", pem(ROOT))})),
    ("a language model", lambda case: case.set(**LLM)),
    ("a local one", lambda case: case.set(hindsight_stack_llm_provider="ollama", hindsight_stack_llm_model="small",
        hindsight_stack_llm_base_url="http://10.0.0.5:11434")),
    ("external embeddings", external),
    ("given secrets", lambda case: case.set(
        hindsight_stack_database_password="p@s%41:s?[x]#'\"\\`", memory_router_master_token="pa$word$1$x$$y#0123")),
    ("grants", user),
    ("the canary's bank", lambda case: user(case, banks={"desk": ["recall"], "memory-canary": ["recall"]})),
    ("an alias of two", lambda case: case.set(memory_router_keys_principals=[
        {"name": "a", "alias": "memory.team", "bank": "team"}, {"name": "b", "alias": "memory.team", "bank": "team"}])),
    ("one path", lambda case: principal(case, paths=["mcp"], rpm=600, expires_days=90)),
    ("all interfaces, wanted", lambda case: case.set(
        memory_edge_bind_addresses=["0.0.0.0", "::"], memory_edge_bind_any=True)),
    ("a boolean from the command line", lambda case: case.set(memory_preflight_only="true")),
    ("our own edge", lambda case: listening(
        case, "busy", {"kind": "container", "name": "memory-edge-1", "id": "0123456789ab", "project": "memory"})),
    ("our own containers", lambda case: case.probe["containers"].append(CONTAINER)),
    ("our own network", lambda case: case.host(
        networks=[{"name": "memory_origin", "subnet": "172.30.88.0/24", "project": "memory"}])),
    ("our own volume", Case.volume),
    ("an empty volume by hand", lambda case: case.volume(project="", empty=True, uid=0, postgres_major=None)),
    ("our own user", lambda case: case.probe["users"][0].update(id_of_name=10001, name_of_id="memory-router")),
    ("a slow run", lambda case: setattr(case, "now", NOW + 3000)),
    ("a clock at the edge", lambda case: case.host(time=NOW + 59)),
    ("facts of other roles", lambda case: case.names.extend(["memory_preflight_probe", "ansible_host"])),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "change"),
    [(rule, change) for rule, _, change in REFUSED],
    ids=[f"{a}: {b}" for a, b, _ in REFUSED],
)
def test_one_change_gives_exactly_its_refusal(case: Case, rule: str, change: Change) -> None:
    change(case)
    assert set(case.ids()) == {rule}, [refusal.what for refusal in case.refusals()]


@pytest.mark.parametrize("change", [change for _, change in ACCEPTED], ids=[name for name, _ in ACCEPTED])
def test_what_is_fit_is_not_refused(case: Case, change: Change) -> None:
    change(case)
    assert [refusal.what for refusal in case.refusals()] == []


def test_every_rule_is_tested() -> None:
    assert {rule for rule, _, _ in REFUSED} == set(preflight.RULES)


def test_all_reasons_are_told_at_once(case: Case) -> None:
    case.set(memory_edge_names=[], memory_router_timeout_seconds=0).host(systemd=False)
    told = preflight.text(case.refusals())
    assert told.startswith("3 reasons not to go on")
    assert re.findall(r"^\d\. \[([a-z-]+)\]", told, re.MULTILINE) == [
        "setting-range",
        "edge-names",
        "host-systemd",
    ]
    assert told.count("why it matters:") == told.count("how to fix it:") == 3


def test_a_refused_setting_is_not_refused_again_by_what_depends_on_it(case: Case) -> None:
    case.set(hindsight_stack_origin_subnet=7, memory_policy_dir=None, hindsight_stack_embeddings_provider=[])
    assert set(case.ids()) == {"setting-type"}


@pytest.mark.parametrize("variable", sorted(preflight_settings.kinds()))
def test_the_message_names_the_variable(case: Case, variable: str) -> None:
    case.set(**{variable: object()})
    (refusal,) = [item for item in case.refusals() if item.id in ("setting-type", "secret-type")]
    assert variable in refusal.what


def test_a_setting_that_no_role_declares_is_a_fault_of_the_play(case: Case) -> None:
    del case.settings["memory_edge_names"]
    with pytest.raises(KeyError, match="memory_edge_names"):
        case.refusals()


SECRETS = sorted(name for name, kind in preflight_settings.kinds().items() if kind == "secret")
ANY_TEXT = st.text(min_size=6, max_size=600)
QUICK = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@QUICK
@given(values=st.fixed_dictionaries(dict.fromkeys(SECRETS, ANY_TEXT)))
def test_no_refusal_tells_a_secret(tmp_path: Path, values: dict[str, str]) -> None:
    marked = {name: f"~{value}~" for name, value in values.items()}
    case = good_case(tmp_path).set(**marked, **without(LLM, "hindsight_stack_llm_api_key"))
    case.set(hindsight_stack_origin_subnet="x", memory_edge_names=[])
    told = json.dumps([refusal.as_dict() for refusal in case.refusals()], ensure_ascii=False)
    assert case.refusals()
    for value in marked.values():
        assert value not in told
        assert json.dumps(value)[1:-1] not in told


@QUICK
@given(secret=st.text(st.characters(codec="ascii", min_codepoint=0x21), min_size=8, max_size=40))
def test_no_refusal_tells_what_stands_in_a_url_or_a_key(tmp_path: Path, secret: str) -> None:
    marked = f"~{secret}~"
    case = provided(
        good_case(tmp_path), **LLM, hindsight_stack_llm_base_url=f"https://user:{marked}@example.org/"
    )
    case.private_key = f"-----BEGIN PRIVATE KEY-----\n{marked}\n-----END PRIVATE KEY-----\n"
    told = "".join(refusal.what for refusal in case.refusals())
    assert {"tls-key"} <= set(case.ids())
    assert marked not in told


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12) | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)
ENTRY_KEYS = st.sampled_from(
    ["name", "alias", "bank", "paths", "rpm", "default_bank", "admin", "banks", "base", "size"]
)


@QUICK
@given(variable=st.sampled_from(sorted(preflight_settings.kinds())), value=JUNK)
def test_no_value_of_a_setting_is_too_strange_to_be_judged(tmp_path: Path, variable: str, value: Any) -> None:
    case = good_case(tmp_path).set(**{variable: value})
    assert isinstance(case.refusals(), list)
    assert isinstance(json.dumps(preflight.probe_request(case.settings)), str)


@QUICK
@given(
    entries=st.lists(st.dictionaries(ENTRY_KEYS | st.integers(), JUNK, max_size=8), max_size=3),
    users=st.dictionaries(st.just(PERSON), st.dictionaries(ENTRY_KEYS, JUNK, max_size=8), max_size=1),
)
def test_no_entry_is_too_strange_to_be_judged(
    tmp_path: Path, entries: list[Any], users: dict[str, Any]
) -> None:
    case = good_case(tmp_path)
    case.set(
        memory_router_keys_principals=entries,
        container_engine_address_pools=entries,
        memory_policy_users=users,
    )
    assert isinstance(case.refusals(), list)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("20.10.24+dfsg1", (20, 10, 24)),
        ("v2.40.3", (2, 40, 3)),
        ("2.26.1-4", (2, 26, 1)),
        ("28", (28,)),
        ("", ()),
        ("dev", ()),
    ],
)
def test_versions_are_read_as_far_as_they_are_numbers(text: str, parts: tuple[int, ...]) -> None:
    assert preflight_host.version(text) == parts


@pytest.mark.parametrize(
    ("names", "asked", "covered"),
    [
        (["memory.example.org"], "memory.example.org", True),
        (["Memory.Example.org"], "memory.example.org", True),
        (["*.example.org"], "memory.example.org", True),
        (["*.example.org"], "a.memory.example.org", False),
        (["*.example.org"], "example.org", False),
        (["203.0.113.7"], "203.0.113.7", True),
        (["2001:db8::7"], "2001:db8:0::7", True),
        (["memory.example.org"], "203.0.113.7", False),
    ],
)
def test_a_certificate_covers_what_clients_accept(names: list[str], asked: str, covered: bool) -> None:
    assert preflight_files.covers(issue("x", KEY, names=names), asked) is covered


def test_the_probe_is_asked_for_everything_that_the_settings_name(case: Case) -> None:
    request = preflight.probe_request(case.settings)
    assert request["listen"] == [{"address": "203.0.113.7", "port": 443}]
    assert {ETC, f"{ETC}/secrets", STATE, f"{STATE}/router-keys", POLICY} <= set(request["directories"])
    assert request["users"] == [{"name": "memory-router", "id": 10001}]
    assert request["groups"] == [
        {"name": "memory-readers", "id": 10100},
        {"name": "memory-router", "id": 10001},
    ]
    assert (request["project"], request["volume"]) == ("memory", "memory-postgres")
    assert (request["subnet"], request["space"], request["policy_dir"]) == ("172.30.88.0/24", [STATE], POLICY)


def test_needed_images_are_those_that_the_lock_knows() -> None:
    assert set(preflight_files.needed_images("local")) == set(lock.FACT_TYPES)
    assert "embeddings" not in preflight_files.needed_images("openai")


def test_the_documentation_lists_exactly_the_rules() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "preflight.md").read_text()
    documented = re.findall(r"^### `([a-z-]+)`$", text, re.MULTILINE)
    assert documented
    assert sorted(documented) == sorted(preflight.RULES)
