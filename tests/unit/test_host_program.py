"""The host program: exact files, secrets, releases, decisions. Runs as any user, without an engine."""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from dotenv import dotenv_values
from hypothesis import given
from hypothesis import strategies as st
from memoryctl import activation, engine, files, guard, journal, policy, readback, release, secretstore
from memoryctl.errors import Exit, Refused
from memoryctl.files import Ownership
from memoryctl.layout import Layout

ME = (os.getuid(), os.getgid())
VISIBLE = st.text(
    st.characters(codec="ascii", min_codepoint=0x21, max_codepoint=0x7E), min_size=16, max_size=60
)


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    """Directories of a host, owned by whoever runs the tests in place of root."""
    for name in ("ROOT_PRIVATE", "ROOT_PRIVATE_DIR", "ROOT_PUBLIC", "ROOT_PUBLIC_DIR"):
        monkeypatch.setattr(files, name, Ownership(*ME, getattr(files, name).mode))
    monkeypatch.setattr(files, "apply_ownership", lambda path, want: os.chmod(path, want.mode))
    (tmp_path / "etc").mkdir()
    return Layout(tmp_path / "state", tmp_path / "etc")


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_is_replaced_by_rename_and_left_alone_when_equal(tmp_path: Path) -> None:
    path = tmp_path / "file"
    want = Ownership(*ME, 0o640)
    assert files.ensure_file(path, b"one", want, check=False)
    first = path.stat().st_ino
    assert not files.ensure_file(path, b"one", want, check=False)
    assert path.stat().st_ino == first
    assert files.ensure_file(path, b"two", want, check=False)
    assert path.stat().st_ino != first and path.read_bytes() == b"two"
    assert files.observed(path) == want


def test_check_mode_writes_nothing(tmp_path: Path) -> None:
    assert files.ensure_file(tmp_path / "file", b"x", Ownership(*ME, 0o600), check=True)
    assert files.ensure_directory(tmp_path / "directory", Ownership(*ME, 0o700), check=True)
    assert list(tmp_path.iterdir()) == []


def test_a_mode_that_drifted_is_set_back(tmp_path: Path) -> None:
    """B3: the mode is exact, whatever the umask was."""
    path = tmp_path / "directory"
    previous = os.umask(0o077)
    try:
        files.ensure_directory(path, Ownership(*ME, 0o750), check=False)
    finally:
        os.umask(previous)
    assert files.observed(path) == Ownership(*ME, 0o750)
    path.chmod(0o777)
    assert files.ensure_directory(path, Ownership(*ME, 0o750), check=False)
    assert files.observed(path) == Ownership(*ME, 0o750)


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_a_symbolic_link_is_refused(tmp_path: Path, kind: str) -> None:
    """B4: a link in the place of a directory or file is never followed."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(Refused, match="symbolic link"):
        files.require_kind(link, kind)


def test_a_hard_link_is_broken_up(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    os.link(path, tmp_path / "other")
    assert files.ensure_file(path, b"x", Ownership(*ME, 0o600), check=False)
    assert path.stat().st_nlink == 1


# --- secrets ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        "short",
        "x" * 513,
        "tab\tin the middle 12",
        "blank in the middle",
        "umlaut-in-middle-ö",
        "a${HOME}bbbbbbbbbbb",
    ],
)
def test_values_that_a_reader_would_change_are_refused(value: str) -> None:
    """A1 to A3: refused, and the value is not in the message."""
    with pytest.raises(Refused) as refused:
        secretstore.refuse_unusable("hindsight-api-key", value)
    assert value not in refused.value.text()
    assert "hindsight-api-key" in refused.value.text()


@given(VISIBLE)
def test_what_is_accepted_survives_a_dotenv_reader(value: str) -> None:
    """A1, A2: the reader that Hindsight uses returns every accepted value byte for byte."""
    try:
        secretstore.refuse_unusable("x", value)
    except Refused:
        return
    item = secretstore.ConsumerFile(".env", "dotenv", {"KEY": "x"}, Ownership(0, 0, 0o640))
    text = secretstore.render(item, {"x": value}).decode()
    assert dotenv_values(stream=io.StringIO(text), interpolate=True) == {"KEY": value}


@given(VISIBLE)
def test_a_password_file_line_has_five_fields_for_any_value(value: str) -> None:
    """A5: colons and backslashes stay part of the password."""
    item = secretstore.ConsumerFile("pgpass", "pgpass", {"hindsight": "x"}, Ownership(0, 0, 0o600))
    line = secretstore.render(item, {"x": value}).decode().rstrip("\n")
    fields, escaped = [""], False
    for character in line:
        if escaped or character not in "\\:":
            fields[-1] += character
            escaped = False
        elif character == "\\":
            escaped = True
        else:
            fields.append("")
    assert fields == ["*", "*", "*", "hindsight", value]


def _consumers() -> list[secretstore.Consumer]:
    item = secretstore.ConsumerFile("TOKEN", "raw", {"value": "token"}, Ownership(*ME, 0o640))
    return [secretstore.Consumer("router", ME[1], (item,))]


def _ensure(layout: Layout, given_values: dict[str, str], check: bool = False) -> list[str]:
    return secretstore.ensure(layout, ["token", "fingerprint-key"], given_values, _consumers(), check)


def test_secrets_are_generated_once_and_given_values_win(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fchown", lambda *_: None)
    monkeypatch.setattr(secretstore, "Ownership", lambda uid, gid, mode: Ownership(*ME, mode))
    assert _ensure(layout, {}, check=True) and not layout.secrets.exists()
    assert _ensure(layout, {})
    generated = (layout.secrets / "router" / "TOKEN").read_text()
    assert len(generated) >= 40
    assert _ensure(layout, {}) == []
    before = secretstore.fingerprint(layout, "router")
    assert _ensure(layout, {"token": "chosen-by-the-operator"})
    assert (layout.secrets / "router" / "TOKEN").read_text() == "chosen-by-the-operator"
    assert secretstore.fingerprint(layout, "router") != before
    assert (layout.secrets / "store" / "token").stat().st_mode & 0o777 == 0o600


def test_another_password_for_an_existing_database_is_refused(layout: Layout) -> None:
    """A6: the one that works is not overwritten."""
    store = layout.secrets / "store"
    store.mkdir(parents=True)
    (store / "postgres-hindsight-password").write_text("the-password-that-works")
    with pytest.raises(Refused, match="another postgres-hindsight-password") as refused:
        given_values = {"postgres-hindsight-password": "another-password-0001"}
        secretstore.ensure(layout, ["postgres-hindsight-password"], given_values, [], check=False)
    assert "another-password-0001" not in refused.value.text()
    assert (store / "postgres-hindsight-password").read_text() == "the-password-that-works"


def test_an_unusable_value_leaves_the_host_untouched(layout: Layout) -> None:
    with pytest.raises(Refused):
        _ensure(layout, {"token": "has a blank inside of it"})
    assert not layout.secrets.exists()


def test_secrets_come_back_from_their_snapshot(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """A roll-back needs the secrets with which the release was committed."""
    monkeypatch.setattr(os, "fchown", lambda *_: None)
    monkeypatch.setattr(secretstore, "Ownership", lambda uid, gid, mode: Ownership(*ME, mode))
    _ensure(layout, {"token": "committed-with-this-one"})
    secretstore.snapshot(layout)
    assert secretstore.same(layout)
    _ensure(layout, {"token": "changed-afterwards-0001"})
    assert not secretstore.same(layout)
    assert {path.name for path in secretstore.restore(layout)} == {"token", "TOKEN"}
    assert secretstore.same(layout) and secretstore.restore(layout) == []
    assert (layout.secrets / "router" / "TOKEN").read_text() == "committed-with-this-one"
    _ensure(layout, {"token": "changed-again-000000001"})
    secretstore.snapshot(layout)
    assert secretstore.same(layout)
    assert "changed-again-000000001" in secretstore.known_values(layout)


# --- guard ----------------------------------------------------------------------------------------------------------------


def test_the_guard_runs_the_program_of_the_release_it_goes_back_to(layout: Layout) -> None:
    for name in ("old", "new", "ancient"):
        (layout.release(name) / "memoryctl").mkdir(parents=True)
    for name in ("old", "new"):
        (layout.release(name) / "memoryctl" / "guard.py").touch()
    program = guard._program
    assert program(layout, guard.Armed("new", "old", 0, 1)) == layout.release("old") / "memoryctl"
    assert program(layout, guard.Armed("new", None, 0, 1)) == layout.release("new") / "memoryctl"
    assert program(layout, guard.Armed("new", "ancient", 0, 1)) == layout.release("new") / "memoryctl"


def test_only_a_run_past_its_deadline_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: ended.append(pid))
    assert not guard.end_overdue_run(guard.Armed("r", "p", time.time() + 60, 4711))
    assert ended == []
    assert guard.end_overdue_run(guard.Armed("r", "p", time.time() - 1, 4711))
    assert ended == [4711]


@pytest.mark.parametrize(("head", "fits"), [("own", True), ("newer", True), ("unknown", False), ("", False)])
def test_a_release_goes_back_on_a_schema_that_it_knows_only(head: str, fits: bool) -> None:
    """E8: an older Hindsight on a newer schema starts and looks healthy."""
    manifest = {"hindsight": {"migration_head": "own", "compatible_heads": ["newer"]}}
    subject = release.Release("id", Path("/r"), manifest)
    if fits:
        activation._require_compatible(subject, head)
    else:
        with pytest.raises(Refused, match="database is at migration") as refused:
            activation._require_compatible(subject, head)
        assert "restore a backup" in refused.value.fix


# --- releases -----------------------------------------------------------------------------------------------------------


def _contents(**more: str) -> dict[str, str]:
    manifest = {"schema": release.SCHEMA, "project": "memory"}
    return {
        "release.json": json.dumps(manifest),
        "compose.yaml": "services: {}\n",
        "config/router/config.toml": "[server]\n",
        "config/edge/Caddyfile": "{}\n",
        **more,
    }


def _staged(layout: Layout) -> str:
    layout.state.mkdir()
    return release.stage(layout, _contents(), check=False)[0]


def test_a_release_is_named_by_its_content_and_staged_once(layout: Layout) -> None:
    identity = _staged(layout)
    assert identity == files.tree_hash(_contents())
    assert release.load(layout, identity).compose_file.read_text() == "services: {}\n"
    assert release.stage(layout, _contents(), check=False) == (identity, [])


def test_staging_in_check_mode_writes_nothing(layout: Layout) -> None:
    assert release.stage(layout, _contents(), check=True)[1]
    assert not layout.state.exists()


def test_a_changed_file_of_a_release_is_named(layout: Layout) -> None:
    """S2-75: what runs can be compared with what was reviewed."""
    identity = _staged(layout)
    (layout.release(identity) / "compose.yaml").write_text("services: {evil: {}}\n")
    with pytest.raises(Refused, match="do not have the hash"):
        release.load(layout, identity)
    with pytest.raises(Refused, match="does not hold what its name says"):
        release.stage(layout, _contents(), check=False)


def test_an_unchanged_service_keeps_its_configuration_directory() -> None:
    before = release.configuration_directories(_contents())
    after = release.configuration_directories(_contents(**{"config/edge/Caddyfile": "{ }\n"}))
    assert {name for name in before if name.startswith("router-")} < set(after)
    assert {name for name in before if name.startswith("edge-")}.isdisjoint(after)


def test_an_unfinished_release_is_not_taken_for_a_whole_one(layout: Layout) -> None:
    identity = _staged(layout)
    other = _contents(**{"compose.yaml": "services: {b: {}}\n"})
    wanted = files.tree_hash(other)
    (layout.releases / f".{wanted}.partial").mkdir()
    (layout.releases / f".{wanted}.partial" / "compose.yaml").write_text("half")
    with pytest.raises(Refused):
        release.load(layout, wanted)
    assert release.stage(layout, other, check=False)[0] == wanted
    assert release.load(layout, wanted).id != identity


# --- journal ------------------------------------------------------------------------------------------------------------


def test_the_journal_chains_its_entries_and_notices_a_change(layout: Layout) -> None:
    layout.journal.mkdir(parents=True)
    journal.append(layout, "activating", release="a")
    journal.append(layout, "committed", release="a")
    assert [entry["state"] for entry in journal.entries(layout)] == ["activating", "committed"]
    path = layout.journal / journal.FILE
    path.write_text(path.read_text().replace('"release":"a"', '"release":"b"', 1))
    with pytest.raises(Refused, match="entry 1 "):
        journal.append(layout, "committed", release="c")


def test_an_entry_that_a_power_loss_cut_off_never_counted(layout: Layout) -> None:
    layout.journal.mkdir(parents=True)
    journal.append(layout, "activating", release="a")
    with (layout.journal / journal.FILE).open("a") as handle:
        handle.write('{"sequence":2,"previous":')
    assert [entry["state"] for entry in journal.entries(layout)] == ["activating"]
    journal.append(layout, "committed", release="a")
    assert [entry["sequence"] for entry in journal.entries(layout)] == [1, 2]


def test_a_second_run_is_refused_and_told_who_holds_the_lock(layout: Layout) -> None:
    """D7: the holder is named, and the exit code is its own."""
    layout.state.mkdir()
    with journal.exclusive(layout, "activation of abc"):
        with (
            pytest.raises(Refused, match="activation of abc, process") as refused,
            journal.exclusive(layout, "readback"),
        ):
            pytest.fail("two holders at once")
        assert refused.value.code == Exit.BUSY
    with journal.exclusive(layout, "readback"):
        assert "readback" in layout.lock.read_text()


# --- policy -------------------------------------------------------------------------------------------------------------


def test_a_leftover_publication_is_reported_not_overwritten(tmp_path: Path) -> None:
    """S2-60."""
    directory = tmp_path / "policy"
    directory.mkdir(mode=0o750)
    (directory / policy.LEFTOVER).write_text("half")
    with pytest.raises(Refused, match=r"access\.json\.publish is there"):
        policy.ensure(directory, ME[1], {}, check=True)
    assert (directory / policy.LEFTOVER).read_text() == "half"


# --- decisions ------------------------------------------------------------------------------------------------------------


def _container(service: str, **changes: Any) -> engine.Container:
    plain = {
        "id": service,
        "service": service,
        "image_reference": "r",
        "config_hash": "h",
        "status": "running",
        "health": "healthy",
        "started_at": "",
    }
    return engine.Container(**{**plain, **changes})


@pytest.mark.parametrize(
    ("current", "change", "expected"),
    [
        ("id", {}, []),
        ("other", {}, ["release other is current, not id"]),
        (None, {}, ["release none is current, not id"]),
        ("id", {"config_hash": "x"}, ["the definition or a secret of api changed"]),
        ("id", {"status": "exited", "health": "none"}, ["api is exited, none"]),
        ("id", {"health": "unhealthy"}, ["api is running, unhealthy"]),
    ],
)
def test_differences_name_what_is_not_as_released(
    current: str | None, change: dict[str, Any], expected: list[str]
) -> None:
    subject = release.Release("id", Path("/r"), {"service_images": {"api": "r"}})
    assert (
        activation.differences(subject, current, {"api": _container("api", **change)}, {"api": "h"})
        == expected
    )


def test_a_missing_and_a_foreign_container_are_differences() -> None:
    subject = release.Release("id", Path("/r"), {"service_images": {"api": "r"}})
    found = activation.differences(subject, "id", {"old": _container("old")}, {"api": "h"})
    assert found == ["api has no container", "old is not part of the release"]


# --- gates ----------------------------------------------------------------------------------------------------------------


class _Context(readback.Context):
    def __init__(self, gates: list[str]) -> None:
        super().__init__(
            Layout(), release.Release("id", Path("/r"), {"gates": gates}), engine.Compose("p", Path("/c"), {})
        )


@pytest.mark.parametrize(
    ("ask", "verdict"),
    [
        (lambda _: readback.Finding("a", "a"), "pass"),
        (lambda _: readback.Finding("a", "b"), "fail"),
        (lambda _: (_ for _ in ()).throw(readback.CouldNotAsk("down")), "could-not-ask"),
        (lambda _: (_ for _ in ()).throw(ConnectionRefusedError()), "could-not-ask"),
        (lambda _: (_ for _ in ()).throw(KeyError("result")), "could-not-ask"),
    ],
)
def test_only_an_answer_as_expected_is_a_pass(
    monkeypatch: pytest.MonkeyPatch, ask: Any, verdict: str
) -> None:
    monkeypatch.setitem(readback.GATES, "probe", readback.Gate("probe", "it", ask))
    (result,) = readback.run(_Context(["probe"]))
    assert result.verdict == verdict
    assert bool(readback.failures([result])) == (verdict != "pass")


def test_a_gate_that_the_program_does_not_know_is_no_pass() -> None:
    (result,) = readback.run(_Context(["gate-of-tomorrow"]))
    assert result.verdict == "could-not-ask"


def test_the_refusal_names_the_gate_and_tells_unasked_from_failed() -> None:
    failed = readback.Verdict("recall", "p", "a", "b", "fail", 1)
    unasked = readback.Verdict("retain", "p", "a", "b", "could-not-ask", 1)
    assert activation.gate_failure([failed]).gate == "readback/recall"
    assert activation.gate_failure([unasked, failed]).code == Exit.FAILED
    assert activation.gate_failure([unasked]).code == Exit.COULD_NOT_ASK
