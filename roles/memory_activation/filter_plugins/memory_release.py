"""Filters that assemble a release on the controller."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

from memoryctl import release

PROGRAM = Path(release.__file__).parent


def memory_compose_text(value: Any) -> str:
    """`value` as text that Compose passes on unchanged: a dollar sign would begin a variable."""
    return str(value).replace("$", "$$")


def memory_url_host(name: str) -> str:
    """`name` as the host part of a URL: an IPv6 address in brackets."""
    return f"[{name}]" if ":" in name else name


def memory_configuration(contents: Mapping[str, str]) -> dict[str, str]:
    """Name of the content-addressed configuration directory of each service."""
    return {name.rsplit("-", 1)[0]: name for name in release.configuration_directories(contents)}


def memory_with_program(contents: Mapping[str, str]) -> dict[str, str]:
    """`contents` and the files of the host program, which travels in the release."""
    program = {f"memoryctl/{path.name}": path.read_text() for path in sorted(PROGRAM.glob("*.py"))}
    return {**contents, **program}


def memory_with_key_id(principal: Mapping[str, Any], key_ids: Mapping[str, str]) -> dict[str, Any]:
    """`principal` as a route needs it: with the id of its device key."""
    return {name: principal[name] for name in ("name", "alias", "bank")} | {
        "key_id": key_ids[principal["name"]]
    }


def memory_service_image(service: str, exceptions: Mapping[str, str]) -> str:
    """Name in the lock of the image that `service` runs."""
    return exceptions.get(service, service)


class FilterModule:
    """Registers the filters."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "memory_compose_text": memory_compose_text,
            "memory_configuration": memory_configuration,
            "memory_service_image": memory_service_image,
            "memory_url_host": memory_url_host,
            "memory_with_key_id": memory_with_key_id,
            "memory_with_program": memory_with_program,
        }
