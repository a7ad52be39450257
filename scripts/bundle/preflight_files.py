"""Rules for the files on the controller that settings name: certificates, keys, authorities and the image lock."""

from __future__ import annotations

import hashlib
import ipaddress
import itertools
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from . import lock
from .errors import BundleError
from .preflight_settings import SHOWN, Settings

REGISTRY = re.compile(r"[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?:[0-9]{1,5}")
VAULT_HEADER = b"$ANSIBLE_VAULT;"


def examine(good: Settings, now: float, private_key: str | None) -> lock.Lock | None:
    """Apply all rules for files.

    Args:
        good: the settings.
        now: time on the controller, in seconds since 1970.
        private_key: text of the edge's private key where the caller has read it, for example through a vault.

    Returns:
        The image lock, or None when there is no valid one.
    """
    if good.has("memory_edge_tls_mode") and good["memory_edge_tls_mode"] == "provided":
        _provided_certificate(good, now, private_key)
    if good.has("memory_edge_tls_mode", "memory_edge_acme_ca_root_file"):
        root = good["memory_edge_acme_ca_root_file"]
        if good["memory_edge_tls_mode"] == "acme" and root and not certificates(root):
            good.findings.add("acme-root", f"memory_edge_acme_ca_root_file: {root} holds no certificate")
    if good.has("image_supply_registry_ca_files"):
        _registry_authorities(good)
    return _lock(good) if good.has("image_supply_lock_file") else None


def certificates(path: str) -> list[x509.Certificate]:
    """Certificates of a PEM file in the order of the file; empty when it cannot be read or holds none."""
    try:
        return x509.load_pem_x509_certificates(Path(path).read_bytes())
    except (OSError, ValueError):
        return []


def _provided_certificate(good: Settings, now: float, private_key: str | None) -> None:
    if not good.has("memory_edge_certificate_file"):
        return
    path = good["memory_edge_certificate_file"]
    chain = certificates(path)
    if not chain:
        good.findings.add(
            "tls-certificate", f"memory_edge_certificate_file: {path or 'nothing'} holds no certificate"
        )
        return
    leaf = chain[0]
    _chain(good, chain)
    _validity(good, chain, now)
    if good.has("memory_edge_names"):
        missing = [name for name in good["memory_edge_names"] if not covers(leaf, name)]
        if missing:
            good.findings.add(
                "tls-names", f"memory_edge_certificate_file does not cover {', '.join(missing)[:SHOWN]}"
            )
    if good.has("memory_edge_certificate_sha256"):
        _pin(good, leaf)
    if good.has("memory_edge_private_key_file"):
        _key(good, leaf, private_key)


def _chain(good: Settings, chain: Sequence[x509.Certificate]) -> None:
    for issued, issuer in itertools.pairwise(chain):
        try:
            issued.verify_directly_issued_by(issuer)
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
            good.findings.add(
                "tls-chain",
                f"memory_edge_certificate_file: {_subject(issuer)} follows {_subject(issued)} in the file but did not sign it",
            )
            return
    if not _serves(chain[0]):
        good.findings.add(
            "tls-chain",
            f"memory_edge_certificate_file: {_subject(chain[0])} comes first and is no certificate of a server",
        )


def _serves(leaf: x509.Certificate) -> bool:
    """Whether the certificate is one for a server. A self-signed one may be its own authority."""
    try:
        if (
            leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
            and leaf.issuer != leaf.subject
        ):
            return False
    except x509.ExtensionNotFound:
        pass
    try:
        usage = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return True
    return ExtendedKeyUsageOID.SERVER_AUTH in usage


def _validity(good: Settings, chain: Sequence[x509.Certificate], now: float) -> None:
    moment = datetime.fromtimestamp(now, UTC)
    for certificate in chain:
        if moment > certificate.not_valid_after_utc:
            good.findings.add(
                "tls-validity",
                f"memory_edge_certificate_file: {_subject(certificate)} expired at {certificate.not_valid_after_utc}",
            )
        elif moment < certificate.not_valid_before_utc:
            good.findings.add(
                "tls-validity",
                f"memory_edge_certificate_file: {_subject(certificate)} is not valid before {certificate.not_valid_before_utc}",
            )


def _subject(certificate: x509.Certificate) -> str:
    return certificate.subject.rfc4514_string()[:SHOWN] or "a certificate without a subject"


def covers(leaf: x509.Certificate, name: str) -> bool:
    """Whether clients accept `leaf` for `name`, a DNS name or an address."""
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    try:
        return ipaddress.ip_address(name) in names.get_values_for_type(x509.IPAddress)
    except ValueError:
        pass
    domain = name.partition(".")[2]
    return any(
        entry.lower() == name or (domain and entry.lower() == f"*.{domain}")
        for entry in names.get_values_for_type(x509.DNSName)
    )


def _pin(good: Settings, leaf: x509.Certificate) -> None:
    wanted = good["memory_edge_certificate_sha256"]
    found = hashlib.sha256(leaf.public_bytes(serialization.Encoding.DER)).hexdigest()
    if wanted != found:
        said = wanted[:SHOWN] if wanted else "empty"
        good.findings.add(
            "tls-pin", f"memory_edge_certificate_sha256 is {said}; the leaf of the file has {found}"
        )


def _key(good: Settings, leaf: x509.Certificate, private_key: str | None) -> None:
    path = good["memory_edge_private_key_file"]
    try:
        raw = Path(path).read_bytes() if path else b""
        mode = Path(path).stat().st_mode if path else 0
    except OSError as error:
        good.findings.add("tls-key", f"memory_edge_private_key_file: {path} cannot be read: {error.strerror}")
        return
    vaulted = raw.startswith(VAULT_HEADER)
    if not vaulted and mode & 0o077:
        good.findings.add(
            "tls-key-mode", f"memory_edge_private_key_file: {path} has the mode {mode & 0o7777:04o}"
        )
    data = private_key.encode() if private_key is not None else raw
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        good.findings.add(
            "tls-key", f"memory_edge_private_key_file: {path or 'nothing'} holds no usable private key"
        )
        return
    encoding, form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    if key.public_key().public_bytes(encoding, form) != leaf.public_key().public_bytes(encoding, form):
        good.findings.add(
            "tls-key-mismatch", f"memory_edge_private_key_file: {path} is not the key of {_subject(leaf)}"
        )


def _registry_authorities(good: Settings) -> None:
    name = "image_supply_registry_ca_files"
    for registry, path in good[name].items():
        if not REGISTRY.fullmatch(registry):
            good.findings.add("registry-ca", f"{name}: {registry[:SHOWN]!r} is not of the form host:port")
        elif not isinstance(path, str) or not path.startswith("/"):
            good.findings.add(
                "controller-path", f"{name}: the file for {registry} is not given by its full path"
            )
        elif not certificates(path):
            good.findings.add("registry-ca", f"{name}: {path} holds no certificate")


def needed_images(embeddings_provider: str) -> tuple[str, ...]:
    """Names of the images that a deployment with this provider of embeddings runs."""
    return (
        "postgres",
        "hindsight",
        "router",
        "edge",
        *(("embeddings",) if embeddings_provider == "local" else ()),
    )


def _lock(good: Settings) -> lock.Lock | None:
    try:
        parsed = lock.load(good["image_supply_lock_file"])
    except BundleError as error:
        good.findings.add("lock-invalid", error.what, error.fix)
        return None
    if not good.has("hindsight_stack_embeddings_provider"):
        return parsed
    needed = needed_images(good["hindsight_stack_embeddings_provider"])
    present = [image.name for image in parsed.images]
    for image in needed:
        if image not in present:
            good.findings.add("lock-image-missing", f"the image lock has no image named {image}")
    for image in present:
        if image not in needed:
            good.findings.add("lock-image-unused", f"nothing uses the image {image} of the lock")
    _facts(good, {image.name: image.facts for image in parsed.images if image.name in needed})
    return parsed


def _facts(good: Settings, facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare the settings with what the lock says of the images."""
    if good.has("hindsight_stack_embeddings_dimension") and "embeddings" in facts:
        wanted, given = facts["embeddings"]["dimension"], good["hindsight_stack_embeddings_dimension"]
        if given not in (0, wanted):
            good.findings.add(
                "embeddings-dimension",
                f"hindsight_stack_embeddings_dimension is {given}, the locked image has {wanted}",
            )
    others = {name: image for name, image in facts.items() if name != "router"}
    for setting, key in (
        ("memory_router_uid", "uid"),
        ("memory_router_gid", "gid"),
        ("memory_policy_reader_gid", "gid"),
    ):
        for name, image in others.items():
            if good.has(setting) and good[setting] == image[key]:
                good.findings.add(
                    "identity-shared", f"{setting} is {good[setting]}, which is the {key} of {name}"
                )
    both = good.has("memory_router_gid", "memory_policy_reader_gid")
    if both and good["memory_router_gid"] == good["memory_policy_reader_gid"]:
        good.findings.add("identity-shared", "memory_router_gid and memory_policy_reader_gid are equal")
