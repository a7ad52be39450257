"""Rules that every playbook, role and task keeps, so that no gate can be lost and no secret shown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from bundle import preflight_settings

from tests.meta.project import ROOT, Task, load, mentions, plays, roles, secrets, specifications, tasks

PREFLIGHT_TASKS = ROOT / "roles/memory_preflight/tasks/main.yml"
SECRET_NAME = re.compile(r"_(?:password|token|api_key|secret)$")
SPEC_TYPES = {
    "bool": "bool",
    "int": "int",
    "str": "str",
    "path": "path",
    "dict": "dict",
    "list of str": "list of str",
    "list of dict": "list of dict",
}


def strings(value: Any) -> Iterator[str]:
    """All text within `value`."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from strings(key)
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
    else:
        yield str(value)


def keyed(value: Any, key: str) -> Iterator[Any]:
    """All values of `key` within `value`."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name == key:
                yield item
            yield from keyed(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from keyed(item, key)


def test_there_is_something_to_look_at() -> None:
    assert len(plays()) >= 3
    assert len(roles()) >= 10
    assert len(tasks()) >= 20
    assert len(secrets()) >= 6


def test_every_play_stops_all_hosts_at_the_first_failure_and_says_how_it_becomes_root() -> None:
    for path, play in plays():
        assert play.get("any_errors_fatal") is True, path
        assert play.get("max_fail_percentage") == 0, path
        assert isinstance(play.get("become"), bool), path
        assert play.get("gather_facts") is False, path


def test_no_tag_can_drop_a_gate() -> None:
    """Only the question for tags carries one: `always`, so that it is asked under --tags too; and once more without."""
    tagged = [task for task in tasks() if "tags" in task.body]
    assert [(task.file, task.body["tags"]) for task in tagged] == [(PREFLIGHT_TASKS, ["always"])]
    first, second = (
        task for task in tasks() if task.file == PREFLIGHT_TASKS and "ansible_run_tags" in str(task.body)
    )
    assert first.arguments == second.arguments
    assert "tags" not in second.body
    for path in sorted((ROOT / "playbooks").glob("*.yml")):
        assert not list(keyed(load(path), "tags")), path


def test_every_rescue_ends_in_a_failure() -> None:
    """A rescue that succeeds would end the run with status 0."""
    for task in tasks():
        if "rescue" in task.body:
            assert Task(task.file, task.body["rescue"][-1]).module == "fail", task


def test_tasks_with_secrets_show_nothing() -> None:
    looked_at = 0
    for task in tasks():
        if task.module and mentions(" ".join(strings({**task.body, "name": ""})), secrets()):
            looked_at += 1
            assert task.body.get("no_log") is True, task
            assert task.body.get("diff") is False, task
            assert "loop" not in task.body, task
    assert looked_at


def test_secrets_are_declared_as_such() -> None:
    declared = set()
    for role, entries in specifications().items():
        for entry in entries.values():
            for name, option in (entry.get("options") or {}).items():
                looks_secret = bool(SECRET_NAME.search(name))
                assert bool(option.get("no_log")) == looks_secret, f"{role}: {name}"
                if looks_secret:
                    declared.add(name)
                    assert option["type"] == "str", name
    assert declared == {name for name, kind in preflight_settings.kinds().items() if kind == "secret"}


def test_probes_run_in_check_mode_or_say_that_they_do_not() -> None:
    """In check mode a `command` is skipped with status 0, and a gate on it would pass for nothing."""
    for task in tasks():
        if task.module in ("command", "shell", "uri", "script", "raw"):
            assert "changed_when" in task.body, task
            if task.body["changed_when"] is False:
                skipped = "not ansible_check_mode" in str(task.body.get("when", ""))
                assert task.body.get("check_mode") is False or skipped, task


def test_the_probe_of_the_preflight_runs_in_check_mode_and_its_gate_requires_that_it_ran() -> None:
    (probe,) = (task for task in tasks() if task.module == "memory_probe")
    assert probe.body["check_mode"] is False
    gates = [
        task
        for task in tasks()
        if task.module == "assert" and "memory_preflight_probe is not skipped" in str(task.body)
    ]
    assert gates


def test_nothing_is_tried_again() -> None:
    """S2-26, S1-05: the outcome of an interrupted retain is uncertain, so no task repeats by itself or runs on unseen."""
    for task in tasks():
        assert not {"retries", "until", "async", "poll"} & set(task.body), task


def test_no_failure_is_passed_over() -> None:
    for task in tasks():
        assert not {"ignore_errors", "ignore_unreachable"} & set(task.body), task
        assert task.body.get("failed_when") is not False, task


def test_every_assertion_tells_what_to_do() -> None:
    looked_at = [task for task in tasks() if task.module == "assert"]
    assert looked_at
    for task in looked_at:
        assert task.arguments.get("fail_msg"), task


def test_modes_are_quoted_octal_text() -> None:
    modes = [(task, mode) for task in tasks() for mode in keyed(task.arguments, "mode")]
    assert modes
    for task, mode in modes:
        assert isinstance(mode, str), task
        assert re.fullmatch(r"0[0-7]{3}", mode), task


def test_no_module_writes_a_path_recursively() -> None:
    for task in tasks():
        assert not any(keyed(task.arguments, "recurse")), task


@pytest.mark.parametrize("role", roles(), ids=lambda role: role.name)
def test_a_role_declares_exactly_its_defaults(role: Any) -> None:
    path = role / "defaults" / "main.yml"
    defaults = (load(path) if path.exists() else None) or {}
    entries = specifications()[role.name]
    main = entries["main"].get("options") or {}
    every = {name for entry in entries.values() for name in entry.get("options") or {}}
    required = {name for name, option in main.items() if option.get("required")}
    assert set(main) - required == set(defaults) & set(main)
    assert set(defaults) <= every
    assert all(name.startswith(f"{role.name}_") for name in every)
    for name, value in defaults.items():
        for entry in entries.values():
            if name in (entry.get("options") or {}):
                assert entry["options"][name].get("default") == value, name


@pytest.mark.parametrize("role", roles(), ids=lambda role: role.name)
def test_internal_names_are_marked(role: Any) -> None:
    """Results and role variables start with `__`, but for those that other roles use by name."""
    names = {name for path in (role / "vars").glob("*.yml") for name in load(path) or {}}
    for task in tasks():
        if role in task.file.parents:
            names |= {str(task.body["register"])} if "register" in task.body else set()
            names |= set(task.arguments) - {"cacheable"} if task.module == "set_fact" else set()
    for name in names:
        assert name.startswith(f"__{role.name}_") or name in preflight_settings.NOT_SETTINGS, name


def test_the_preflight_knows_every_setting_of_the_roles_of_site() -> None:
    (play,) = (play for path, play in plays() if path.name == "site.yml")
    names = [item["role"] if isinstance(item, dict) else item for item in play["roles"]]
    assert names[0] == "memory_preflight"
    declared = {
        name: option["type"] + (f" of {option['elements']}" if "elements" in option else "")
        for role in names
        for name, option in (specifications()[role]["main"].get("options") or {}).items()
    }
    known = preflight_settings.kinds()
    assert set(declared) == set(known)
    assert {role for role, settings in preflight_settings.SETTINGS.items() if settings} <= set(names)
    for name, kind in known.items():
        expected = {"secret": {"str"}, "url": {"str"}, "controller file": {"str", "path"}, "path": {"path"}}
        assert declared[name] in expected.get(kind, {SPEC_TYPES.get(kind, kind)}), name


def test_choices_are_those_of_the_preflight() -> None:
    looked_at = 0
    for entries in specifications().values():
        for name, option in (entries["main"].get("options") or {}).items():
            if "choices" in option:
                looked_at += 1
                known = set(preflight_settings.CHOICES[name])
                assert set(option["choices"]) == known - {"claude-code"}, name
    assert looked_at == len(preflight_settings.CHOICES)
