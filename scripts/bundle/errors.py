"""The one exception type that operators see."""

from __future__ import annotations


class BundleError(Exception):
    """An expected fault, told in three parts.

    Attributes:
        what: what is wrong, in one sentence.
        why: why it matters at this point.
        fix: what the operator can do about it.
    """

    def __init__(self, what: str, why: str, fix: str) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what}\n  why it matters: {self.why}\n  how to fix it:  {self.fix}"
