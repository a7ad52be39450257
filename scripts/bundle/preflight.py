"""The preflight: whether settings, files and host are fit, decided before anything is changed.

The module memory_probe describes a host in one call; the functions here decide on the controller. They are pure but for
reading the files on the controller that the settings name. Every reason is found in one pass, and no text of a reason
holds the value of a secret.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from . import preflight_files, preflight_host, preflight_settings
from .refusal import RULES, Findings, Refusal, Rule, text

__all__ = ["RULES", "Refusal", "Rule", "probe_request", "refusals", "setting_names", "text"]


def setting_names(roles: Iterable[str]) -> list[str]:
    """Names of the public variables of `roles`."""
    return preflight_settings.names(roles)


def probe_request(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the module memory_probe; settings that are refused are not asked about.

    Raises:
        KeyError: a setting is missing altogether.
    """
    return preflight_host.request(preflight_settings.examine(settings, (), Findings()))


def refusals(
    settings: Mapping[str, Any],
    probe: Mapping[str, Any],
    now: float,
    *,
    names: Iterable[str] = (),
    private_key: str | None = None,
    limiting_options: Iterable[str] = (),
) -> list[Refusal]:
    """All reasons not to go on with a host; none when it may be changed.

    Args:
        settings: value of every public variable of the roles of site.yml.
        probe: result of the module memory_probe.
        now: time on the controller after the probe, in seconds since 1970.
        names: names of the variables that inventory and command line set, to find mistyped ones.
        private_key: PEM text of the edge's private key; read from its file when None.
        limiting_options: options of the command line that leave out tasks.

    Raises:
        KeyError: a setting is missing altogether.
    """
    findings = Findings()
    for option in limiting_options:
        findings.add("partial-run", f"the run is limited by --{option.replace('_', '-')}")
    good = preflight_settings.examine(settings, names, findings)
    locked = preflight_files.examine(good, now, private_key)
    preflight_host.examine(good, probe, locked, now)
    return findings.found
