"""Rules for the settings of an inventory, which need neither the host nor a file."""

from __future__ import annotations

import difflib
import ipaddress
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from .refusal import Findings

#: Public variables of the roles of site.yml and their kinds.
SETTINGS: Mapping[str, Mapping[str, str]] = {
    "memory_preflight": {
        "memory_preflight_only": "bool",
        "memory_preflight_clock_tolerance_seconds": "int",
        "memory_preflight_min_free_disk_bytes": "int",
        "memory_preflight_min_memory_bytes": "int",
    },
    "container_engine": {
        "container_engine_packages": "dict",
        "container_engine_min_version": "str",
        "container_engine_min_compose_version": "str",
        "container_engine_address_pools": "list of dict",
    },
    "image_supply": {
        "image_supply_lock_file": "controller file",
        "image_supply_registry_ca_files": "dict",
        "image_supply_pull_timeout_seconds": "int",
    },
    "memory_activation": {
        "memory_activation_state_dir": "path",
        "memory_activation_etc_dir": "path",
        "memory_activation_project": "str",
        "memory_activation_wait_seconds": "int",
        "memory_activation_readback_passes": "int",
        "memory_activation_compatible_heads": "list of str",
        "memory_activation_delete_data": "bool",
        "memory_activation_delete_confirm": "str",
    },
    "memory_policy": {
        "memory_policy_dir": "path",
        "memory_policy_reader_group": "str",
        "memory_policy_reader_gid": "int",
        "memory_policy_owner": "str",
        "memory_policy_users": "dict",
    },
    "hindsight_stack": {
        "hindsight_stack_llm_provider": "str",
        "hindsight_stack_llm_model": "str",
        "hindsight_stack_llm_base_url": "url",
        "hindsight_stack_llm_api_key": "secret",
        "hindsight_stack_embeddings_provider": "str",
        "hindsight_stack_embeddings_model": "str",
        "hindsight_stack_embeddings_base_url": "url",
        "hindsight_stack_embeddings_api_key": "secret",
        "hindsight_stack_embeddings_dimension": "int",
        "hindsight_stack_reranker_provider": "str",
        "hindsight_stack_reranker_base_url": "url",
        "hindsight_stack_worker_id": "str",
        "hindsight_stack_origin_subnet": "str",
        "hindsight_stack_origin_address": "str",
        "hindsight_stack_api_key": "secret",
        "hindsight_stack_database_password": "secret",
        "hindsight_stack_postgres_superuser_password": "secret",
        "hindsight_stack_memory_limits": "dict",
        "hindsight_stack_volume_name": "str",
    },
    "memory_router": {
        "memory_router_uid": "int",
        "memory_router_gid": "int",
        "memory_router_user": "str",
        "memory_router_master_token": "secret",
        "memory_router_timeout_seconds": "int",
    },
    "memory_router_keys": {"memory_router_keys_principals": "list of dict"},
    "memory_edge": {
        "memory_edge_names": "list of str",
        "memory_edge_bind_addresses": "list of str",
        "memory_edge_bind_any": "bool",
        "memory_edge_https_port": "int",
        "memory_edge_tls_mode": "str",
        "memory_edge_certificate_file": "controller file",
        "memory_edge_private_key_file": "controller file",
        "memory_edge_certificate_sha256": "str",
        "memory_edge_acme_ca_url": "url",
        "memory_edge_acme_email": "str",
        "memory_edge_acme_ca_root_file": "controller file",
    },
    "hindsight_banks": {"hindsight_banks_extra": "list of str"},
}

#: Names with a role's prefix that are results or internal to roles, or settings of other playbooks.
NOT_SETTINGS = frozenset(
    {
        "image_supply_images",
        "memory_activation_removed",
        "memory_activation_result",
        "memory_activation_staged",
        "memory_preflight_passed",
        "memory_preflight_probe",
        "memory_readback_result",
        "memory_router_keys_result",
    }
)

#: Networks of which the router accepts an origin.
PRIVATE_NETWORKS = tuple(
    ipaddress.IPv4Network(text) for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
)

BANK = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
ALIAS = re.compile(r"[a-z][a-z0-9._-]{0,127}")
PRINCIPAL_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")
POLICY_PRINCIPAL = re.compile(r"human:[0-9a-f]{64}")
DNS_NAME = re.compile(
    r"(?=.{1,253}\Z)[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)*"
)
CANARY: Mapping[str, str] = {"name": "canary", "alias": "memory.canary", "bank": "memory-canary"}
POLICY_OPERATIONS = ("retain", "recall", "reflect", "list", "detail", "invalidate", "restore")
SERVICES = ("postgres", "api", "worker", "embeddings", "router", "edge")
MAX_PRINCIPALS = 127
MAX_DIMENSION = 2000
MAX_POLICY_BYTES = 1024 * 1024
SECRET_LENGTHS = (16, 512)
MAX_ID = 2**31 - 2
SHOWN = 80

_NAME_OF_TYPE = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "text",
    type(None): "empty (null)",
}
_BOOLEAN_TEXT = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
CHOICES: Mapping[str, tuple[str, ...]] = {
    "hindsight_stack_llm_provider": (
        "none", "openai", "anthropic", "gemini", "groq", "ollama", "lmstudio", "litellm", "claude-code",
    ),
    "hindsight_stack_embeddings_provider": ("local", "openai", "tei"),
    "hindsight_stack_reranker_provider": ("rrf", "tei"),
    "memory_policy_owner": ("bundle", "connect"),
    "memory_edge_tls_mode": ("internal", "provided", "acme"),
}  # fmt: skip
_RANGES: Mapping[str, tuple[int, int]] = {
    "memory_preflight_clock_tolerance_seconds": (1, 3600),
    "memory_preflight_min_free_disk_bytes": (0, 2**63),
    "memory_preflight_min_memory_bytes": (0, 2**63),
    "image_supply_pull_timeout_seconds": (10, 86400),
    "memory_activation_wait_seconds": (10, 3600),
    "memory_activation_readback_passes": (1, 10),
    "memory_policy_reader_gid": (1, MAX_ID),
    "memory_router_uid": (1, MAX_ID),
    "memory_router_gid": (1, MAX_ID),
    "memory_router_timeout_seconds": (1, 300),
    "memory_edge_https_port": (1, 65535),
}
_NAME_FORM = "letters, digits, . _ - (a letter or digit first)"
_ACCOUNT = (r"[a-z_][a-z0-9_-]{0,31}", "a-z, 0-9, _ - (at most 32, a letter first)")
_DIRECTORY = (r"(?:/[A-Za-z0-9_-][A-Za-z0-9._-]*)+", "an absolute path of letters, digits, . _ -")
_VERSION = (r"[0-9]+(?:\.[0-9]+){0,2}", "a version such as 2.24")
_MODEL = (r"(?:[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,255})?", "letters, digits, . _ : / @ + -")
_GRAMMARS: Mapping[str, tuple[str, str]] = {
    "memory_activation_project": (
        r"[a-z0-9][a-z0-9_-]{0,62}",
        "a-z, 0-9, _ - (at most 63, a letter or digit first)",
    ),
    "memory_activation_state_dir": _DIRECTORY,
    "memory_activation_etc_dir": _DIRECTORY,
    "memory_policy_dir": _DIRECTORY,
    "memory_policy_reader_group": _ACCOUNT,
    "memory_router_user": _ACCOUNT,
    "hindsight_stack_volume_name": (r"[A-Za-z0-9][A-Za-z0-9_.-]{1,127}", _NAME_FORM),
    "hindsight_stack_worker_id": (r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", _NAME_FORM),
    "hindsight_stack_llm_model": _MODEL,
    "hindsight_stack_embeddings_model": _MODEL,
    "container_engine_min_version": _VERSION,
    "container_engine_min_compose_version": _VERSION,
}
_DIRECTORIES = ("memory_activation_etc_dir", "memory_activation_state_dir", "memory_policy_dir")
_SYSTEM_DIRECTORIES = frozenset(
    {"bin", "boot", "etc", "home", "lib", "media", "mnt", "opt", "root", "sbin", "srv", "usr", "var"}
)
_SYSTEM_PATHS = frozenset(
    {"/usr/local", "/usr/share", "/var/lib", "/var/log", "/var/cache", "/var/lib/docker", "/etc/docker"}
)
_VOLATILE = ("/tmp/", "/run/", "/dev/", "/proc/", "/sys/", "/var/tmp/", "/var/run/")
_BUNDLE_ONLY = ("secrets", "device-keys", "edge")
_OWN_URL_PROVIDERS = frozenset({"openai", "anthropic", "gemini", "groq"})


class Settings:
    """Values of the settings. One that was refused is withdrawn, so that it is not refused again by what depends on it.

    Attributes:
        values: the settings that are still good.
    """

    def __init__(self, values: Mapping[str, Any], findings: Findings) -> None:
        self.values = dict(values)
        self.findings = findings

    def refuse(self, name: str, rule_id: str, what: str, fix: str = "") -> None:
        """Refuse the setting `name` and withdraw it."""
        self.findings.add(rule_id, what, fix)
        self.values.pop(name, None)

    def has(self, *names: str) -> bool:
        """Whether all of `names` are still good."""
        return all(name in self.values for name in names)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


@dataclass(frozen=True)
class _Check:
    """A rule over several settings; it runs when all that it needs are good."""

    needs: tuple[str, ...]
    run: Callable[[Settings], None]


_CHECKS: list[_Check] = []


def _check(*needs: str) -> Callable[[Callable[[Settings], None]], Callable[[Settings], None]]:
    def register(function: Callable[[Settings], None]) -> Callable[[Settings], None]:
        _CHECKS.append(_Check(needs, function))
        return function

    return register


def names(roles: Iterable[str]) -> list[str]:
    """Names of the settings of `roles`, in a fixed order."""
    return [name for role in sorted(set(roles)) for name in SETTINGS.get(role, {})]


def kinds() -> dict[str, str]:
    """Kind of every setting by name."""
    return {name: kind for role in SETTINGS.values() for name, kind in role.items()}


def examine(settings: Mapping[str, Any], variables: Iterable[str], findings: Findings) -> Settings:
    """Apply all rules for settings.

    Args:
        settings: value of every setting.
        variables: names of the variables that inventory and command line set.

    Raises:
        KeyError: a setting is missing altogether.
    """
    good = Settings({name: settings[name] for name in kinds()}, findings)
    _unknown(variables, findings)
    for name, kind in kinds().items():
        _type(good, name, kind)
    for name, choices in CHOICES.items():
        if good.has(name) and good[name] not in choices:
            good.refuse(
                name, "setting-choice", f"{name} is {_shown(good[name])}; there are {', '.join(choices)}"
            )
    for name, (low, high) in _RANGES.items():
        if good.has(name) and not low <= good[name] <= high:
            good.refuse(name, "setting-range", f"{name} is {good[name]}; {low} to {high} is due")
    for name, (pattern, meaning) in _GRAMMARS.items():
        if good.has(name):
            _grammar(good, name, good[name], pattern, meaning)
    for name, kind in kinds().items():
        if kind == "url" and good.has(name) and good[name]:
            _url(good, name)
        if kind == "controller file" and good.has(name) and good[name]:
            _controller_file(good, name)
    for check in _CHECKS:
        if good.has(*check.needs):
            check.run(good)
    return good


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def _type_name(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a map"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "a list"
    return next(
        (name for kind, name in _NAME_OF_TYPE.items() if isinstance(value, kind)), "of an unknown type"
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _unknown(variables: Iterable[str], findings: Findings) -> None:
    known = kinds()
    prefixes = tuple(f"{role}_" for role in SETTINGS)
    for name in sorted(set(variables)):
        if name.startswith(prefixes) and name not in known and name not in NOT_SETTINGS:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            findings.add("setting-unknown", f"no role reads the variable {name[:SHOWN]}{hint}")


def _type(good: Settings, name: str, kind: str) -> None:
    value = good[name]
    if kind == "secret":
        _secret(good, name)
        return
    if kind == "bool":
        if isinstance(value, str) and value.lower() in _BOOLEAN_TEXT:
            good.values[name] = _BOOLEAN_TEXT[value.lower()]
        elif not isinstance(value, bool):
            good.refuse(name, "setting-type", f"{name} is {_type_name(value)}; true or false is due")
        return
    expected, fits = {
        "int": ("a number", _is_number(value)),
        "dict": ("a map", isinstance(value, Mapping) and all(isinstance(key, str) for key in value)),
        "list of str": ("a list of text", _is_list(value) and all(isinstance(item, str) for item in value)),
        "list of dict": (
            "a list of maps",
            _is_list(value) and all(isinstance(item, Mapping) for item in value),
        ),
    }.get(kind, ("text", isinstance(value, str)))
    if not fits:
        good.refuse(name, "setting-type", f"{name} is {_type_name(value)}; {expected} is due")


def _secret(good: Settings, name: str) -> None:
    value = good[name]
    low, high = SECRET_LENGTHS
    if not isinstance(value, str):
        good.refuse(name, "secret-type", f"{name} is {_type_name(value)}; text is due")
    elif value and any(not "!" <= character <= "~" for character in value):
        good.refuse(name, "secret-characters", f"{name} holds a blank, a control or a non-ASCII character")
    elif "${" in value:
        good.refuse(name, "secret-characters", f"{name} holds the two characters ${{ in a row")
    elif value and not low <= len(value) <= high:
        good.refuse(name, "secret-length", f"{name} is {len(value)} characters long; {low} to {high} is due")


def _plain(value: str) -> bool:
    return all("!" <= character <= "~" and character not in "$#%\"'`\\{}" for character in value)


def _grammar(good: Settings, name: str, value: str, pattern: str, meaning: str) -> None:
    if not _plain(value):
        good.refuse(name, "setting-characters", f"{name} is {_shown(value)}; {meaning} is due")
    elif not re.fullmatch(pattern, value):
        good.refuse(name, "setting-grammar", f"{name} is {_shown(value)}; {meaning} is due")


def _controller_file(good: Settings, name: str) -> None:
    if not good[name].isprintable():
        good.refuse(name, "setting-characters", f"{name} is {_shown(good[name])}")
    elif not good[name].startswith("/"):
        good.refuse(name, "controller-path", f"{name} is {_shown(good[name])}, which is no full path")


def _url(good: Settings, name: str) -> None:
    value = good[name]
    if not _plain(value):
        good.refuse(name, "setting-characters", f"{name} holds a character that is not plain")
        return
    try:
        parts = urlsplit(value)
        port_fits = parts.port is None or parts.port > 0
    except ValueError:
        good.refuse(name, "url", f"{name} is no URL")
        return
    host = parts.hostname or ""
    if parts.scheme not in ("http", "https") or not host or not port_fits:
        good.refuse(name, "url", f"{name} has no http(s) scheme, no host, or no valid port")
    elif "@" in parts.netloc:
        good.refuse(name, "url", f"{name} holds a user name or a password")
    elif "?" in value:
        good.refuse(name, "url", f"{name} holds a query")
    elif not (_address(host) or DNS_NAME.fullmatch(host)):
        good.refuse(name, "url", f"the host in {name} is neither a DNS name nor an address")
    elif host == "localhost" or (
        (address := _address(host)) and (address.is_loopback or address.is_unspecified)
    ):
        good.refuse(
            name, "url", f"{name} names the loopback address, which in a container is the container itself"
        )


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _duplicates(items: Iterable[str]) -> list[str]:
    return sorted(item for item, count in Counter(items).items() if count > 1)


@_check(*_DIRECTORIES)
def _directories(good: Settings) -> None:
    paths = {name: str(good[name]) for name in _DIRECTORIES}
    for name, path in paths.items():
        if path.lstrip("/") in _SYSTEM_DIRECTORIES or path in _SYSTEM_PATHS:
            good.refuse(name, "path-overlap", f"{name} is {path}, a directory of the system")
        elif f"{path}/".startswith(_VOLATILE):
            good.refuse(name, "path-overlap", f"{name} is {path}, which is not kept over a restart")
    etc, state, policy = (f"{path}/" for path in paths.values())
    reserved = [state, *(f"{etc}{name}/" for name in _BUNDLE_ONLY)]
    if etc.startswith(state) or state.startswith(etc):
        good.refuse(
            _DIRECTORIES[1], "path-overlap", f"{_DIRECTORIES[0]} and {_DIRECTORIES[1]} lie within each other"
        )
    elif etc.startswith(policy) or any(
        policy.startswith(path) or path.startswith(policy) for path in reserved
    ):
        good.refuse(
            _DIRECTORIES[2],
            "path-overlap",
            f"{_DIRECTORIES[2]} ({paths[_DIRECTORIES[2]]}) overlaps another directory",
        )


@_check("hindsight_stack_memory_limits")
def _memory_limits(good: Settings) -> None:
    name = "hindsight_stack_memory_limits"
    limits = good[name]
    if set(limits) != set(SERVICES):
        different = ", ".join(sorted(set(limits) ^ set(SERVICES)))
        good.refuse(name, "memory-limits", f"{name} lacks, or does not know, {different[:SHOWN]}")
        return
    for service, size in limits.items():
        if not (isinstance(size, str) and re.fullmatch(r"[1-9][0-9]{0,14}[kmg]?", size)):
            good.refuse(name, "memory-limits", f"{name}: the limit of {service} is {_shown(size)}")
            return


@_check("hindsight_stack_origin_subnet")
def _origin_subnet(good: Settings) -> None:
    name = "hindsight_stack_origin_subnet"
    try:
        subnet = ipaddress.IPv4Network(good[name])
    except ValueError:
        good.refuse(name, "origin-subnet", f"{name} is {_shown(good[name])}, which is no IPv4 network")
        return
    if not any(subnet.subnet_of(private) for private in PRIVATE_NETWORKS):
        good.refuse(name, "origin-subnet", f"{name} is {subnet}, which is not private")
    elif not 16 <= subnet.prefixlen <= 28:
        good.refuse(name, "origin-subnet", f"{name} is {subnet}; a prefix of /16 to /28 is due")


@_check("hindsight_stack_origin_address", "hindsight_stack_origin_subnet")
def _origin_address(good: Settings) -> None:
    name = "hindsight_stack_origin_address"
    subnet = ipaddress.IPv4Network(good["hindsight_stack_origin_subnet"])
    address = _address(good[name])
    if not isinstance(address, ipaddress.IPv4Address):
        good.refuse(
            name, "origin-address", f"{name} is {_shown(good[name])}, which is no literal IPv4 address"
        )
    elif address not in subnet:
        good.refuse(name, "origin-address", f"{name} is {address}, which is not in {subnet}")
    elif address in (subnet[0], subnet[1], subnet[-1], subnet[-2]):
        good.refuse(
            name, "origin-address", f"{name} is {address}, which the network or the engine may use itself"
        )


@_check("container_engine_packages")
def _engine_packages(good: Settings) -> None:
    name = "container_engine_packages"
    for system, packages in good[name].items():
        if not (_is_list(packages) and packages and all(isinstance(item, str) for item in packages)):
            good.refuse(
                name, "setting-type", f"{name}: the value of {_shown(system)} is no list of package names"
            )
            return


@_check("container_engine_address_pools")
def _address_pools(good: Settings) -> None:
    name = "container_engine_address_pools"
    origin = good["hindsight_stack_origin_subnet"] if good.has("hindsight_stack_origin_subnet") else None
    for number, pool in enumerate(good[name], start=1):
        base = _pool_network(pool)
        if base is None:
            good.refuse(name, "address-pools", f"{name}: entry {number} is no pool of the form base, size")
            return
        if origin is not None and base.version == 4 and base.overlaps(ipaddress.IPv4Network(origin)):
            good.refuse(
                name, "address-pools", f"{name}: entry {number} ({base}) covers the origin subnet {origin}"
            )
            return


def _pool_network(pool: Mapping[str, Any]) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """The network of an address pool, or None when the pool is not of the form that the engine reads."""
    if set(pool) != {"base", "size"} or not isinstance(pool["base"], str) or not _is_number(pool["size"]):
        return None
    try:
        base = ipaddress.ip_network(pool["base"])
    except ValueError:
        return None
    return base if base.prefixlen <= pool["size"] <= base.max_prefixlen - 2 else None


@_check(
    "hindsight_stack_llm_provider",
    "hindsight_stack_llm_model",
    "hindsight_stack_llm_base_url",
    "hindsight_stack_llm_api_key",
)
def _llm(good: Settings) -> None:
    provider = good["hindsight_stack_llm_provider"]
    model, base_url, key = (good[f"hindsight_stack_llm_{name}"] for name in ("model", "base_url", "api_key"))
    if provider == "claude-code":
        good.refuse(
            "hindsight_stack_llm_provider",
            "llm-provider-forbidden",
            "hindsight_stack_llm_provider is claude-code",
        )
    elif provider == "none":
        for name in ("model", "base_url"):
            if good[f"hindsight_stack_llm_{name}"]:
                good.findings.add(
                    "llm-settings", f"hindsight_stack_llm_{name} is set, hindsight_stack_llm_provider is none"
                )
    else:
        if not model:
            good.findings.add(
                "llm-settings", f"hindsight_stack_llm_model is empty, the provider is {provider}"
            )
        if provider in _OWN_URL_PROVIDERS and not key:
            good.findings.add(
                "llm-settings", f"hindsight_stack_llm_api_key is empty, the provider is {provider}"
            )
        if provider not in _OWN_URL_PROVIDERS and not base_url:
            good.findings.add(
                "llm-settings", f"hindsight_stack_llm_base_url is empty, the provider is {provider}"
            )


@_check(
    "hindsight_stack_embeddings_provider",
    "hindsight_stack_embeddings_model",
    "hindsight_stack_embeddings_base_url",
    "hindsight_stack_embeddings_api_key",
)
def _embeddings(good: Settings) -> None:
    provider = good["hindsight_stack_embeddings_provider"]
    if provider == "local":
        for name in ("model", "base_url"):
            if good[f"hindsight_stack_embeddings_{name}"]:
                good.findings.add(
                    "embeddings-settings",
                    f"hindsight_stack_embeddings_{name} is set, hindsight_stack_embeddings_provider is local",
                )
        return
    for name in ("base_url", "model", "api_key") if provider == "openai" else ("base_url",):
        if not good[f"hindsight_stack_embeddings_{name}"]:
            good.findings.add(
                "embeddings-settings",
                f"hindsight_stack_embeddings_{name} is empty, the provider is {provider}",
            )


@_check("hindsight_stack_embeddings_provider", "hindsight_stack_embeddings_dimension")
def _embeddings_dimension(good: Settings) -> None:
    name = "hindsight_stack_embeddings_dimension"
    external = good["hindsight_stack_embeddings_provider"] != "local"
    if not (1 if external else 0) <= good[name] <= MAX_DIMENSION:
        good.refuse(name, "embeddings-dimension", f"{name} is {good[name]}")


@_check("hindsight_stack_reranker_provider", "hindsight_stack_reranker_base_url")
def _reranker(good: Settings) -> None:
    if good["hindsight_stack_reranker_provider"] == "tei" and not good["hindsight_stack_reranker_base_url"]:
        good.findings.add(
            "reranker-settings", "hindsight_stack_reranker_base_url is empty, the reranker is tei"
        )


@_check("hindsight_banks_extra")
def _banks_extra(good: Settings) -> None:
    name = "hindsight_banks_extra"
    for bank in good[name]:
        _bank(good.findings, f"{name}: ", bank)
    for bank in _duplicates(good[name]):
        good.findings.add("duplicate-entry", f"{name} names {_shown(bank)} twice")


def _bank(findings: Findings, where: str, bank: str) -> None:
    if not BANK.fullmatch(bank):
        findings.add("bank-name", f"{where}the bank {_shown(bank)} is outside the grammar")
    elif bank == CANARY["bank"]:
        findings.add("reserved-name", f"{where}the bank {bank} belongs to the canary")


@_check("memory_router_keys_principals")
def _principals(good: Settings) -> None:
    name = "memory_router_keys_principals"
    for number, principal in enumerate(good[name], start=1):
        _principal(good.findings, f"{name}, entry {number}: ", principal)
    labels = [item["name"] for item in good[name] if isinstance(item.get("name"), str)]
    for label in _duplicates(labels):
        good.findings.add("duplicate-entry", f"{name} has two principals named {_shown(label)}")
    if len(good[name]) > MAX_PRINCIPALS:
        good.findings.add(
            "route-count", f"{name} has {len(good[name])} entries; at most {MAX_PRINCIPALS} are possible"
        )


def _principal(findings: Findings, where: str, item: Mapping[str, Any]) -> None:
    required, optional = ("name", "alias", "bank"), ("paths", "rpm", "expires_days")
    unknown = sorted(str(key) for key in item if key not in (*required, *optional))
    missing = [key for key in required if key not in item]
    if unknown or missing:
        problem = (
            f"the key {_shown(unknown[0])} is unknown" if unknown else f"the key {missing[0]} is missing"
        )
        findings.add("principal-schema", where + problem)
        return
    wrong = [key for key in required if not isinstance(item[key], str)]
    wrong += [key for key in ("rpm", "expires_days") if key in item and not _is_number(item[key])]
    if wrong:
        findings.add("principal-schema", f"{where}{wrong[0]} is {_type_name(item[wrong[0]])}")
        return
    if not PRINCIPAL_NAME.fullmatch(item["name"]):
        findings.add("principal-name", f"{where}the name {_shown(item['name'])} is outside the grammar")
    if not ALIAS.fullmatch(item["alias"]):
        findings.add("principal-alias", f"{where}the alias {_shown(item['alias'])} is outside the grammar")
    _bank(findings, where, item["bank"])
    for key in ("name", "alias"):
        if item[key] == CANARY[key]:
            findings.add("reserved-name", f"{where}the {key} {CANARY[key]} belongs to the canary")
    paths = item.get("paths", ["rest"])
    if not (
        _is_list(paths)
        and paths
        and all(path in ("rest", "mcp") for path in paths)
        and not _duplicates(paths)
    ):
        findings.add("principal-paths", f"{where}paths is {_shown(paths)}")
    for key, low, high in (("rpm", 1, 100000), ("expires_days", 0, 3650)):
        if not low <= item.get(key, low) <= high:
            findings.add("principal-limit", f"{where}{key} is {item[key]}; {low} to {high} is due")


@_check("memory_policy_users", "memory_policy_owner")
def _policy(good: Settings) -> None:
    users = good["memory_policy_users"]
    if good["memory_policy_owner"] == "connect":
        if users:
            good.findings.add("policy-owner", "memory_policy_users is set, memory_policy_owner is connect")
        return
    declared = {CANARY["bank"]}
    if good.has("hindsight_banks_extra", "memory_router_keys_principals"):
        declared |= set(good["hindsight_banks_extra"])
        declared |= {
            item.get("bank")
            for item in good["memory_router_keys_principals"]
            if isinstance(item.get("bank"), str)
        }
    too_many = len(users) > 4096
    for principal, entry in users.items():
        where = f"memory_policy_users, {_shown(principal)}: "
        if not POLICY_PRINCIPAL.fullmatch(principal):
            good.findings.add("policy-principal", f"{where}no such principal can exist")
            continue
        problem = _policy_problem(entry)
        if problem:
            good.findings.add("policy-entry", where + problem)
            continue
        too_many = too_many or len(entry["banks"]) > 128
        for bank in sorted(set(entry["banks"]) - declared):
            good.findings.add("policy-bank-undeclared", f"{where}nothing creates the bank {bank}")
    if too_many or len(json.dumps(users, indent=2, default=str)) > MAX_POLICY_BYTES:
        good.findings.add("policy-size", "memory_policy_users is larger than the router accepts")


def _policy_problem(entry: Any) -> str:
    """What is wrong with one entry of the policy, or nothing."""
    if not isinstance(entry, Mapping) or set(entry) != {"default_bank", "admin", "banks"}:
        return "the keys are not exactly default_bank, admin and banks"
    if not isinstance(entry["admin"], bool):
        return f"admin is {_type_name(entry['admin'])}; true or false is due"
    banks = entry["banks"]
    if not isinstance(banks, Mapping) or not banks:
        return "banks is no map with at least one bank"
    for bank, operations in banks.items():
        if not (isinstance(bank, str) and BANK.fullmatch(bank)):
            return f"the bank {_shown(bank)} is outside the grammar"
        if not (
            _is_list(operations) and operations and all(item in POLICY_OPERATIONS for item in operations)
        ):
            return f"the operations of {bank} are not a selection of {', '.join(POLICY_OPERATIONS)}"
        if _duplicates(operations):
            return f"an operation of {bank} is there twice"
    if not isinstance(entry["default_bank"], str) or entry["default_bank"] not in banks:
        return "default_bank is not one of the banks"
    return ""


@_check("memory_edge_names")
def _edge_names(good: Settings) -> None:
    name = "memory_edge_names"
    items = good[name]
    if not items:
        good.refuse(name, "edge-names", f"{name} is empty")
        return
    for item in items:
        if not (_address(item) or (DNS_NAME.fullmatch(item) and not re.fullmatch(r"[0-9.]+", item))):
            good.refuse(name, "edge-name", f"{name}: {_shown(item)} is neither a DNS name nor an address")
            return
    for item in _duplicates(items):
        good.findings.add("duplicate-entry", f"{name} names {item} twice")


@_check("memory_edge_bind_addresses", "memory_edge_bind_any")
def _bind_addresses(good: Settings) -> None:
    name = "memory_edge_bind_addresses"
    items = good[name]
    if not items:
        good.refuse(name, "bind-missing", f"{name} is empty")
        return
    for item in items:
        address = _address(item)
        if address is None or str(address) != item or address.is_multicast or address.is_link_local:
            good.refuse(name, "bind-address", f"{name}: {_shown(item)} is no address to listen on")
            return
        if address.is_unspecified and not good["memory_edge_bind_any"]:
            good.refuse(name, "bind-wildcard", f"{name}: {item} is every interface of the host")
            return
    for item in _duplicates(items):
        good.findings.add("duplicate-entry", f"{name} names {item} twice")
    for wildcard in {"0.0.0.0", "::"} & set(items):
        version = ipaddress.ip_address(wildcard).version
        covered = [
            item for item in items if item != wildcard and ipaddress.ip_address(item).version == version
        ]
        if covered:
            good.findings.add("duplicate-entry", f"{name}: {covered[0]} is part of {wildcard} already")


@_check("memory_edge_tls_mode", "memory_edge_acme_ca_url", "memory_edge_acme_email")
def _acme_account(good: Settings) -> None:
    if good["memory_edge_tls_mode"] != "acme":
        return
    if not good["memory_edge_acme_ca_url"].startswith("https://"):
        good.findings.add("acme-account", "memory_edge_acme_ca_url is no https URL")
    if not re.fullmatch(
        r"[A-Za-z0-9._+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+", good["memory_edge_acme_email"]
    ):
        good.findings.add("acme-account", "memory_edge_acme_email is no address")


@_check("memory_edge_tls_mode", "memory_edge_acme_ca_root_file", "memory_edge_names")
def _acme_names(good: Settings) -> None:
    if good["memory_edge_tls_mode"] != "acme" or good["memory_edge_acme_ca_root_file"]:
        return
    for name in good["memory_edge_names"]:
        special = name.rpartition(".")[2] in {
            "test",
            "example",
            "invalid",
            "localhost",
            "local",
            "internal",
            "lan",
            "arpa",
        }
        if _address(name) or "." not in name or special:
            good.findings.add("acme-names", f"memory_edge_names: no public authority certifies {name}")
