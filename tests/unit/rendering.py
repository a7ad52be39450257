"""Renders a release exactly as the roles do, without a host: role defaults and variables through Ansible's own templar."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import filter_loader, init_plugin_loader
from ansible.template import Templar, trust_as_template

ROOT = Path(__file__).resolve().parents[2]
ROLES = (
    "container_engine",
    "image_supply",
    "memory_policy",
    "hindsight_stack",
    "memory_router",
    "memory_edge",
    "memory_router_keys",
    "hindsight_banks",
    "memory_activation",
)


def digest(seed: str) -> str:
    """A well-formed digest that differs for each seed."""
    import hashlib

    return "sha256:" + hashlib.sha256(seed.encode()).hexdigest()


def lock_text() -> str:
    """A valid image lock of all five images."""
    facts: dict[str, dict[str, Any]] = {
        "postgres": {"uid": 999, "gid": 999, "postgres_major": 17, "pgvector_version": "0.8.0"},
        "hindsight": {"uid": 1000, "gid": 1000, "api_version": "1.1.0", "migration_head": "c7e2f9a4d1b8"},
        "router": {"uid": 10001, "gid": 10001, "anvil_serving_version": "2.0.2", "key_schema_version": 1},
        "edge": {"uid": 10002, "gid": 10002, "caddy_version": "2.11.7"},
        "embeddings": {"uid": 10003, "gid": 10003, "model": "e5-passage", "dimension": 384},
    }
    images = [
        {
            "name": name,
            "repository": f"registry.example.test:5000/memory/{name}",
            "tag": "1",
            "index_digest": digest(name + "index"),
            "platforms": {
                "linux/amd64": {
                    "manifest_digest": digest(name + "manifest"),
                    "config_digest": digest(name + "config"),
                }
            },
            "provenance": {"kind": "upstream", "statement": "fixture of the tests"},
            "signature": {"kind": "unsigned", "reason": "fixture of the tests"},
            "facts": content,
        }
        for name, content in facts.items()
    ]
    return json.dumps({"schema": "memory-bundle.image-lock/v1", "images": images})


@cache
def _role_variables() -> dict[str, Any]:
    init_plugin_loader()
    loader = DataLoader()
    variables: dict[str, Any] = {}
    for kind in ("defaults", "vars"):
        for role in ROLES:
            path = ROOT / "roles" / role / kind / "main.yml"
            if path.exists():
                variables.update(loader.load_from_file(str(path), trusted_as_template=True))
            filters = ROOT / "roles" / role / "filter_plugins"
            if filters.exists():
                filter_loader.add_directory(str(filters))
    return variables


def render(lock_file: Path, **settings: Any) -> dict[str, str]:
    """Contents of the release for `settings` of the inventory (unset ones: a working example)."""
    lock_file.write_text(lock_text())
    variables = {
        **copy.copy(_role_variables()),
        "role_path": str(ROOT / "roles" / "memory_activation"),
        "inventory_dir": str(lock_file.parent),
        "image_supply_lock_file": str(lock_file),
        "memory_edge_names": ["memory.example.test", "203.0.113.7"],
        "memory_edge_bind_addresses": ["203.0.113.7"],
        "memory_router_keys_principals": [{"name": "desk", "alias": "memory.desk", "bank": "desk"}],
        "memory_router_keys_result": {
            "key_ids": {"canary": "key_00112233445566aa", "desk": "key_00112233445566bb"}
        },
        **settings,
    }
    templar = Templar(loader=DataLoader(), variables=variables)
    contents: dict[str, str] = templar.template(trust_as_template("{{ __memory_activation_contents }}"))
    return {str(path): str(text) for path, text in contents.items()}
