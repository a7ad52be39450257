"""What the preflight may refuse: one rule for each identifier, with the reason and the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Rule:
    """The general text of a refusal.

    Attributes:
        summary: what is refused.
        why: why it matters here.
        fix: what to do about it.
    """

    summary: str
    why: str
    fix: str


@dataclass(frozen=True)
class Refusal:
    """One reason not to go on. No field ever holds the value of a secret."""

    id: str
    what: str
    why: str
    fix: str

    def as_dict(self) -> dict[str, str]:
        """The fields by name."""
        return asdict(self)


class Findings:
    """Collects refusals in the order in which they are found."""

    def __init__(self) -> None:
        self.found: list[Refusal] = []

    def add(self, rule_id: str, what: str, fix: str = "") -> None:
        """Add a refusal under `rule_id`; `fix` replaces the general remedy where a nearer one is known."""
        rule = RULES[rule_id]
        self.found.append(Refusal(rule_id, what, rule.why, fix or rule.fix))


def text(refusals: Iterable[Refusal]) -> str:
    """All refusals as a numbered list for an operator."""
    blocks = [
        f"{number}. [{item.id}] {item.what}\n   why it matters: {item.why}\n   how to fix it:  {item.fix}"
        for number, item in enumerate(refusals, start=1)
    ]
    count = f"{len(blocks)} reason" + ("s" if len(blocks) != 1 else "")
    return "\n".join([f"{count} not to go on; nothing was changed on this host", *blocks])


_RULES: Mapping[str, Rule] = {
    "partial-run": Rule(
        "the run is limited by --step or --start-at-task",
        "a gate could be left out while the change behind it is made",
        "run the whole playbook; preflight.yml and readback.yml change nothing",
    ),
    "setting-unknown": Rule(
        "a variable has the prefix of a role but no role reads it",
        "a mistyped setting would silently leave the default in force",
        "correct the name (docs and roles/*/README.md list all names), or remove the variable",
    ),
    "setting-type": Rule(
        "a setting has the wrong type",
        "YAML turns unquoted text into numbers and booleans, and -e NAME=VALUE turns everything into text",
        "write text in quotes and numbers without; on the command line use -e '{\"NAME\": 1}'",
    ),
    "setting-characters": Rule(
        "a name, path or URL holds $, #, %, a blank, a quote, a control or a non-ASCII character",
        "Compose and env files expand or cut such values without an error, so another value would be used",
        "use plain characters only",
    ),
    "setting-grammar": Rule(
        "a name, path or version is not of the form that its reader accepts",
        "it becomes the name of a container, volume, user or directory and would be refused half-way",
        "use a value of the form that is named above",
    ),
    "setting-choice": Rule(
        "a setting is none of the values that exist",
        "it selects what is rendered, and nothing is rendered from a guess",
        "use one of the values that are named above",
    ),
    "setting-range": Rule(
        "a number is out of its range",
        "the program that reads it would refuse to start, or would behave as if it were not set",
        "use a number in the range that is named above",
    ),
    "secret-type": Rule(
        "a secret is not text",
        "YAML read it as a number, a boolean or nothing: 0123456 would become 42798, and that would be the password",
        "write the value in quotes, in the vault file too",
    ),
    "secret-length": Rule(
        "a secret is shorter than 16 or longer than 512 characters",
        "short ones are guessed, long ones are dropped by their readers",
        "choose another value, or leave the variable empty and the host generates one",
    ),
    "secret-characters": Rule(
        "a secret holds a blank, a control or a non-ASCII character, or ${",
        "the router drops such a token without a word, and dotenv readers expand or cut such values",
        "choose a value of printable ASCII without blanks; look for a stray line end at the end of the value",
    ),
    "path-overlap": Rule(
        "a directory of the bundle is a system directory, is not kept over a restart, or lies within another one",
        "each directory gets an owner and a mode of its own, which would break the other one",
        "give the bundle directories of its own, such as /etc/memory, /etc/memory/policy and /var/lib/memory",
    ),
    "controller-path": Rule(
        "a file on the controller is not given by its full path",
        "Ansible looks for relative names in several places, so another file than the checked one could be used",
        "write the full path, for example {{ inventory_dir }}/files/NAME",
    ),
    "url": Rule(
        "a URL is not plain http(s)://host[:port][/path], or names the loopback address",
        "it is called from within a container, where loopback is the container itself; credentials do not belong in a URL",
        "write scheme, host, port and path only, with a host that containers can reach; keep keys in the key variables",
    ),
    "memory-limits": Rule(
        "hindsight_stack_memory_limits does not name exactly the six services, each with a size",
        "a service without a limit can take the memory of the whole host",
        "name postgres, api, worker, embeddings, router and edge, each with a size such as 1536m or 1g",
    ),
    "address-pools": Rule(
        "an address pool for container networks is invalid or covers the origin subnet",
        "the engine would not start with it, or would give the origin subnet to another network",
        "write each pool as {base: 10.90.0.0/16, size: 24}, apart from hindsight_stack_origin_subnet",
    ),
    "origin-subnet": Rule(
        "hindsight_stack_origin_subnet is no private IPv4 network of a usable size",
        "the router accepts Hindsight at a literal private address only",
        "use a free network within 10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16 or 100.64.0.0/10, /16 to /28",
    ),
    "origin-address": Rule(
        "hindsight_stack_origin_address is no free address of the origin subnet",
        "Hindsight gets this address, and the router calls it and nothing else",
        "use an address of hindsight_stack_origin_subnet, but neither the first nor the last two of it",
    ),
    "llm-provider-forbidden": Rule(
        "the language model provider is claude-code",
        "it runs a command line program with the login of a person inside the server",
        "use a provider with an API and a key of its own, or none",
    ),
    "llm-settings": Rule(
        "the settings of the language model are incomplete, or are given without a provider",
        "Hindsight starts and looks healthy, but cannot extract, consolidate or reflect",
        "set provider, model, key and base URL together (docs: hindsight_stack), or leave all of them unset",
    ),
    "embeddings-settings": Rule(
        "the settings of the embeddings are incomplete, or are given although the provider is local",
        "without embeddings nothing can be recalled, and the size of the vectors is fixed by the first memory",
        "give base URL, model, key and dimension of an external provider, or none of them with local",
    ),
    "embeddings-dimension": Rule(
        "the dimension of the embeddings is missing, above 2000, or not the one of the locked image",
        "pgvector indexes at most 2000 dimensions, and the dimension cannot change once memories are stored",
        "set hindsight_stack_embeddings_dimension to what the model gives, at most 2000; with local leave it 0",
    ),
    "reranker-settings": Rule(
        "the reranker tei has no base URL",
        "every recall would wait for a reranker that nobody named",
        "set hindsight_stack_reranker_base_url, or hindsight_stack_reranker_provider to rrf",
    ),
    "principal-schema": Rule(
        "a principal lacks a key, has an unknown one, or one of the wrong type",
        "a device key is minted from it, and a key with other grants than intended is a leak",
        "write name, alias and bank as text, and optionally paths, rpm and expires_days",
    ),
    "principal-name": Rule(
        "the name of a principal is not of the form a-z, 0-9 and - (at most 32, a letter first)",
        "the name becomes the file name of the device key",
        "choose another name",
    ),
    "principal-alias": Rule(
        "an alias is outside the grammar of the router (a-z, 0-9, . _ -, at most 128, a letter first)",
        "the router refuses to start with it, which closes every route",
        "choose another alias, for example memory.notes",
    ),
    "principal-paths": Rule(
        "the paths of a principal are not a selection of rest and mcp",
        "a key without a path opens nothing; the edge passes only these two",
        "write [rest], [mcp] or [rest, mcp]",
    ),
    "principal-limit": Rule(
        "rpm or expires_days of a principal is out of range",
        "the router refuses to mint such a key",
        "use rpm 1 to 100000 and expires_days 0 (never) to 3650",
    ),
    "bank-name": Rule(
        "the name of a bank is outside the grammar of the router (A-Z, a-z, 0-9, _ -, at most 64, a letter first)",
        "the router refuses to start with it, and the policy reader refuses the whole file",
        "choose another name, for example team-notes",
    ),
    "reserved-name": Rule(
        "a name, alias or bank belongs to the canary",
        "the canary proves every release with its own key, alias and bank; they cannot be shared",
        "use another name than canary, another alias than memory.canary, another bank than memory-canary",
    ),
    "duplicate-entry": Rule(
        "an entry of a list is there twice",
        "one of the two would be overwritten or refused half-way",
        "remove or rename one of them",
    ),
    "route-count": Rule(
        "there are more than 127 principals",
        "the router takes at most 128 routes, one of which is the canary",
        "remove principals, or share an alias through the policy directory",
    ),
    "policy-owner": Rule(
        "memory_policy_users is set although Connect owns the policy",
        "two writers would overwrite each other's grants",
        "remove memory_policy_users, or set memory_policy_owner to bundle",
    ),
    "policy-principal": Rule(
        "a user of the policy is not named human: and 64 hex digits",
        "one bad entry makes the router refuse the whole file, for everybody",
        "copy the principal as the identity provider's tool prints it",
    ),
    "policy-entry": Rule(
        "an entry of the policy is outside the closed schema of the router",
        "one bad entry makes the router refuse the whole file, for everybody",
        "give exactly default_bank, admin (true or false) and banks, a map of banks to lists of operations",
    ),
    "policy-bank-undeclared": Rule(
        "a grant names a bank that nothing creates",
        "a first retain would create it without the defense against sensitive content",
        "add the bank to hindsight_banks_extra, or correct the name",
    ),
    "policy-size": Rule(
        "the policy has more than 4096 users, 128 banks for one user, or 1 MiB",
        "the router refuses the whole file, for everybody",
        "remove entries",
    ),
    "edge-names": Rule(
        "memory_edge_names is empty",
        "the edge has no name to hold a certificate for",
        "set the DNS names or addresses that clients use",
    ),
    "edge-name": Rule(
        "a name of the edge is neither a DNS name nor an address",
        "no certificate can be issued for it, and no client would accept one",
        "use lower-case DNS names without wildcards, or literal addresses",
    ),
    "bind-missing": Rule(
        "memory_edge_bind_addresses is empty",
        "the engine would publish the port on every interface, past the firewall of the host",
        "name the addresses of the host on which clients arrive",
    ),
    "bind-address": Rule(
        "a bind address is not a literal address that a host can have",
        "the port would be published on no interface, or on another one",
        "use a literal IPv4 or IPv6 address of the host",
    ),
    "bind-wildcard": Rule(
        "a bind address is a wildcard",
        "published ports pass the firewall of the host, so a wildcard opens every interface",
        "name the addresses; if every interface is meant, set memory_edge_bind_any to true",
    ),
    "tls-certificate": Rule(
        "the certificate file is missing or holds no certificate",
        "the edge would not start",
        "set memory_edge_certificate_file to a PEM file that holds the leaf first, then the intermediates",
    ),
    "tls-chain": Rule(
        "the certificates of the file do not form a chain with a server certificate first",
        "clients that do not know the intermediates would refuse the connection",
        "put the leaf first and every intermediate after the certificate that it signed",
    ),
    "tls-key": Rule(
        "the private key is missing, is no PEM key, or is locked by a passphrase",
        "the edge would not start",
        "set memory_edge_private_key_file to a PEM key without passphrase; encrypt the file with ansible-vault",
    ),
    "tls-key-mode": Rule(
        "the private key file can be read by others on the controller",
        "whoever copies it can pretend to be this service",
        "chmod 0600 the file, better: encrypt it with ansible-vault",
    ),
    "tls-key-mismatch": Rule(
        "the private key does not belong to the certificate",
        "the edge would not start, or would fail every handshake",
        "give the certificate and the key that were issued together",
    ),
    "tls-validity": Rule(
        "a certificate is expired or not valid yet",
        "every client would refuse the connection",
        "renew the certificate, or correct the clock of the controller",
    ),
    "tls-names": Rule(
        "the certificate does not cover every name of the edge",
        "clients that use the missing name would refuse the connection",
        "have the certificate issued for all of memory_edge_names, or remove the name",
    ),
    "tls-pin": Rule(
        "memory_edge_certificate_sha256 is missing or is not the hash of the leaf certificate",
        "the readback compares what clients see with this value, so that no other certificate goes live",
        "take the value of: openssl x509 -in FILE -outform DER | sha256sum",
    ),
    "acme-account": Rule(
        "the ACME directory URL or the contact address is missing or invalid",
        "no certificate can be requested",
        "set memory_edge_acme_ca_url to the https URL of the directory and memory_edge_acme_email to an address",
    ),
    "acme-names": Rule(
        "a name of the edge cannot be certified by a public ACME authority",
        "the authority would refuse the order, and a name that is tried again and again is locked for days",
        "use public DNS names, or name a private authority by memory_edge_acme_ca_root_file",
    ),
    "acme-root": Rule(
        "the root certificate of the private ACME authority cannot be read",
        "the edge would not trust its own authority",
        "set memory_edge_acme_ca_root_file to a PEM file with the root certificate, or leave it empty",
    ),
    "registry-ca": Rule(
        "a certificate authority of a registry is not named by host:port or its file holds no certificate",
        "the engine would not trust the registry, and the pull would fail after the run has begun",
        "write host:port and the full path of a PEM file on the controller",
    ),
    "lock-invalid": Rule(
        "the image lock is missing or damaged",
        "what runs is decided by this file alone",
        "write it with `scripts/images build` or `scripts/images resolve`",
    ),
    "lock-image-missing": Rule(
        "the image lock lacks an image that the settings need",
        "an image that is not locked by digest is never deployed",
        "add it with `scripts/images build` or `scripts/images resolve`",
    ),
    "lock-image-unused": Rule(
        "the image lock holds an image that the settings do not use",
        "an entry that nothing uses is never checked, and is a sign of settings that are not what was meant",
        "remove the entry, or set hindsight_stack_embeddings_provider to local if that image is wanted",
    ),
    "lock-platform": Rule(
        "the image lock has no manifest for the architecture of the host",
        "the engine would fetch nothing, or another image than the one that was checked",
        "resolve or build the images for this platform too",
    ),
    "identity-shared": Rule(
        "a numeric id of the router or of the reader group belongs to another container as well",
        "the other container could read the keys of the router or the policy",
        "choose another uid or gid in the inventory",
    ),
    "host-os": Rule(
        "the operating system is none of Debian 12, Debian 13, Ubuntu 24.04",
        "packages, paths and defaults are known, and tested, for these only",
        "use a host with one of these systems",
    ),
    "host-arch": Rule(
        "the machine is neither x86_64 nor aarch64",
        "images exist for these two only",
        "use a host with one of these architectures",
    ),
    "host-python": Rule(
        "Python on the host is older than 3.11",
        "the host program needs 3.11, and would fail in the middle of an activation",
        "install Python 3.11 or newer and point ansible_python_interpreter to it",
    ),
    "host-user": Rule(
        "the modules do not run as root on the host",
        "owners, the engine and the policy directory are out of reach for others",
        "log in as root, or as a user that may become root by sudo (ansible_become)",
    ),
    "host-systemd": Rule(
        "the host is not run by systemd",
        "the engine and the timers of the bundle are started by it, also after a restart of the host",
        "use a host that is booted by systemd, not a plain container",
    ),
    "host-memory": Rule(
        "the host has too little memory",
        "the kernel would kill the database in the middle of a write",
        "give the host more memory, or lower memory_preflight_min_memory_bytes knowingly",
    ),
    "host-disk": Rule(
        "too little space is free",
        "a full disk stops the database and leaves half-written images",
        "free or add space there, or lower memory_preflight_min_free_disk_bytes knowingly",
    ),
    "host-inodes": Rule(
        "fewer than 50000 inodes are free",
        "images consist of many small files; unpacking them would fail although space is left",
        "remove small files there, or use a file system with more inodes",
    ),
    "host-clock": Rule(
        "the clocks of controller and host differ",
        "certificates and keys would be expired or not valid yet, with messages that hide the cause",
        "synchronise the clock on both sides (timedatectl status) and run again",
    ),
    "engine-absent": Rule(
        "there is no Docker Engine, and no packages are named for this system",
        "the role installs the engine of the distribution only where that brings Compose as well",
        "install Docker Engine and the Compose plugin first, or set container_engine_packages for this system",
    ),
    "engine-stopped": Rule(
        "Docker Engine is installed but does not answer",
        "an engine that is there is not touched without being asked",
        "systemctl enable --now docker, look at journalctl -u docker, and run again",
    ),
    "engine-product": Rule(
        "what answers at the engine's socket is not Docker Engine",
        "networks, digests and health checks behave otherwise there",
        "remove the emulation and install Docker Engine",
    ),
    "engine-version": Rule(
        "Docker Engine is too old",
        "networks and health gates of the stack need a newer one",
        "upgrade Docker Engine",
    ),
    "engine-mode": Rule(
        "Docker Engine runs rootless or remaps users",
        "owners seen in a container differ from those on the host, so the router refuses its keys and its policy",
        "use an engine without rootless mode and without userns-remap",
    ),
    "compose-version": Rule(
        "the docker client or its Compose plugin is missing or too old",
        "the stack is described in a form that older ones misread",
        "install the docker client and a newer Compose plugin",
    ),
    "project-taken": Rule(
        "containers of the same Compose project were made from another file",
        "the activation would replace or remove containers that it did not make",
        "choose another memory_activation_project, or remove the other project if it is not needed",
    ),
    "container-name": Rule(
        "a container that is not of this project holds a name of it",
        "Compose could not create its own container of that name",
        "rename or remove that container; the bundle does not remove what it did not make",
    ),
    "volume-project": Rule(
        "the database volume belongs to another Compose project or to nobody",
        "somebody else's data would be opened and migrated",
        "choose another hindsight_stack_volume_name, or label the volume for this project if it is yours",
    ),
    "volume-major": Rule(
        "the database volume was made by another PostgreSQL major",
        "the server would not start on it, after the old containers are gone",
        "keep the locked major, or dump and restore into a new volume; never delete the volume for this",
    ),
    "volume-owner": Rule(
        "the database volume belongs to another user than the locked image",
        "the server would not start on it, after the old containers are gone",
        "find out which image wrote it; do not change owners recursively",
    ),
    "subnet-overlap": Rule(
        "the origin subnet overlaps a container network or a route of the host",
        "the network could not be created, or traffic for the other one would be lost",
        "choose a free hindsight_stack_origin_subnet and an address within it",
    ),
    "bind-absent": Rule(
        "a bind address is not an address of the host",
        "the port could not be published, after the old edge is gone",
        "correct memory_edge_bind_addresses, or configure the address on the host first",
    ),
    "port-in-use": Rule(
        "somebody else listens on the port of the edge",
        "the new edge could not start, after the old one is gone",
        "stop the other program or choose another memory_edge_https_port",
    ),
    "path-symlink": Rule(
        "a symbolic link stands where a directory is due",
        "the link can be pointed elsewhere after it was checked, and the router refuses linked paths",
        "put a real directory there, or choose a path without links",
    ),
    "path-type": Rule(
        "something that is no directory stands where a directory is due",
        "the bundle does not remove what it did not make",
        "look at it, move it away, and run again",
    ),
    "path-unsafe": Rule(
        "a directory on the way is not owned by root, or others may write to it",
        "whoever can write there can replace keys and policy; the router refuses such a policy for everybody",
        "chown root and chmod go-w that directory, or choose another path",
    ),
    "policy-leftover": Rule(
        "an unfinished publication lies in the policy directory",
        "its writer was interrupted and refuses to go on until somebody has looked",
        "compare .access.json.publish with access.json, keep the right content, remove the leftover, and run again",
    ),
    "data-owner": Rule(
        "a data directory belongs to another user than the one of the settings",
        "the key store accepts no other owner, so the router would not start",
        "restore the earlier memory_router_uid, or move the key store in a maintenance window",
    ),
    "user-conflict": Rule(
        "the user of the router has another uid on the host, or its uid belongs to another user",
        "that user could read the key store",
        "choose a free memory_router_uid or another memory_router_user",
    ),
    "group-conflict": Rule(
        "a group of the bundle has another gid on the host, or its gid belongs to another group",
        "members of that group could read the policy or the secrets of the router",
        "choose a free gid or another group name",
    ),
}

#: Every rule by its identifier.
RULES: Mapping[str, Rule] = MappingProxyType(_RULES)
