"""Faults on one sandbox: after each of them the release of before serves, and every gate passes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.injection import not_passed, status
from tests.live import Sandbox, bring_up


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    return bring_up()


@pytest.fixture(autouse=True)
def serving(sandbox: Sandbox) -> Iterator[None]:
    """After every fault the release of before serves, and every gate passes."""
    before = status(sandbox)["release"]
    yield
    assert status(sandbox)["release"] == before
    assert not_passed(sandbox) == []
