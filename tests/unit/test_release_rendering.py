"""Properties of the rendered release: what must hold for any inventory."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memoryctl import files, readback, release

from .rendering import lock_text, render

SECRETS = {
    "hindsight_stack_api_key": "canary-api-key-0001",
    "hindsight_stack_database_password": "canary-db-password-0002",
    "hindsight_stack_postgres_superuser_password": "canary-superuser-0003",
    "hindsight_stack_llm_api_key": "canary-llm-key-0004",
    "hindsight_stack_embeddings_api_key": "canary-embeddings-0005",
    "memory_router_master_token": "canary-master-token-0006",
}
WITH_PROVIDER = {
    "hindsight_stack_llm_provider": "openai",
    "hindsight_stack_llm_model": "stub-model",
    "hindsight_stack_llm_base_url": "http://192.0.2.9:8000/v1",
}


@pytest.fixture
def contents(tmp_path: Path) -> dict[str, str]:
    return render(tmp_path / "images.lock.json")


@pytest.fixture
def compose(contents: dict[str, str]) -> dict[str, Any]:
    model: dict[str, Any] = yaml.safe_load(contents["compose.yaml"])
    return model


def test_rendering_is_deterministic(tmp_path: Path) -> None:
    first = render(tmp_path / "images.lock.json")
    assert files.tree_hash(first) == files.tree_hash(render(tmp_path / "images.lock.json"))


def test_no_secret_is_in_a_release(tmp_path: Path) -> None:
    """S2-07, S0-05: a release holds no secret, whichever secrets the inventory gives."""
    text = json.dumps(render(tmp_path / "images.lock.json", **WITH_PROVIDER, **SECRETS))
    assert [name for name, value in SECRETS.items() if value in text] == []


def test_every_image_is_pinned_by_digest_and_from_the_lock(compose: dict[str, Any]) -> None:
    lock = {
        f"{image['repository']}:{image['tag']}@{image['index_digest']}"
        for image in json.loads(lock_text())["images"]
    }
    used = {service["image"] for service in compose["services"].values()}
    assert used == lock


def test_only_the_edge_publishes_and_on_given_addresses_only(compose: dict[str, Any]) -> None:
    """S2-64, S2-66: no port but the edge's, and none on a wildcard address."""
    published = {
        name: service["ports"] for name, service in compose["services"].items() if "ports" in service
    }
    assert list(published) == ["edge"]
    assert [port["host_ip"] for port in published["edge"]] == ["203.0.113.7"]


def test_networks_connect_only_who_must_talk(compose: dict[str, Any]) -> None:
    members: dict[str, set[str]] = {}
    for name, service in compose["services"].items():
        for network in service["networks"]:
            members.setdefault(network, set()).add(name)
    assert members == {
        "database": {"postgres", "migrate", "api", "worker"},
        "embeddings": {"api", "worker", "embeddings"},
        "origin": {"api", "router"},
        "edge": {"router", "edge"},
        "public": {"edge"},
    }
    open_networks = {
        name for name, network in compose["networks"].items() if not (network or {}).get("internal")
    }
    assert open_networks == {"public"}


def test_egress_exists_for_hindsight_alone_and_only_with_a_provider(tmp_path: Path) -> None:
    """S0-20: only a declared provider opens a way out, and only for the API and the worker."""
    model = yaml.safe_load(render(tmp_path / "images.lock.json", **WITH_PROVIDER)["compose.yaml"])
    assert {name for name, service in model["services"].items() if "egress" in service["networks"]} == {
        "api",
        "worker",
    }


def test_every_container_is_hardened(compose: dict[str, Any]) -> None:
    added = {}
    for name, service in compose["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert int(service["user"].split(":")[0]) > 0, name
        assert service["pids_limit"] > 0 and service["mem_limit"], name
        assert service["logging"]["options"]["max-size"], name
        assert "privileged" not in service and "network_mode" not in service, name
        if name != "migrate":
            assert service["healthcheck"]["test"][0] == "CMD", name
        added[name] = service.get("cap_add", [])
    assert {name: caps for name, caps in added.items() if caps} == {"edge": ["NET_BIND_SERVICE"]}


def test_binds_are_directories_that_must_exist(compose: dict[str, Any]) -> None:
    """B1, B6: a bound file would pin an inode, a missing source would become a directory."""
    binds = [volume for service in compose["services"].values() for volume in service.get("volumes", [])]
    binds = [volume for volume in binds if volume["type"] == "bind"]
    assert binds
    for volume in binds:
        assert volume["bind"] == {"create_host_path": False}, volume
        assert not Path(volume["source"]).suffix or "-" in Path(volume["source"]).name, volume
        assert "docker.sock" not in volume["source"]


def test_hindsight_is_closed_by_configuration(compose: dict[str, Any]) -> None:
    """S0-01, S0-02, S0-04, S2-64, S2-65: tenancy on, MCP and UI off, no bypass, one extension."""
    environment = compose["services"]["api"]["environment"]
    assert environment["HINDSIGHT_API_TENANT_EXTENSION"].endswith(":ApiKeyTenantExtension")
    assert environment["HINDSIGHT_API_MCP_ENABLED"] == environment["HINDSIGHT_ENABLE_CP"] == "false"
    assert environment["HINDSIGHT_API_LLM_TRACE_ENABLED"] == "false"
    extensions = {name for name in environment if name.endswith("_EXTENSION")}
    assert extensions == {"HINDSIGHT_API_TENANT_EXTENSION"}
    forbidden = {"HINDSIGHT_API_MCP_AUTH_TOKEN", "HINDSIGHT_API_TENANT_MCP_AUTH_DISABLED", "PYTHONPATH"}
    assert not forbidden & set(environment)


def test_api_and_worker_share_image_and_environment(compose: dict[str, Any]) -> None:
    """S0-26: both run the same digest with the same settings."""
    api, worker = compose["services"]["api"], compose["services"]["worker"]
    assert (api["image"], api["environment"]) == (worker["image"], worker["environment"])
    assert worker["environment"]["HINDSIGHT_API_WORKER_ID"] == "memory-worker-1"


def test_stop_grace_covers_what_the_services_need(compose: dict[str, Any]) -> None:
    seconds = {
        name: int(service.get("stop_grace_period", "10s")[:-1])
        for name, service in compose["services"].items()
    }
    assert seconds["api"] >= 60 and seconds["worker"] >= 60 and seconds["router"] >= 25


def test_router_configuration_names_private_origin_and_keys(contents: dict[str, str]) -> None:
    """S2-05, S2-09, S2-10, S2-12: one route for each principal, bound to its key id, to a literal private address."""
    configuration = tomllib.loads(contents["config/router/config.toml"])
    routes = configuration["router"]["memory_routes"]
    assert [(route["alias"], route["principal"], route["bank"]) for route in routes] == [
        ("memory.canary", "key_00112233445566aa", "memory-canary"),
        ("memory.desk", "key_00112233445566bb", "desk"),
    ]
    assert {route["base_url"] for route in routes} == {"http://172.30.88.10:8888"}


def test_the_edge_lets_two_targets_pass(contents: dict[str, str]) -> None:
    """S2-01: exactly two raw request targets, by POST, reach the router."""
    caddyfile = contents["config/edge/Caddyfile"]
    matchers = re.findall(
        r"\n\t@(\w+) \{(.*?)\}\n", caddyfile.replace("{http.request.orig_uri}", "ORIG"), re.DOTALL
    )
    assert {name: body.split() for name, body in matchers} == {
        "memory": ["method", "POST", "vars", "ORIG", "/v1/memory", "/v1/memory/mcp"],
    }
    assert caddyfile.count("reverse_proxy") == 1 and "reverse_proxy router:8000" in caddyfile


def test_configuration_is_mounted_by_content(contents: dict[str, str], compose: dict[str, Any]) -> None:
    directories = release.configuration_directories(contents)
    sources = {
        volume["source"] for service in compose["services"].values() for volume in service.get("volumes", [])
    }
    assert {f"/var/lib/memory/config/{name}" for name in directories} <= sources


def test_a_changed_router_setting_changes_the_router_alone(tmp_path: Path) -> None:
    before = yaml.safe_load(render(tmp_path / "images.lock.json")["compose.yaml"])["services"]
    changed = render(tmp_path / "images.lock.json", memory_router_timeout_seconds=121)
    after = yaml.safe_load(changed["compose.yaml"])["services"]
    assert {name for name in before if before[name] != after[name]} == {"router", "edge"}


def test_every_gate_of_the_release_is_known(contents: dict[str, str]) -> None:
    gates = json.loads(contents["release.json"])["gates"]
    assert len(gates) >= 30
    assert set(gates) == set(readback.GATES) and len(gates) == len(set(gates))


def test_the_program_travels_with_the_release(contents: dict[str, str]) -> None:
    assert {"memoryctl/__main__.py", "memoryctl/readback.py"} <= set(contents)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    model=st.text(
        st.characters(codec="ascii", min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=30
    )
)
def test_provider_settings_reach_compose_unchanged(tmp_path: Path, model: str) -> None:
    """A1, A2: quotes, hashes, percent and dollar signs survive the way into the environment."""
    text = render(tmp_path / "images.lock.json", **{**WITH_PROVIDER, "hindsight_stack_llm_model": model})[
        "compose.yaml"
    ]
    value = yaml.safe_load(text)["services"]["api"]["environment"]["HINDSIGHT_API_LLM_MODEL"]
    assert value.replace("$$", "$") == model
    assert "$" not in value.replace("$$", "")
