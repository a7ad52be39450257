"""What the meta tests look at: playbooks, roles, tasks and tracked files of this project."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
BLOCK_KEYS = ("block", "rescue", "always")
TASK_LISTS = ("tasks", "pre_tasks", "post_tasks", "handlers", *BLOCK_KEYS)
# Keys of a task that are not its module.
_KEYWORDS = """action always any_errors_fatal args async become become_user block changed_when check_mode collections
connection delegate_facts delegate_to diff environment failed_when ignore_errors ignore_unreachable listen
local_action loop loop_control module_defaults name no_log notify poll register remote_user rescue retries run_once
tags throttle timeout until vars when"""
KEYWORDS = frozenset(_KEYWORDS.split())


def _vault(loader: yaml.SafeLoader, node: yaml.Node) -> str:
    return str(loader.construct_scalar(node)) if isinstance(node, yaml.ScalarNode) else ""


class Loader(yaml.SafeLoader):
    """Reads Ansible's own tags as text."""


Loader.add_constructor("!vault", _vault)
Loader.add_constructor("!unsafe", _vault)


@dataclass(frozen=True)
class Task:
    """One task or block, with the file that holds it."""

    file: Path
    body: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}: {self.body.get('name', sorted(self.body))}"

    @property
    def module(self) -> str:
        """Name of the module without its collection; empty for a block."""
        names = [key for key in self.body if key not in KEYWORDS]
        assert len(names) <= 1, f"{self}: {names}"
        return names[0].rpartition(".")[2] if names else ""

    @property
    def arguments(self) -> Any:
        """Arguments of the module."""
        names = [key for key in self.body if key not in KEYWORDS]
        return self.body[names[0]] if names else None


def load(path: Path) -> Any:
    """Content of a YAML file."""
    return yaml.load(path.read_text(), Loader)


@cache
def roles() -> tuple[Path, ...]:
    """Directories of the roles."""
    return tuple(sorted(path for path in (ROOT / "roles").iterdir() if path.is_dir()))


@cache
def plays() -> tuple[tuple[Path, Mapping[str, Any]], ...]:
    """Plays of the playbooks; imports of other playbooks are none."""
    found = [(path, play) for path in sorted((ROOT / "playbooks").glob("*.yml")) for play in load(path)]
    return tuple((path, play) for path, play in found if "hosts" in play)


@cache
def tasks() -> tuple[Task, ...]:
    """Every task and block of roles and playbooks."""
    found: list[Task] = []
    for path in sorted((ROOT / "roles").glob("*/tasks/*.yml")) + sorted(
        (ROOT / "roles").glob("*/handlers/*.yml")
    ):
        for body in load(path) or []:
            found.extend(_walk(path, body))
    for path, play in plays():
        for key in ("tasks", "pre_tasks", "post_tasks", "handlers"):
            for body in play.get(key, []):
                found.extend(_walk(path, body))
    return tuple(found)


def _walk(path: Path, body: Mapping[str, Any]) -> Iterator[Task]:
    yield Task(path, body)
    for key in BLOCK_KEYS:
        for inner in body.get(key, []):
            yield from _walk(path, inner)


@cache
def specifications() -> Mapping[str, Mapping[str, Any]]:
    """Argument specification of every role: its entry points by name."""
    return {role.name: load(role / "meta" / "argument_specs.yml")["argument_specs"] for role in roles()}


@cache
def secrets() -> frozenset[str]:
    """Names of the settings that are secrets, and of role variables that are made from them."""
    found = {
        name
        for role in specifications().values()
        for entry in role.values()
        for name, option in (entry.get("options") or {}).items()
        if option.get("no_log")
    }
    variables = {
        name: str(value)
        for role in roles()
        for path in sorted((role / "vars").glob("*.yml"))
        for name, value in (load(path) or {}).items()
    }
    while True:
        more = {name for name, value in variables.items() if name not in found and mentions(value, found)}
        if not more:
            return frozenset(found)
        found |= more


def mentions(text: str, names: set[str] | frozenset[str]) -> bool:
    """Whether `text` uses one of the variables `names`."""
    return bool(set(re.findall(r"[A-Za-z_][A-Za-z0-9_]*", text)) & names)


@cache
def tracked() -> tuple[Path, ...]:
    """Files of the project: those of Git that exist, with new ones that are not ignored."""
    words = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return tuple(path for name in sorted(set(listed.split("\0"))) if name and (path := ROOT / name).is_file())


def text_of(path: Path) -> str:
    """Content of a tracked file; empty when it is no text."""
    try:
        return path.read_text()
    except UnicodeDecodeError:
        return ""
