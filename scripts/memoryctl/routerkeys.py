"""The router's key store and the device keys of declared principals.

Keys are made by the router's own command, in a one-shot container of the locked router image running as the router's
uid: the store accepts no other owner. A key is identified by the id in its receipt, never by its name alone.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import files, process
from .errors import Exit, Refused
from .files import Ownership
from .layout import Layout

STORE_IN_CONTAINER = "/var/lib/anvil-serving/router-keys"
STORE_FILE = "keys.sqlite3"
OUTBOX = "outbox"
ENDPOINTS = {"rest": "/v1/memory", "mcp": "/v1/memory/mcp"}
COMMAND_TIMEOUT = 60.0
RECEIPT_SCHEMA = "memory-bundle.device-key/v1"
UNKNOWN_KEY_ID = "key_known_after_the_run"


@dataclass(frozen=True)
class Principal:
    """A fixed principal: one device key, one alias, one bank."""

    name: str
    alias: str
    bank: str
    paths: tuple[str, ...]
    rpm: int
    expires_days: int

    @property
    def grant(self) -> dict[str, Any]:
        """What the key allows; a receipt with another grant does not fit this principal."""
        return {
            "alias": self.alias,
            "paths": sorted(self.paths),
            "rpm": self.rpm,
            "expires_days": self.expires_days,
        }


@dataclass(frozen=True)
class Store:
    """How to reach the key store on this host."""

    layout: Layout
    image: str
    uid: int
    gid: int

    @property
    def directory(self) -> Path:
        return self.layout.router_keys

    def command(self, *arguments: str) -> str:
        """Run `anvil-serving router keys …` as the router's uid, without network, and return its output."""
        configuration = self.layout.config / "router-keys"
        return process.run(
            [
                *(
                    "docker",
                    "run",
                    "--rm",
                    "--pull",
                    "never",
                    "--network",
                    "none",
                    "--read-only",
                    "--tmpfs",
                    "/tmp",
                ),
                *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--log-driver", "none"),
                *("--user", f"{self.uid}:{self.gid}"),
                *("--mount", f"type=bind,source={self.directory},target={STORE_IN_CONTAINER}"),
                *("--mount", f"type=bind,source={configuration},target=/etc/anvil,readonly"),
                *(
                    self.image,
                    "anvil-serving",
                    "router",
                    "keys",
                    *arguments,
                    "--config",
                    "/etc/anvil/config.toml",
                ),
            ],
            timeout=COMMAND_TIMEOUT,
            gate="router-keys",
        ).out

    def rows(self) -> dict[str, dict[str, Any]]:
        """Keys in the store by id: name, whether revoked, whether expired. Read without touching the store."""
        uri = f"file:{self.directory / STORE_FILE}?mode=ro"
        connection = sqlite3.connect(uri, uri=True)
        try:
            connection.row_factory = sqlite3.Row
            return {
                row["key_id"]: {
                    "name": row["name"],
                    "revoked": row["revoked_at"] is not None,
                    "expired": row["expires_at"] is not None and row["expires_at"] <= time.time(),
                }
                for row in connection.execute("select key_id, name, expires_at, revoked_at from keys")
            }
        except sqlite3.Error as error:
            raise Refused(
                "router-keys",
                f"the key store cannot be read: {error}",
                "without it nobody can be authenticated",
                f"restore {self.directory / STORE_FILE} from a backup, or look at what changed it",
                Exit.FAILED,
            ) from error
        finally:
            connection.close()


def ensure(store: Store, principals: Sequence[Principal], check: bool) -> tuple[list[str], dict[str, str]]:
    """Make the store and one device key for each principal exist.

    Returns:
        What changes, and the key id of each principal (in check mode a stand-in for a key that does not exist yet).
    """
    layout = store.layout
    changed = []
    router_private = Ownership(store.uid, store.gid, 0o700)
    for directory, want in (
        (store.directory, router_private),
        (store.directory / OUTBOX, router_private),
        (layout.device_keys, files.ROOT_PRIVATE_DIR),
        (layout.config / "router-keys", files.ROOT_PUBLIC_DIR),
    ):
        if files.ensure_directory(directory, want, check):
            changed.append(str(directory))
    configuration = (
        f'[server]\nauth_env = "ANVIL_ROUTER_TOKEN"\napi_keys_path = "{STORE_IN_CONTAINER}/{STORE_FILE}"\n'
    )
    target = layout.config / "router-keys" / "config.toml"
    if files.ensure_file(target, configuration.encode(), files.ROOT_PUBLIC, check):
        changed.append(str(target))
    initialised = files.require_kind(store.directory / STORE_FILE, "file")
    if not initialised:
        changed.append(f"key store {store.directory / STORE_FILE}")
        if not check:
            store.command("init")
    rows = store.rows() if initialised or not check else {}
    ids = {}
    for principal in principals:
        receipt = _receipt(layout, principal)
        if receipt is not None and _usable(layout, principal, receipt, rows):
            ids[principal.name] = receipt["key_id"]
            if not check:
                (store.directory / OUTBOX / principal.name).unlink(missing_ok=True)
            continue
        changed.append(f"device key of {principal.name}")
        ids[principal.name] = UNKNOWN_KEY_ID if check else _create(store, principal)
    return changed, ids


def _receipt(layout: Layout, principal: Principal) -> dict[str, Any] | None:
    path = layout.device_keys / f"{principal.name}.json"
    if not files.require_kind(path, "file"):
        return None
    receipt: dict[str, Any] = json.loads(path.read_text())
    return receipt


def _usable(
    layout: Layout, principal: Principal, receipt: dict[str, Any], rows: dict[str, dict[str, Any]]
) -> bool:
    """Whether the receipt, the secret file and the store agree. A disagreement is refused, not repaired by a new key."""
    secret = layout.device_keys / f"{principal.name}.key"
    row = rows.get(receipt["key_id"])
    problem = None
    if receipt["grant"] != principal.grant:
        problem = f"was made for another grant: {receipt['grant']}"
    elif row is None:
        problem = "is not in the key store"
    elif row["revoked"]:
        problem = "has been revoked"
    elif row["expired"]:
        problem = "has expired"
    elif not files.require_kind(secret, "file"):
        problem = f"has lost its secret file {secret}"
    elif files.sha256(secret.read_bytes()) != receipt["secret_sha256"]:
        problem = f"does not fit its secret file {secret}"
    if problem:
        raise Refused(
            "router-keys",
            f"the device key {receipt['key_id']} of principal {principal.name} {problem}",
            "a new key in its place would lock out the client that holds the old one",
            f"restore the matching files of {principal.name}, or move its receipt and secret in {layout.device_keys} away "
            "so that a new key is made, and give the new key to the client",
        )
    return True


def _create(store: Store, principal: Principal) -> str:
    """Make a key. An interrupted earlier attempt leaves a secret in the outbox and an unknown key: both are retired."""
    layout = store.layout
    outbox = store.directory / OUTBOX / principal.name
    if outbox.exists():
        _retire_half_made(store, principal.name)
        outbox.unlink()
    endpoints = [argument for path in sorted(principal.paths) for argument in ("--path", ENDPOINTS[path])]
    expiry = ["--expires-days", str(principal.expires_days)] if principal.expires_days else []
    answer = json.loads(
        store.command(
            *(
                "create",
                "--name",
                principal.name,
                "--model",
                principal.alias,
                *endpoints,
                "--rpm",
                str(principal.rpm),
                *expiry,
            ),
            *("--out", f"{STORE_IN_CONTAINER}/{OUTBOX}/{principal.name}"),
        )
    )
    secret = outbox.read_bytes()
    files.ensure_file(layout.device_keys / f"{principal.name}.key", secret, files.ROOT_PRIVATE, check=False)
    receipt = {
        "schema": RECEIPT_SCHEMA,
        "principal": principal.name,
        "key_id": answer["key_id"],
        "bank": principal.bank,
        "grant": principal.grant,
        "secret_sha256": files.sha256(secret),
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    files.ensure_file(
        layout.device_keys / f"{principal.name}.json",
        files.canonical(receipt) + b"\n",
        files.ROOT_PRIVATE,
        check=False,
    )
    outbox.unlink()
    key_id: str = answer["key_id"]
    return key_id


def _retire_half_made(store: Store, name: str) -> None:
    known = {json.loads(path.read_text())["key_id"] for path in store.layout.device_keys.glob("*.json")}
    for key_id, row in store.rows().items():
        if row["name"] == name and not row["revoked"] and key_id not in known:
            store.command("revoke", "--key-id", key_id)


def principal_from(raw: dict[str, Any]) -> Principal:
    """A principal as declared in the inventory."""
    return Principal(
        name=raw["name"],
        alias=raw["alias"],
        bank=raw["bank"],
        paths=tuple(raw.get("paths", ["rest", "mcp"])),
        rpm=int(raw.get("rpm", 60)),
        expires_days=int(raw.get("expires_days", 0)),
    )
