"""Hindsight's own API, reached on its private address with the operator's key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import Exit, Refused
from .web import Answer, Endpoint

# The exact value that the router's tools compare with. An added rule, or another key, does not count as this defense.
DEFENSE = {"enabled": True, "rules": [{"on": "sensitive_data", "action": "block"}]}
BANK_PAGE = 256


@dataclass(frozen=True)
class Hindsight:
    """A client of one API instance."""

    endpoint: Endpoint
    key: str

    def call(self, method: str, path: str, body: Any = None, timeout: float = 30.0) -> Answer:
        """One authenticated call below `/v1/default`."""
        headers = {"Authorization": f"Bearer {self.key}"}
        return self.endpoint.request(
            method, f"/v1/default{path}", headers=headers, body=body, timeout=timeout
        )

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        answer = self.call(method, path, body)
        if answer.status != 200:
            raise Refused(
                "banks",
                f"{method} /v1/default{path} answered {answer.status or answer.error}",
                "a bank that is not there, or not defended, would be created open by the first memory stored in it",
                "look at the logs of the API container (memoryctl status names it), mend the cause, and run again",
                Exit.COULD_NOT_ASK if answer.status == 0 else Exit.FAILED,
            )
        return answer.json()

    def banks(self) -> dict[str, dict[str, Any]]:
        """All banks by id."""
        found: dict[str, dict[str, Any]] = {}
        while True:
            page = self._ask("GET", f"/banks?limit={BANK_PAGE}&offset={len(found)}")["banks"]
            found.update({bank["bank_id"]: bank for bank in page})
            if len(page) < BANK_PAGE:
                return found

    def defense(self, bank: str) -> Any:
        """The defense configured for `bank` (None when off)."""
        return self._ask("GET", f"/banks/{bank}/config")["config"].get("memory_defense")

    def ensure_bank(self, bank: str, existing: dict[str, dict[str, Any]]) -> list[str]:
        """Create `bank` if absent and make its defense exact, proved by reading it back. Returns what changed."""
        changed = []
        if bank not in existing:
            self._ask("PUT", f"/banks/{bank}", {"name": bank})
            changed.append(f"bank {bank}")
        if self.defense(bank) != DEFENSE:
            self._ask("PATCH", f"/banks/{bank}/config", {"updates": {"memory_defense": DEFENSE}})
            changed.append(f"defense of bank {bank}")
            if self.defense(bank) != DEFENSE:
                raise Refused(
                    "banks",
                    f"bank {bank} accepted the defense and reads back another one",
                    "sensitive content would be stored",
                    "compare the configuration of the bank with the release of Hindsight in the lock",
                    Exit.FAILED,
                )
        return changed
