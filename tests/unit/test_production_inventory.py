"""The example inventory: what it sets is accepted, and what it offers in comments exists."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from bundle import preflight_settings

from tests.unit.preflight_fixture import Case, good_case

PRODUCTION = Path(__file__).resolve().parents[2] / "inventories" / "production"
MAIN = PRODUCTION / "group_vars" / "memory" / "main.yml"
VAULT = PRODUCTION / "group_vars" / "memory" / "vault.yml.example"


def inventory_case(files: Path) -> Case:
    """A fit host with the settings of the example."""
    hosts = yaml.safe_load((PRODUCTION / "hosts.yml").read_text())["memory"]["hosts"]
    (host,) = hosts.values()
    variables = {**yaml.safe_load(MAIN.read_text()), **host}
    known = preflight_settings.kinds()
    case = good_case(files).set(**{name: value for name, value in variables.items() if name in known})
    case.names.extend(variables)
    return case


def test_the_example_is_accepted(tmp_path: Path) -> None:
    case = inventory_case(tmp_path)
    assert case.settings["memory_edge_names"] == ["memory.example.org"]
    assert [refusal.what for refusal in case.refusals()] == []


def test_every_setting_in_a_comment_exists() -> None:
    offered = re.findall(r"^#? ?([a-z_]+):", MAIN.read_text(), re.MULTILINE)
    assert len(offered) > 10
    modes = {"internal", "provided", "acme"}
    assert set(offered) - modes <= set(preflight_settings.kinds())


def test_the_vault_offers_every_secret_and_holds_none() -> None:
    offered = re.findall(r"^# ([a-z_]+): \"\"$", VAULT.read_text(), re.MULTILINE)
    assert sorted(offered) == sorted(
        name for name, kind in preflight_settings.kinds().items() if kind == "secret"
    )
    assert yaml.safe_load(VAULT.read_text()) is None


def test_no_lock_is_shipped() -> None:
    """A digest that nobody looked up is not written down."""
    assert not list(PRODUCTION.rglob("*.json"))
    for path in PRODUCTION.rglob("*"):
        assert path.is_dir() or not re.search(r"sha256:[0-9a-f]", path.read_text()), path
