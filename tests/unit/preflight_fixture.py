"""A working inventory and a fit host for the tests of the preflight, and certificates to go with them."""

from __future__ import annotations

import copy
import hashlib
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bundle import lock, preflight
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

NOW = 1_800_000_000.0
NAMES = ("memory.example.org", "203.0.113.7")
STATE, ETC, POLICY = "/var/lib/memory", "/etc/memory", "/etc/memory/policy"
FACTS: dict[str, dict[str, Any]] = {
    "postgres": {"uid": 999, "gid": 999, "postgres_major": 17, "pgvector_version": "0.8.0"},
    "hindsight": {"uid": 1000, "gid": 1000, "api_version": "1.1.0", "migration_head": "c7e2f9a4d1b8"},
    "router": {"uid": 10001, "gid": 10001, "anvil_serving_version": "2.0.2", "key_schema_version": 1},
    "edge": {"uid": 10002, "gid": 10002, "caddy_version": "2.11.7"},
    "embeddings": {"uid": 10003, "gid": 10003, "model": "e5-passage", "dimension": 384},
}

Key = ec.EllipticCurvePrivateKey


def image(name: str, platforms: Sequence[str] = ("linux/amd64", "linux/arm64")) -> lock.Image:
    """A locked image with well-formed digests."""

    def digest(seed: str) -> str:
        return "sha256:" + hashlib.sha256(f"{name} {seed}".encode()).hexdigest()

    return lock.Image(
        name=name,
        repository=f"registry.example.org/memory/{name}",
        tag="1",
        index_digest=digest("index"),
        platforms={
            item: lock.PlatformDigests(digest(f"{item} manifest"), digest(f"{item} configuration"))
            for item in platforms
        },
        provenance=lock.Upstream("fixture of the tests"),
        signature=lock.Unsigned("fixture of the tests"),
        facts=FACTS[name],
    )


def issue(
    subject: str,
    key: Key,
    issuer: x509.Certificate | None = None,
    issuer_key: Key | None = None,
    *,
    names: Sequence[str] = (),
    begins: float = NOW - 86400,
    ends: float = NOW + 86400,
    authority: bool = False,
    usage: x509.ObjectIdentifier = ExtendedKeyUsageOID.SERVER_AUTH,
) -> x509.Certificate:
    """A certificate; signed by itself without an issuer."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer.subject if issuer else name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.fromtimestamp(begins, UTC))
        .not_valid_after(datetime.fromtimestamp(ends, UTC))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    )
    if names:
        alternatives = [alternative(item) for item in names]
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    return builder.sign(issuer_key or key, hashes.SHA256())


def alternative(name: str) -> x509.GeneralName:
    """`name` as an entry of a certificate."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def pem(*certificates: x509.Certificate) -> bytes:
    """Certificates as one PEM file."""
    return b"".join(item.public_bytes(serialization.Encoding.PEM) for item in certificates)


def key_pem(key: Key, passphrase: bytes | None = None) -> bytes:
    """A private key as a PEM file."""
    locking: serialization.KeySerializationEncryption = (
        serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    )
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locking)


def leaf_hash(certificate: x509.Certificate) -> str:
    """SHA-256 of a certificate."""
    return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest()


def directory(path: str, kind: str = "directory", uid: int = 0, mode: str = "0755") -> dict[str, Any]:
    """A directory as memory_probe describes it, with ancestors that are in order."""
    parents = [str(parent) for parent in reversed(Path(path).parents)]
    parts = [{"path": item, "kind": "directory", "uid": 0, "gid": 0, "mode": "0755"} for item in parents]
    own = {"path": path, "kind": kind, "uid": uid, "gid": 0, "mode": mode}
    return {**own, "components": [*parts, own]}


@dataclass
class Case:
    """Settings and host of one test. Tests change one thing and look at the refusals."""

    files: Path
    settings: dict[str, Any]
    probe: dict[str, Any]
    images: list[lock.Image]
    now: float = NOW
    names: list[str] = field(default_factory=list)
    private_key: str | None = None
    options: list[str] = field(default_factory=list)

    def set(self, **settings: Any) -> Case:
        """Change settings."""
        self.settings.update(settings)
        return self

    def host(self, **facts: Any) -> Case:
        """Change what the probe found."""
        self.probe.update(facts)
        return self

    def engine(self, **facts: Any) -> Case:
        """Change what the probe found of the container engine."""
        self.probe["docker"].update(facts)
        return self

    def volume(self, **facts: Any) -> Case:
        """Put a database volume on the host, one that fits unless `facts` say otherwise."""
        fitting = {"exists": True, "project": "memory", "empty": False, "uid": 999, "postgres_major": 17}
        self.probe["volume"].update({**fitting, **facts})
        return self

    def directory(self, path: str, *, like: str = "", **facts: Any) -> Case:
        """Change what the probe found at `path`, on the way to `like`."""
        for item in self.probe["directories"]:
            if item["path"] == (like or path):
                for part in (item, *item["components"]):
                    if part["path"] == path:
                        part.update(facts)
        return self

    def file(self, name: str, content: bytes, mode: int = 0o600) -> str:
        """Write a file on the controller; returns its path."""
        path = self.files / name
        path.write_bytes(content)
        path.chmod(mode)
        return str(path)

    def certificate(self, chain: Sequence[x509.Certificate], key: Key) -> Case:
        """Provide a certificate chain and its key."""
        return self.set(
            memory_edge_tls_mode="provided",
            memory_edge_certificate_file=self.file("tls.crt", pem(*chain)),
            memory_edge_private_key_file=self.file("tls.key", key_pem(key)),
            memory_edge_certificate_sha256=leaf_hash(chain[0]),
        )

    def refusals(self) -> list[preflight.Refusal]:
        """What the preflight refuses."""
        (self.files / "images.lock.json").write_text(lock.dump(lock.Lock(tuple(self.images))))
        return preflight.refusals(
            self.settings,
            self.probe,
            self.now,
            names=self.names,
            private_key=self.private_key,
            limiting_options=self.options,
        )

    def ids(self) -> list[str]:
        """Identifiers of what the preflight refuses."""
        return [refusal.id for refusal in self.refusals()]


def good_case(files: Path) -> Case:
    """Settings and a host with nothing to refuse: a fresh Debian 13 without an engine would do as well."""
    settings = {
        "memory_preflight_only": False,
        "memory_preflight_clock_tolerance_seconds": 60,
        "memory_preflight_min_free_disk_bytes": 10 * 2**30,
        "memory_preflight_min_memory_bytes": 2 * 2**30,
        "container_engine_packages": {"Debian 13": ["docker.io", "docker-compose"]},
        "container_engine_min_version": "20.10",
        "container_engine_min_compose_version": "2.24",
        "container_engine_address_pools": [],
        "image_supply_lock_file": str(files / "images.lock.json"),
        "image_supply_registry_ca_files": {},
        "image_supply_pull_timeout_seconds": 1800,
        "memory_activation_state_dir": STATE,
        "memory_activation_etc_dir": ETC,
        "memory_activation_project": "memory",
        "memory_activation_wait_seconds": 180,
        "memory_activation_readback_passes": 2,
        "memory_activation_compatible_heads": [],
        "memory_activation_delete_data": False,
        "memory_activation_delete_confirm": "",
        "memory_policy_dir": POLICY,
        "memory_policy_reader_group": "memory-readers",
        "memory_policy_reader_gid": 10100,
        "memory_policy_owner": "bundle",
        "memory_policy_users": {},
        "hindsight_stack_llm_provider": "none",
        "hindsight_stack_llm_model": "",
        "hindsight_stack_llm_base_url": "",
        "hindsight_stack_llm_api_key": "",
        "hindsight_stack_embeddings_provider": "local",
        "hindsight_stack_embeddings_model": "",
        "hindsight_stack_embeddings_base_url": "",
        "hindsight_stack_embeddings_api_key": "",
        "hindsight_stack_embeddings_dimension": 0,
        "hindsight_stack_reranker_provider": "rrf",
        "hindsight_stack_reranker_base_url": "",
        "hindsight_stack_worker_id": "memory-worker-1",
        "hindsight_stack_origin_subnet": "172.30.88.0/24",
        "hindsight_stack_origin_address": "172.30.88.10",
        "hindsight_stack_api_key": "",
        "hindsight_stack_database_password": "",
        "hindsight_stack_postgres_superuser_password": "",
        "hindsight_stack_memory_limits": {
            "postgres": "1g",
            "api": "1536m",
            "worker": "1536m",
            "embeddings": "1g",
            "router": "256m",
            "edge": "256m",
        },
        "hindsight_stack_volume_name": "memory-postgres",
        "memory_router_uid": 10001,
        "memory_router_gid": 10001,
        "memory_router_user": "memory-router",
        "memory_router_master_token": "",
        "memory_router_timeout_seconds": 120,
        "memory_router_keys_principals": [{"name": "desk", "alias": "memory.desk", "bank": "desk"}],
        "memory_edge_names": list(NAMES),
        "memory_edge_bind_addresses": ["203.0.113.7"],
        "memory_edge_bind_any": False,
        "memory_edge_https_port": 443,
        "memory_edge_tls_mode": "internal",
        "memory_edge_certificate_file": "",
        "memory_edge_private_key_file": "",
        "memory_edge_certificate_sha256": "",
        "memory_edge_acme_ca_url": "",
        "memory_edge_acme_email": "",
        "memory_edge_acme_ca_root_file": "",
        "hindsight_banks_extra": ["team"],
    }
    request = preflight.probe_request(settings)
    probe = {
        "os": {"id": "debian", "name": "Debian", "version": "13"},
        "machine": "x86_64",
        "kernel": "6.12.0",
        "python": "3.13.5",
        "uid": 0,
        "systemd": True,
        "memory_total_bytes": 8 * 2**30,
        "time": NOW - 0.5,
        "controller_time": NOW - 1,
        "docker": {
            "installed": True,
            "running": True,
            "cli": True,
            "product": "Engine",
            "engine_version": "26.1.5+dfsg1",
            "compose_version": "2.26.1-4",
            "storage_driver": "overlay2",
            "security_options": ["name=seccomp,profile=builtin", "name=cgroupns"],
            "data_root": "/var/lib/docker",
            "error": "",
        },
        "space": [
            {
                "path": "/var/lib/docker",
                "measured": "/var/lib",
                "free_bytes": 50 * 2**30,
                "free_inodes": 10**6,
            },
            {"path": STATE, "measured": "/var/lib", "free_bytes": 50 * 2**30, "free_inodes": None},
        ],
        "addresses": ["127.0.0.1", "203.0.113.7"],
        "listen": [{"address": "203.0.113.7", "port": 443, "state": "free", "holder": None}],
        "directories": [directory(path) for path in request["directories"]],
        "policy_leftover": False,
        "users": [{**item, "id_of_name": None, "name_of_id": None} for item in request["users"]],
        "groups": [{**item, "id_of_name": None, "name_of_id": None} for item in request["groups"]],
        "containers": [],
        "volume": {
            "name": "memory-postgres",
            "exists": False,
            "project": "",
            "empty": True,
            "uid": None,
            "postgres_major": None,
        },
        "networks": [],
        "routes": [],
    }
    owners = {f"{STATE}/router-keys": 10001, f"{STATE}/edge-data": 10002}
    case = Case(files, settings, copy.deepcopy(probe), [image(name) for name in FACTS])
    for path, uid in owners.items():
        case.directory(path, uid=uid, mode="0700")
    return case
