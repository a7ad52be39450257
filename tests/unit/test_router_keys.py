"""Device keys: made once, found again, finished or retired after an interruption, never silently replaced."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from memoryctl import files, routerkeys
from memoryctl.errors import Refused
from memoryctl.files import Ownership
from memoryctl.layout import Layout

PRINCIPAL = routerkeys.Principal("desk", "memory.desk", "desk", ("rest", "mcp"), 60, 0)


@dataclass(frozen=True)
class RouterDouble(routerkeys.Store):
    """The store with the router's command replaced by one that keeps the same database and files."""

    calls: list[str] = field(default_factory=list)

    def command(self, *arguments: str) -> str:
        self.calls.append(arguments[0])
        connection = sqlite3.connect(self.directory / routerkeys.STORE_FILE)
        with connection:
            if arguments[0] == "init":
                connection.execute(
                    "create table keys (key_id text primary key, name text, expires_at integer, revoked_at integer)"
                )
                return "{}"
            if arguments[0] == "revoke":
                connection.execute("update keys set revoked_at = 1 where key_id = ?", (arguments[-1],))
                return "{}"
            count = connection.execute("select count(*) from keys").fetchone()[0]
            key_id = f"key_{count:016x}"
            connection.execute(
                "insert into keys values (?, ?, null, null)",
                (key_id, arguments[arguments.index("--name") + 1]),
            )
        out = arguments[arguments.index("--out") + 1].removeprefix(routerkeys.STORE_IN_CONTAINER + "/")
        (self.directory / out).write_text(f"ask_{count:043d}\n")
        return json.dumps({"key_id": key_id})


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RouterDouble:
    monkeypatch.setattr(files, "apply_ownership", lambda path, want: path.chmod(want.mode))
    monkeypatch.setattr(
        files,
        "observed",
        lambda path: Ownership(0, 0, path.stat().st_mode & 0o7777) if path.exists() else None,
    )
    monkeypatch.setattr("os.fchown", lambda *_: None)
    for name in ("state", "etc", "state/config"):
        (tmp_path / name).mkdir()
    return RouterDouble(Layout(tmp_path / "state", tmp_path / "etc"), "image", 0, 0)


def active(store: RouterDouble) -> list[str]:
    return [key_id for key_id, row in store.rows().items() if not row["revoked"]]


def test_a_key_is_made_once(store: RouterDouble) -> None:
    """S2-05: the key id is in the receipt, the secret in a protected file, and a second run makes nothing."""
    changes, ids = routerkeys.ensure(store, [PRINCIPAL], check=False)
    assert changes and ids == {"desk": "key_0000000000000000"}
    secret = store.layout.device_keys / "desk.key"
    assert secret.stat().st_mode & 0o777 == 0o600
    receipt = json.loads((store.layout.device_keys / "desk.json").read_text())
    assert receipt["key_id"] == ids["desk"] and secret.read_text().strip() not in json.dumps(receipt)
    assert routerkeys.ensure(store, [PRINCIPAL], check=False) == ([], ids)
    assert store.calls == ["init", "create"]


def test_check_mode_makes_nothing(store: RouterDouble) -> None:
    changes, ids = routerkeys.ensure(store, [PRINCIPAL], check=True)
    assert changes and ids == {"desk": routerkeys.UNKNOWN_KEY_ID}
    assert not store.directory.exists() and store.calls == []


def test_a_key_left_half_made_is_retired_and_made_anew(store: RouterDouble) -> None:
    """Killed after the router wrote the secret and before the receipt: one key works in the end, the other is revoked."""
    routerkeys.ensure(store, [], check=False)
    (store.directory / routerkeys.OUTBOX / "desk").parent.mkdir(exist_ok=True)
    store.command(
        "create", "--name", "desk", "--out", f"{routerkeys.STORE_IN_CONTAINER}/{routerkeys.OUTBOX}/desk"
    )
    _, ids = routerkeys.ensure(store, [PRINCIPAL], check=False)
    assert active(store) == [ids["desk"]] == ["key_0000000000000001"]
    assert list((store.directory / routerkeys.OUTBOX).iterdir()) == []


def test_a_leftover_after_the_receipt_is_cleared(store: RouterDouble) -> None:
    _, ids = routerkeys.ensure(store, [PRINCIPAL], check=False)
    leftover = store.directory / routerkeys.OUTBOX / "desk"
    leftover.write_text("ask_x\n")
    assert routerkeys.ensure(store, [PRINCIPAL], check=False) == ([], ids)
    assert not leftover.exists() and active(store) == [ids["desk"]]


@pytest.mark.parametrize("fault", ["grant", "revoked", "expired", "absent", "secret lost", "secret changed"])
def test_a_key_that_does_not_fit_is_refused_and_not_replaced(store: RouterDouble, fault: str) -> None:
    _, ids = routerkeys.ensure(store, [PRINCIPAL], check=False)
    wanted = PRINCIPAL
    secret = store.layout.device_keys / "desk.key"
    if fault == "grant":
        wanted = routerkeys.Principal("desk", "memory.other", "desk", ("rest",), 60, 0)
    elif fault == "revoked":
        store.command("revoke", "--key-id", ids["desk"])
    elif fault == "expired":
        with sqlite3.connect(store.directory / routerkeys.STORE_FILE) as connection:
            connection.execute("update keys set expires_at = 1")
    elif fault == "absent":
        (store.directory / routerkeys.STORE_FILE).unlink()
    elif fault == "secret lost":
        secret.unlink()
    else:
        secret.write_text("ask_changed\n")
    with pytest.raises(Refused) as refused:
        routerkeys.ensure(store, [wanted], check=False)
    assert "desk" in refused.value.what and refused.value.gate == "router-keys"
    assert "create" not in store.calls[2:]
