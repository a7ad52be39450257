"""The documentation of the gates is in step with the program."""

from __future__ import annotations

import re
from pathlib import Path

from memoryctl import readback
from memoryctl.errors import Exit

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_gate_is_documented_with_what_it_proves() -> None:
    rows = re.findall(
        r"^\| `([a-z-]+)` \| (.+?) \| (.+?) \| (.+?) \|$", (DOCS / "gates.md").read_text(), re.MULTILINE
    )
    assert {(row[0], row[1]) for row in rows} == {(gate.id, gate.proves) for gate in readback.GATES.values()}
    assert len(rows) == len(readback.GATES)


def test_every_exit_code_is_documented() -> None:
    documented = {
        int(code) for code in re.findall(r"^\| (\d+) \|", (DOCS / "exit-codes.md").read_text(), re.MULTILINE)
    }
    assert documented == {int(code) for code in Exit}
