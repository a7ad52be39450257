"""What the tests of faults share: looking at the host, and breaking one thing on it."""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any

from tests.live import Sandbox, run

TOKEN = "/etc/memory/secrets/router/HINDSIGHT_GATEWAY_TOKEN"
CURRENT = "$(basename $(readlink /var/lib/memory/current))"
FAULTY = "/root/faulty-compose.yaml"

# Stages a release that differs from the current one as the JSON on standard input says, and prints its id.
VARIANT = """
import json, sys
sys.path.insert(0, "/var/lib/memory/current")
from memoryctl import release
from memoryctl.layout import Layout
layout = Layout()
contents = dict(release.read_tree(release.load(layout, release.current_id(layout)).directory))
before = release.configuration_directories(contents)
for path, old, new in json.load(sys.stdin):
    assert old in contents[path], f"{path} does not hold {old}"
    contents[path] = contents[path].replace(old, new)
after = release.configuration_directories(contents)
service = lambda name: name.rsplit("-", 1)[0]
for name in before:
    (renamed,) = (other for other in after if service(other) == service(name))
    contents["compose.yaml"] = contents["compose.yaml"].replace(f"/config/{name}\\n", f"/config/{renamed}\\n")
print(release.stage(layout, contents, check=False)[0])
"""


def entries(sandbox: Sandbox) -> list[dict[str, Any]]:
    """The journal of the host."""
    return [
        json.loads(line)
        for line in sandbox.on_host("cat /var/lib/memory/journal/activations.jsonl").splitlines()
    ]


def status(sandbox: Sandbox) -> dict[str, Any]:
    """`memoryctl status` of the host."""
    found: dict[str, Any] = json.loads(sandbox.on_host("memoryctl status --json"))
    return found


def not_passed(sandbox: Sandbox) -> list[str]:
    """Ids of the gates that do not pass now."""
    answer = sandbox.on_host("memoryctl readback --json", check=False)
    return [gate["id"] for gate in json.loads(answer)["gates"] if gate["verdict"] != "pass"]


def activate(sandbox: Sandbox, release: str = CURRENT) -> subprocess.CompletedProcess[str]:
    """`memoryctl activate` on the host; not checked."""
    return run("docker", "exec", sandbox.host, "bash", "-c", f"memoryctl activate {release}", check=False)


def await_end(sandbox: Sandbox, seconds: float = 180) -> dict[str, Any]:
    """Status once no activation is guarded any more."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done = run("docker", "exec", sandbox.host, "memoryctl", "status", "--json", check=False)
        if done.returncode == 0 and json.loads(done.stdout)["armed_for"] is None:
            found: dict[str, Any] = json.loads(done.stdout)
            return found
        time.sleep(1)
    raise AssertionError("the guard did not end the activation")


def stage_variant(sandbox: Sandbox, *changes: tuple[str, str, str]) -> str:
    """Stage a release that differs from the current one in `changes` (path, old text, new text); its id."""
    words = ("docker", "exec", "-i", sandbox.host, "python3", "-B", "-c", VARIANT)
    return run(*words, stdin=json.dumps(changes)).stdout.strip()


def compose_up(sandbox: Sandbox, service: str, *changes: tuple[str, str]) -> None:
    """Replace one service behind the program's back, by the live Compose file with `changes` (old text, new text).

    Without changes the container comes back as the release wants it.
    """
    text = sandbox.on_host("cat /var/lib/memory/current/compose.yaml")
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    run("docker", "exec", "-i", sandbox.host, "sh", "-c", f"cat > {FAULTY}", stdin=text)
    labels = "docker inspect -f '{{index .Config.Labels \"memory.secrets\"}}'"
    script = "".join(
        f"export MEMORY_SECRETS_{consumer.upper()}="
        f"$({labels} $(docker ps -aqf label=com.docker.compose.service={named} | head -n 1))\n"
        for consumer, named in (
            ("postgres", "postgres"),
            ("hindsight", "api"),
            ("router", "router"),
            ("edge", "edge"),
        )
    )
    sandbox.on_host(f"{script} docker compose -p memory -f {FAULTY} up -d --no-deps --wait {service} 2>&1")
