"""The last command: nothing of ours is left on the machine."""

from __future__ import annotations

from bundle import engine

from tests.live import PREFIX, STATE, Sandbox, run


def test_down_leaves_nothing(sandbox: Sandbox) -> None:
    run("./scripts/sandbox", "down")
    engine.ensure_engine(STATE)
    for kind, form in (("ps -a", "{{.Names}}"), ("volume ls", "{{.Name}}"), ("network ls", "{{.Name}}")):
        listed = run("docker", *kind.split(), "--format", form).stdout.split()
        assert [name for name in listed if name.startswith(PREFIX)] == [], kind
    run("./scripts/sandbox", "down")
