"""Everything that tests the project: linters, unit tests, scenarios on managed hosts, acceptance tests."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from .controller import PROJECT, Venv
from .sandbox import Sandbox

#: The stages in the order in which they run.
STAGES = ("lint", "unit", "molecule", "faults", "acceptance")

#: Stages that need container engine, images and registry.
NEED_HOSTS = ("molecule", "faults", "acceptance")

_SHELLS = ("sh", "bash", "dash")
_CODE = (".ci", "benchmarks", "images", "roles", "scripts", "tests")
_YAML = (".ci", "inventories", "molecule", "playbooks", "roles", "tests")


@dataclass(frozen=True)
class Outcome:
    """What one check said: its name, the tests that passed, failed and were skipped, and its duration."""

    name: str
    passed: int
    failed: int
    skipped: int
    seconds: float


class Checks:
    """Runs checks one after the other and remembers what they said."""

    def __init__(self, sandbox: Sandbox, venv: Venv) -> None:
        self.outcomes: list[Outcome] = []
        self._venv = venv
        self._state = sandbox.state
        self._results = sandbox.state / "test-results"
        self._results.mkdir(exist_ok=True)
        self._environment = {
            **venv.environment(),
            "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"),
            "MEMORY_SANDBOX": sandbox.prefix,
            "MEMORY_SANDBOX_STATE": str(sandbox.state),
            "MYPYPATH": str(PROJECT / "scripts"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def stage(self, name: str) -> bool:
        """Run the stage `name`; tell whether all of it passed."""
        before = len(self.outcomes)
        if name == "lint":
            self._lint()
        elif name == "unit":
            self._pytest("unit", [path for path in ("tests/unit", "tests/meta") if (PROJECT / path).is_dir()])
        elif name == "molecule":
            for scenario in sorted(path.parent.name for path in PROJECT.glob("molecule/*/molecule.yml")):
                self._molecule(scenario)
        else:
            self._pytest(name, [f"tests/{name}"])
        return all(outcome.failed == 0 for outcome in self.outcomes[before:])

    def _lint(self) -> None:
        programs = python_programs(PROJECT / "scripts")
        packages = sorted(path.parent.name for path in PROJECT.glob("scripts/*/__init__.py"))
        package_words = [word for package in packages for word in ("-p", package)]
        yaml = [name for name in _YAML if (PROJECT / name).is_dir()]
        ansible = [
            name for name in ("inventories", "molecule", "playbooks", "roles") if (PROJECT / name).is_dir()
        ]
        self._tool(
            "ansible-lint", "ansible-lint", ["--offline", "--strict", "--profile", "production", *ansible]
        )
        self._tool("yamllint", "yamllint", ["--strict", *yaml])
        self._tool("ruff check", "ruff", ["check", ".", *programs])
        self._tool("ruff format", "ruff", ["format", "--check", ".", *programs])
        self._tool("mypy of packages", "mypy", ["--strict", *package_words])
        self._tool("mypy of programs", "mypy", ["--strict", "--scripts-are-modules", *programs])
        self._tool("shellcheck", "shellcheck", shell_programs(PROJECT / name for name in _CODE))

    def _tool(self, name: str, tool: str, arguments: Sequence[str]) -> None:
        code, seconds = self._run(f"lint: {name}", [self._venv.program(tool), *arguments])
        self.outcomes.append(Outcome(name, int(code == 0), int(code != 0), 0, seconds))

    def _pytest(self, name: str, paths: Sequence[str]) -> None:
        report = self._results / f"{name}.xml"
        report.unlink(missing_ok=True)
        words = ["-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", f"--junit-xml={report}", *paths]
        code, seconds = self._run(f"tests: {name}", [self._venv.program("python"), *words])
        self.outcomes.append(outcome_of(name, code, report, seconds))

    def _molecule(self, scenario: str) -> None:
        report = self._results / f"molecule-{scenario}.xml"
        report.unlink(missing_ok=True)
        words = [self._venv.program("molecule"), "test", "--scenario-name", scenario]
        # Molecule empties this directory, so it is one of its own, never the current one.
        scratch = self._state / "molecule" / scenario
        scratch.mkdir(parents=True, exist_ok=True)
        code, seconds = self._run(f"molecule: {scenario}", words, MOLECULE_EPHEMERAL_DIRECTORY=str(scratch))
        self.outcomes.append(Outcome(f"molecule {scenario}", int(code == 0), int(code != 0), 0, seconds))
        if report.exists():
            self.outcomes.append(outcome_of(f"molecule {scenario}: verify", 0, report, 0.0))

    def _run(self, title: str, words: Sequence[str], **extra: str) -> tuple[int, float]:
        print(f"== {title}", file=sys.stderr, flush=True)
        begin = time.monotonic()
        done = subprocess.run(
            words, cwd=PROJECT, env={**self._environment, **extra}, stdin=subprocess.DEVNULL, check=False
        )
        return done.returncode, time.monotonic() - begin


def outcome_of(name: str, code: int, report: Path, seconds: float) -> Outcome:
    """Return the outcome of a pytest run from its exit status and its JUnit report.

    A run that failed without a failed test (nothing collected, an internal error) counts as one failure.
    """
    tests = failed = skipped = 0
    if report.exists():
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            tests += int(suite.get("tests", "0"))
            failed += int(suite.get("failures", "0")) + int(suite.get("errors", "0"))
            skipped += int(suite.get("skipped", "0"))
    passed = max(tests - failed - skipped, 0)
    if failed == 0 and (code != 0 or passed == 0):
        failed = 1
    return Outcome(name, passed, failed, skipped, seconds)


def summary(outcomes: Iterable[Outcome]) -> str:
    """Return the table of all checks; its last line is `N passed, N failed`."""
    rows = list(outcomes)
    lines = []
    for row in rows:
        skipped = f", {row.skipped} skipped" if row.skipped else ""
        verdict = "ok    " if row.failed == 0 else "FAILED"
        lines.append(
            f"{verdict} {row.name}: {row.passed} passed, {row.failed} failed{skipped} ({row.seconds:.0f} s)"
        )
    lines.append(f"{sum(row.passed for row in rows)} passed, {sum(row.failed for row in rows)} failed")
    return "\n".join(lines)


def python_programs(folder: Path) -> list[str]:
    """Return the executable Python programs without a suffix in `folder`."""
    return [
        str(path) for path in sorted(folder.iterdir()) if path.is_file() and "python" in _interpreter(path)
    ]


def shell_programs(folders: Iterable[Path]) -> list[str]:
    """Return the shell programs below `folders`, known by their first line."""
    found = []
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and _interpreter(path) in _SHELLS:
                found.append(str(path))
    return found


def _interpreter(path: Path) -> str:
    with path.open("rb") as file:
        first = file.readline(200)
    if path.suffix == ".py" or not first.startswith(b"#!"):
        return ""
    words = first[2:].decode(errors="replace").split()
    name = words[1] if len(words) > 1 and words[0].endswith("/env") else (words or [""])[0]
    return Path(name).name
