"""The controller: package mirror, package installation, choice of Python, virtual environment, programs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from bundle import checks, controller, process
from bundle.errors import BundleError

DEBIAN_12 = """\
https://apt.vendor.example/tools|tools-bookworm|
http://mirror.example/debian/|bookworm|Debian
http://mirror.example/debian/|bookworm-updates|Debian
http://mirror.example/debian-security/|bookworm-security|Debian
"""


def test_the_mirror_is_the_one_apt_uses() -> None:
    mirror = controller.parse_mirror(DEBIAN_12)
    assert mirror.sources("trixie") == [
        "deb http://mirror.example/debian trixie main",
        "deb http://mirror.example/debian trixie-updates main",
        "deb http://mirror.example/debian-security trixie-security main",
    ]


def test_a_mirror_without_fetched_lists_is_known_by_its_path() -> None:
    mirror = controller.parse_mirror("https://proxy.example/repo/debian|trixie|\n")
    assert (mirror.main, mirror.security) == ("https://proxy.example/repo/debian", None)
    assert len(mirror.sources("trixie")) == 2


@pytest.mark.parametrize(
    "targets",
    [
        "",
        "http://archive.ubuntu.com/ubuntu/|noble|Ubuntu\n",
        "file:/srv/debian|trixie|Debian\n",
        "nonsense\n",
    ],
)
def test_elsewhere_the_mirror_is_debians_own(targets: str) -> None:
    mirror = controller.parse_mirror(targets)
    assert mirror.main == "http://deb.debian.org/debian"
    assert mirror.security == "http://deb.debian.org/debian-security"


def test_only_what_decides_how_a_mirror_is_reached_is_carried_over() -> None:
    dump = "\n".join(
        (
            'APT::Architecture "amd64";',
            'Acquire::http::Proxy "http://proxy.example:3128";',
            'Acquire::http::Proxy::mirror.example "DIRECT";',
            'Acquire::https::Proxy "";',
            'Acquire::Check-Valid-Until "false";',
            'DPkg::Post-Invoke:: "rm -rf /";',
        )
    )
    assert controller.parse_apt_options(dump, {}) == [
        'Acquire::Check-Valid-Until "false";',
        'Acquire::http::Proxy "http://proxy.example:3128";',
        'Acquire::http::Proxy::mirror.example "DIRECT";',
    ]


def test_proxies_of_the_environment_count_where_apt_names_none() -> None:
    environ = {"http_proxy": "http://a.example:1", "HTTPS_PROXY": "http://b.example:2"}
    assert controller.parse_apt_options('Acquire::http::Proxy "http://apt.example:3";', environ) == [
        'Acquire::http::Proxy "http://apt.example:3";',
        'Acquire::https::Proxy "http://b.example:2";',
    ]
    assert controller.parse_apt_options("", {"http_proxy": 'http://x";evil'}) == []


@pytest.mark.parametrize("name", ["Upper", "-box", "box-", "a" * 33, "a b", "a_b", "$(id)"])
def test_an_unusable_prefix_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("MEMORY_SANDBOX", name)
    with pytest.raises(BundleError):
        controller.prefix()


def test_the_prefix_has_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMORY_SANDBOX", "")
    assert controller.prefix() == "memory-sandbox"


def test_a_state_directory_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MEMORY_SANDBOX_STATE", str(tmp_path / "file" / "state"))
    with pytest.raises(BundleError, match="cannot write in the state directory"):
        controller.state_dir()
    with pytest.raises(BundleError), controller.exclusive(tmp_path / "file", "engine"):
        pass


def test_without_root_and_without_sudo_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BundleError, match="neither root nor has sudo"):
        controller.as_root(["apt-get", "update"])
    program(tmp_path, "sudo", "exit 0")
    assert controller.as_root(["apt-get", "update"]) == ["sudo", "--", "apt-get", "update"]


def program(folder: Path, name: str, script: str) -> Path:
    """Put a shell program into the folder."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a make-believe apt: folder `installed`, folder `offered`, file `calls`."""
    for name in ("bin", "installed", "offered"):
        (tmp_path / name).mkdir()
    binaries = tmp_path / "bin"
    for name in ("sh", "env", "touch", "cp"):
        (binaries / name).symlink_to(f"/usr/bin/{name}")
    program(binaries, "dpkg-query", f'[ -e {tmp_path}/installed/"$4" ] || exit 1; printf installed')
    program(
        binaries,
        "apt-cache",
        f'echo "$2:"; [ -e {tmp_path}/offered/"$2" ] && echo "  Candidate: 1.0" || echo "  Candidate: (none)"',
    )
    program(
        binaries,
        "apt-get",
        f"""echo "$DEBIAN_FRONTEND $*" >>{tmp_path}/calls
for word in "$@"; do
  case "$word" in
    update) [ ! -e {tmp_path}/mirror ] || touch {tmp_path}/offered/mmdebstrap;;
    mmdebstrap) [ ! -e {tmp_path}/stale ] || {{ echo 404; touch {tmp_path}/was-stale; exit 100; }};;
  esac
done""",
    )
    monkeypatch.setenv("PATH", str(binaries))
    monkeypatch.setattr(controller, "as_root", list)
    return tmp_path


def calls(apt: Path) -> list[str]:
    """Return the verbs apt-get was called with."""
    path = apt / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    return [next(word for word in line.split() if word in ("update", "install")) for line in lines]


def test_installed_packages_cost_no_call(apt: Path) -> None:
    (apt / "installed" / "curl").touch()
    assert controller.ensure_packages(["curl"], apt / "log") == []
    assert calls(apt) == []


def test_a_known_package_is_installed_without_refreshing_the_lists(apt: Path) -> None:
    (apt / "installed" / "curl").touch()
    (apt / "offered" / "mmdebstrap").touch()
    assert controller.ensure_packages(["curl", "mmdebstrap"], apt / "log") == ["mmdebstrap"]
    assert calls(apt) == ["install"]
    line = (apt / "calls").read_text()
    assert line.startswith("noninteractive ")
    assert line.endswith("--no-install-recommends install mmdebstrap\n")


def test_an_unknown_package_refreshes_the_lists_first(apt: Path) -> None:
    (apt / "mirror").touch()
    controller.ensure_packages(["mmdebstrap"], apt / "log")
    assert calls(apt) == ["update", "install"]


def test_a_package_nobody_offers_is_refused_by_name(apt: Path) -> None:
    with pytest.raises(BundleError, match="mmdebstrap"):
        controller.ensure_packages(["mmdebstrap"], apt / "log")
    assert calls(apt) == ["update"]


def test_stale_lists_are_refreshed_once_and_the_fault_is_shown(apt: Path) -> None:
    (apt / "offered" / "mmdebstrap").touch()
    (apt / "stale").touch()
    with pytest.raises(BundleError) as caught:
        controller.ensure_packages(["mmdebstrap"], apt / "log")
    assert calls(apt) == ["install", "update", "install"]
    assert "404" in caught.value.why


def test_without_apt_the_supported_systems_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BundleError, match="no apt") as caught:
        controller.missing_packages(["curl"])
    assert "Ubuntu 24.04" in caught.value.why


@pytest.fixture
def pythons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH without any Python."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("MEMORY_PYTHON", raising=False)
    return tmp_path


def test_the_newest_python_that_runs_is_chosen(pythons: Path) -> None:
    program(pythons, "python3.13", "echo 'python3.13: command not found' >&2; exit 127")
    newest = program(pythons, "python3.12", "exit 0")
    assert controller.choose_python(pythons / "log") == str(newest)


def test_the_running_python_is_the_last_resort(pythons: Path) -> None:
    program(pythons, "python3.12", "exit 1")
    assert controller.choose_python(pythons / "log") == sys.executable


def test_a_named_python_is_used_or_refused(pythons: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(pythons, "python3.13", "exit 0")
    mine = program(pythons, "mine", "exit 0")
    monkeypatch.setenv("MEMORY_PYTHON", "mine")
    assert controller.choose_python(pythons / "log") == str(mine)
    program(pythons, "mine", "exit 1")
    with pytest.raises(BundleError, match="MEMORY_PYTHON=mine"):
        controller.choose_python(pythons / "log")


def test_the_venv_package_of_the_system_python_is_installed_when_missing(
    pythons: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = Path("/usr/bin/python3")
    if not system.exists():
        pytest.skip("no system Python here")
    installed: list[str] = []
    monkeypatch.setattr(sys, "executable", str(system))
    monkeypatch.setattr(controller, "_can_make_venv", lambda _python: bool(installed))
    monkeypatch.setattr(controller, "ensure_packages", lambda names, _log: installed.extend(names))
    assert controller.choose_python(pythons / "log") == str(system)
    assert installed == [f"python{sys.version_info.major}.{sys.version_info.minor}-venv"]


@pytest.fixture
def venv_maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the making of environments; returns the list of what was run."""
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("a==1\n")
    monkeypatch.setattr(controller, "REQUIREMENTS", requirements)
    monkeypatch.setattr(controller, "choose_python", lambda _log: sys.executable)
    made: list[str] = []

    def make(words: list[str], _log: Path, *, timeout: float) -> None:
        assert timeout > 0
        if "venv" in words:
            made.append("venv")
            python = Path(words[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.touch()
        else:
            made.append("pip")
            assert "--require-hashes" in words
            if (tmp_path / "broken").exists():
                raise BundleError("pip failed", "", "")

    monkeypatch.setattr(controller, "run_to_log", make)
    return made


def test_a_venv_is_made_once_per_lock(tmp_path: Path, venv_maker: list[str]) -> None:
    venv = controller.ensure_venv(tmp_path)
    assert controller.ensure_venv(tmp_path) == venv
    assert venv_maker == ["venv", "pip"]
    controller.REQUIREMENTS.write_text("a==2\n")
    controller.ensure_venv(tmp_path)
    assert venv_maker == ["venv", "pip"] * 2


def test_an_interrupted_venv_is_made_anew(tmp_path: Path, venv_maker: list[str]) -> None:
    (tmp_path / "broken").touch()
    with pytest.raises(BundleError):
        controller.ensure_venv(tmp_path)
    (tmp_path / "broken").unlink()
    controller.ensure_venv(tmp_path)
    assert venv_maker == ["venv", "pip"] * 2


def test_the_environment_of_programs_is_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOLECULE_EPHEMERAL_DIRECTORY", "")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    environment = controller.Venv(tmp_path).environment()
    assert "MOLECULE_EPHEMERAL_DIRECTORY" not in environment
    assert "PYTHONPATH" not in environment
    assert environment["PATH"].startswith(f"{tmp_path}/bin:")


def test_a_failing_program_is_told_with_its_last_lines(tmp_path: Path) -> None:
    seen: list[str] = []
    with pytest.raises(BundleError) as caught:
        process.run_to_log(
            ["sh", "-c", "seq 100; echo broken >&2; exit 3"],
            tmp_path / "log",
            timeout=30,
            on_line=seen.append,
        )
    assert "exit status 3" in caught.value.what
    assert caught.value.why.endswith("broken")
    assert len(caught.value.why.splitlines()) == 16
    assert (len(seen), len((tmp_path / "log").read_text().splitlines())) == (101, 101)


def test_programs_that_are_missing_or_too_slow_are_told(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="not installed"):
        process.run_to_log(["no-such-program"], tmp_path / "log", timeout=5)
    with pytest.raises(BundleError, match="did not end within"):
        process.run_to_log(["sleep", "30"], tmp_path / "log", timeout=0.2)
    with pytest.raises(BundleError, match="not installed"):
        process.run(["no-such-program"], timeout=5)
    with pytest.raises(BundleError, match="did not end within"):
        process.run(["sleep", "30"], timeout=0.2)
    with pytest.raises(BundleError, match="cannot be started"):
        process.run([tmp_path], timeout=5)


REPORT = '<testsuites><testsuite tests="9" failures="1" errors="1" skipped="2"/></testsuites>'


@pytest.mark.parametrize(
    ("code", "report", "passed", "failed", "skipped"),
    [
        (1, REPORT, 5, 2, 2),
        (0, '<testsuites><testsuite tests="3" failures="0" errors="0" skipped="0"/></testsuites>', 3, 0, 0),
        (5, '<testsuites><testsuite tests="0" failures="0" errors="0" skipped="0"/></testsuites>', 0, 1, 0),
        (3, "", 0, 1, 0),
    ],
)
def test_pytest_reports_are_counted(
    tmp_path: Path, code: int, report: str, passed: int, failed: int, skipped: int
) -> None:
    path = tmp_path / "report.xml"
    if report:
        path.write_text(report)
    outcome = checks.outcome_of("unit", code, path, 1.0)
    assert (outcome.passed, outcome.failed, outcome.skipped) == (passed, failed, skipped)


def test_the_summary_ends_with_the_totals() -> None:
    outcomes = [checks.Outcome("a", 3, 0, 1, 1.0), checks.Outcome("b", 0, 1, 0, 2.0)]
    assert checks.summary(outcomes).splitlines()[-1] == "3 passed, 1 failed"


def test_programs_are_known_by_their_first_line(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("#!/usr/bin/env python3\n")
    (tmp_path / "b").write_text("#!/bin/sh\n")
    (tmp_path / "c").write_text("#!/usr/bin/env bash\n")
    (tmp_path / "d").write_text("text\n")
    (tmp_path / "e.py").write_text("#!/usr/bin/env python3\n")
    (tmp_path / "f").write_bytes(b"")
    assert checks.python_programs(tmp_path) == [str(tmp_path / "a")]
    assert checks.shell_programs([tmp_path]) == [str(tmp_path / "b"), str(tmp_path / "c")]
