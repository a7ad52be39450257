"""Filters that decide on the controller whether a host may be changed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ansible import context
from ansible.errors import AnsibleFilterError

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

from bundle import preflight

LIMITING_OPTIONS = ("step", "start_at_task")


def memory_setting_names(roles: Iterable[str]) -> list[str]:
    """Names of the public variables of `roles`."""
    return preflight.setting_names(roles)


def memory_probe_request(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the module memory_probe for `settings`."""
    return preflight.probe_request(settings)


def memory_refusals(
    probe: Mapping[str, Any], settings: Mapping[str, Any], names: Iterable[str], private_key: str | None
) -> list[dict[str, str]]:
    """Reasons not to go on, for one host.

    Args:
        probe: result of the module memory_probe.
        settings: values of the public variables.
        names: names of the variables that the inventory, facts and the command line set.
        private_key: PEM text of the edge's private key, or None.
    """
    options = [name for name in LIMITING_OPTIONS if context.CLIARGS.get(name)]
    try:
        found = preflight.refusals(
            settings, probe, time.time(), names=names, private_key=private_key, limiting_options=options
        )
    except KeyError as error:
        raise AnsibleFilterError(
            f"memory_preflight needs all roles of site.yml in its play; {error} is missing"
        ) from error
    return [refusal.as_dict() for refusal in found]


def memory_refusal_text(refusals: Iterable[Mapping[str, str]]) -> str:
    """All reasons as text for an operator."""
    return preflight.text(preflight.Refusal(**refusal) for refusal in refusals)


class FilterModule:
    """Registers the filters."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Filters by name."""
        return {
            "memory_probe_request": memory_probe_request,
            "memory_refusal_text": memory_refusal_text,
            "memory_refusals": memory_refusals,
            "memory_setting_names": memory_setting_names,
        }
