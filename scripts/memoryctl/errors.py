"""Failures that an operator can act on, and the exit codes that go with them."""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """Exit codes of memoryctl. `docs/exit-codes.md` lists the same values."""

    OK = 0
    FAILED = 1
    USAGE = 2
    REFUSED = 3
    COULD_NOT_ASK = 4
    ROLLED_BACK = 5
    FAILED_CLOSED = 6
    BUSY = 75


# What a fault of this program, or an answer nobody expected, shows up as.
PROGRAM_FAULTS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)


class Refused(Exception):
    """A named refusal or failure.

    Attributes:
        what: what is wrong, with the observed value where that is no secret.
        why: why it matters here.
        fix: what the operator can do about it.
        gate: the stable name of the check that refused.
        code: exit code of the command line.
    """

    def __init__(self, gate: str, what: str, why: str, fix: str, code: Exit = Exit.REFUSED) -> None:
        super().__init__(f"{gate}: {what}")
        self.gate = gate
        self.what = what
        self.why = why
        self.fix = fix
        self.code = code

    def text(self) -> str:
        """The message as shown to an operator."""
        return f"[{self.gate}] {self.what}\n  Why it matters: {self.why}\n  Fix: {self.fix}"
