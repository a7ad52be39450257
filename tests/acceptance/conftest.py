"""Tests on one sandbox, file by file in the order of their names."""

from __future__ import annotations

import pytest

from tests.live import Sandbox, bring_up


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    return bring_up()
