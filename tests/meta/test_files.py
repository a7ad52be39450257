"""Rules for all files of the project: what they may not hold, and that what they mention exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bundle import lock
from memoryctl import commands

from tests.meta.project import ROOT, roles, text_of, tracked

# Written in pieces, so that this file does not hold what it looks for.
UNFINISHED = re.compile(
    r"\b(?:" + "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK", "WI" + "P")) + r")\b"
)
MACHINE_PATHS = re.compile(
    r"(?<![\w.~-])/(?:wo" + r"rk|tmp/te" + r"am|opt/py" + r"pi|root/\.py" + r"env)(?:/|\b)"
)
DUMMY_DIGEST = re.compile(r"sha256:(?:0{64}|(?:deadbeef){8}|[0-9a-f]\.{3})")
SUPPRESSION = re.compile(
    r"#\s*(?:"
    + "|".join(("no" + "qa", "ns" + "lint", r"\w+ dis" + "able", r"type:\s*ign" + r"ore(?!\[)"))
    + ")"
)
MARKDOWN = [path for path in tracked() if path.suffix == ".md"]
TEMPLATES = sorted((ROOT / "templates").iterdir())


def test_there_is_something_to_look_at() -> None:
    assert len(tracked()) > 100
    assert ROOT / "README.md" in tracked()
    assert len(MARKDOWN) > len(roles())
    assert TEMPLATES


@pytest.mark.parametrize(
    "pattern",
    [UNFINISHED, MACHINE_PATHS, DUMMY_DIGEST, SUPPRESSION],
    ids=["unfinished", "path", "digest", "suppression"],
)
def test_no_file_holds(pattern: re.Pattern[str]) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path in tracked()
        for number, line in enumerate(text_of(path).splitlines(), start=1)
        if pattern.search(line)
    ]
    assert found == []


def test_text_files_end_with_one_line_end_and_have_no_trailing_blanks() -> None:
    for path in tracked():
        text = text_of(path)
        if text and path.suffix in (".py", ".yml", ".md", ".j2", ".toml", ".json", ".cfg", ""):
            assert text.endswith("\n"), path
            assert not text.endswith("\n\n"), path
            assert not re.search(r"[ \t]+$", text, re.MULTILINE), path
            assert "\r" not in text, path


def test_programs_are_executable_and_nothing_else_in_their_folders_is() -> None:
    programs = [path for path in sorted((ROOT / "scripts").iterdir()) if path.is_file() and not path.suffix]
    assert {"sandbox", "test", "images", "hosts", "roledocs"} <= {path.name for path in programs}
    for path in [*programs, ROOT / ".ci" / "run"]:
        assert os.access(path, os.X_OK), path
        assert path.read_text().startswith("#!/usr/bin/env "), path


def test_generated_pages_are_in_step_with_their_sources() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/roledocs"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_image_of_a_template_comes_from_the_lock() -> None:
    """No image is named by hand: each is a reference that the lock gives, which always ends in a digest."""
    named = [
        (path, line)
        for path in TEMPLATES
        for line in re.findall(r"^\s*image:\s*(.+)$", path.read_text(), re.MULTILINE)
    ]
    assert named
    used = set()
    for path, line in named:
        match = re.fullmatch(r"\{\{ [a-z_]*images\.([a-z]+)\.reference \| to_json \}\}", line)
        assert match, f"{path.name}: {line}"
        used.add(match.group(1))
    assert used == set(lock.FACT_TYPES)
    for path in tracked():
        if path.is_relative_to(ROOT / "roles") and path.suffix == ".yml":
            assert not re.search(
                r"^\s*image:\s*[\"']?[a-z0-9./-]+:[a-z0-9.]+[\"']?\s*$", path.read_text(), re.MULTILINE
            ), path


def test_binds_of_templates_must_exist() -> None:
    for path in TEMPLATES:
        text = path.read_text()
        assert text.count("type: bind") == text.count("bind: {create_host_path: false}"), path


def test_no_route_of_the_edge_leads_past_the_router() -> None:
    """S2-64, S2-66: the edge knows one upstream, and Hindsight publishes nothing."""
    caddyfile = (ROOT / "templates" / "Caddyfile.j2").read_text()
    assert re.findall(r"reverse_proxy\s+(\S+)", caddyfile) == ["router:8000"]
    compose = (ROOT / "templates" / "compose.yaml.j2").read_text()
    assert len(re.findall(r"^ {4}ports:", compose, re.MULTILINE)) == 1
    assert re.search(r"^  edge:\n(?:(?! {2}\w).*\n)*? {4}ports:", compose, re.MULTILINE)


def test_the_defense_of_a_bank_has_one_form() -> None:
    """S2-85: nothing sets it to anything but the rule that blocks sensitive content."""
    from memoryctl import hindsight

    assert hindsight.DEFENSE == {"enabled": True, "rules": [{"on": "sensitive_data", "action": "block"}]}
    mentions = [
        (path, match)
        for path in tracked()
        if path.is_relative_to(ROOT / "roles") or path.is_relative_to(ROOT / "scripts")
        for match in re.findall(r"[\"']memory_defense[\"']\s*:\s*(.{0,200})", text_of(path))
    ]
    assert mentions
    exact = re.compile(
        r"DEFENSE|\{'enabled': true, 'rules': \[\{'on': 'sensitive_data', 'action': 'block'\}\]\}"
    )
    for path, match in mentions:
        assert exact.match(match), f"{path}: {match}"


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_mentions_exists(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text):
        assert (page.parent / target).exists(), target
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
    for path in re.findall(
        r"(?<![\w/.-])(?:\./)?((?:scripts|playbooks|roles|docs|locks|templates)/[A-Za-z0-9_.-]+)", code
    ):
        assert (ROOT / path.rstrip(".")).exists(), path
    for name in re.findall(r"(?<![\w./-])([a-z_]+\.yml)\b", code):
        if (ROOT / "playbooks" / name).exists():
            continue
        assert any(path.name == name for path in tracked()) or name == "vault.yml", name


def test_commands_of_the_host_program_that_pages_mention_exist() -> None:
    mentioned = {
        word
        for page in MARKDOWN
        for snippet in re.findall(r"```.*?```|`[^`\n]+`", page.read_text(), re.DOTALL)
        for word in re.findall(r"\bmemoryctl ([a-z][a-z-]+)", snippet)
    }
    assert mentioned
    assert mentioned <= set(commands.COMMANDS)


def test_every_role_has_what_a_role_needs() -> None:
    assert roles()
    for role in roles():
        for name in ("meta/main.yml", "meta/argument_specs.yml", "README.md"):
            assert (role / name).is_file(), f"{role.name}: {name}"
