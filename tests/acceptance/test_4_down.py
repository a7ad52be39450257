"""The last command: nothing of ours is left on the machine."""

from __future__ import annotations

from .conftest import PREFIX, Sandbox, run


def test_down_leaves_nothing(sandbox: Sandbox) -> None:
    run("./scripts/sandbox", "down")
    if run("docker", "version", check=False).returncode != 0:
        return
    for kind, form in (("ps -a", "{{.Names}}"), ("volume ls", "{{.Name}}"), ("network ls", "{{.Name}}")):
        listed = run("docker", *kind.split(), "--format", form).stdout.split()
        assert [name for name in listed if name.startswith(PREFIX)] == [], kind
    run("./scripts/sandbox", "down")
