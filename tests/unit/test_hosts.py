"""Managed hosts: the choice of networks and addresses, and how they are reached over ssh."""

from __future__ import annotations

import ipaddress
import json
import stat
from pathlib import Path

import pytest
from bundle import hosts
from bundle.controller import DebianMirror
from bundle.errors import BundleError
from hypothesis import given
from hypothesis import strategies as st

NETWORK = hosts.Network("box", ipaddress.IPv4Network("10.213.7.0/24"))

ROUTES = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
"""


def test_routes_are_read_without_the_default_route() -> None:
    assert [str(network) for network in hosts.parse_routes(ROUTES)] == ["192.0.2.0/24", "172.17.0.0/16"]


def test_the_first_free_range_is_taken() -> None:
    used = [ipaddress.IPv4Network(text) for text in ("10.213.0.0/24", "10.213.1.128/25", "10.213.2.0/23")]
    assert str(hosts.free_subnet(used)) == "10.213.4.0/24"


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(17, 32)), max_size=40))
def test_a_free_range_overlaps_nothing(entries: list[tuple[int, int]]) -> None:
    used = [ipaddress.IPv4Network((number, length), strict=False) for number, length in entries]
    subnet = hosts.free_subnet(used)
    assert subnet.subnet_of(ipaddress.IPv4Network("10.213.0.0/16"))
    assert not any(subnet.overlaps(other) for other in used)


def test_no_free_range_is_refused() -> None:
    with pytest.raises(BundleError, match=r"10\.213\.0\.0/16"):
        hosts.free_subnet([ipaddress.IPv4Network("10.0.0.0/8")])


def test_addresses_of_a_network() -> None:
    assert (NETWORK.gateway, NETWORK.address(10)) == ("10.213.7.1", "10.213.7.10")
    for index in (0, 255, -1):
        with pytest.raises(BundleError):
            NETWORK.address(index)


def existing(monkeypatch: pytest.MonkeyPatch, *found: tuple[str, int]) -> None:
    """Let the engine have these managed hosts: name and position of the address."""
    listed = [hosts.Host(name, NETWORK.address(index), "running") for name, index in found]
    monkeypatch.setattr(hosts, "list_hosts", lambda _prefix: listed)


def test_a_host_keeps_its_address_and_a_new_one_gets_the_first_free(monkeypatch: pytest.MonkeyPatch) -> None:
    existing(monkeypatch, ("box-a", 20), ("box-b", 22))
    assert hosts.choose_address("box-b", NETWORK) == "10.213.7.22"
    assert hosts.choose_address("box-c", NETWORK) == "10.213.7.21"
    assert hosts.choose_address("box-a", NETWORK, 20) == "10.213.7.20"
    with pytest.raises(BundleError, match="no free address"):
        hosts.choose_address("box-c", NETWORK, 20)


def test_a_full_network_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    existing(monkeypatch, *((f"box-{index}", index) for index in range(20, 255)))
    with pytest.raises(BundleError, match="no free address"):
        hosts.choose_address("box-new", NETWORK)


def recorded(state: Path) -> tuple[dict[str, str], str, str]:
    """Return the host index, the known hosts and the ssh configuration."""
    known, config = (state / "ssh" / name for name in ("known_hosts", "config"))
    return json.loads((state / "hosts.json").read_text()), known.read_text(), config.read_text()


def test_hosts_are_remembered_replaced_and_forgotten(tmp_path: Path) -> None:
    (tmp_path / "ssh").mkdir()
    hosts._record(tmp_path, "box-a", "10.213.7.20", "ssh-ed25519 AAAA")
    hosts._record(tmp_path, "box-ab", "10.213.7.21", "ssh-ed25519 BBBB")
    hosts._record(tmp_path, "box-c", "10.213.7.20", "ssh-ed25519 CCCC")
    addresses, known, config = recorded(tmp_path)
    assert addresses == {"box-ab": "10.213.7.21", "box-c": "10.213.7.20"}
    assert known == "box-ab,10.213.7.21 ssh-ed25519 BBBB\nbox-c,10.213.7.20 ssh-ed25519 CCCC\n"
    server = "setpriv --bounding-set=-sys_time,-sys_module /usr/sbin/sshd -i"
    assert f"Host box-c\n  ProxyCommand docker exec -i box-c {server}\n" in config
    assert hosts._GIVEN_UP in (hosts._SOURCES / "init").read_text()
    hosts._record(tmp_path, "box-c", None)
    addresses, known, config = recorded(tmp_path)
    assert addresses == {"box-ab": "10.213.7.21"}
    assert "CCCC" not in known
    assert "box-c" not in config
    for name in ("hosts.json", "ssh/known_hosts", "ssh/config"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_the_ssh_configuration_is_strict_and_survives_odd_paths() -> None:
    text = hosts.ssh_config(Path("/srv/100% mine/ssh"), [])
    assert "StrictHostKeyChecking yes" in text
    assert "GlobalKnownHostsFile /dev/null" in text
    assert 'UserKnownHostsFile "/srv/100%% mine/ssh/known_hosts"' in text
    assert 'IdentityFile "/srv/100%% mine/ssh/id_ed25519"' in text


def test_the_image_hash_follows_its_inputs() -> None:
    mirror = DebianMirror("http://mirror.example/debian", None)
    first = hosts._image_hash(mirror, [])
    assert first == hosts._image_hash(mirror, [])
    assert first != hosts._image_hash(mirror, ['Acquire::http::Proxy "http://proxy.example:3128";'])
    assert first != hosts._image_hash(DebianMirror("http://other.example/debian", None), [])
