"""Every command of the README, as printed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live import MINUTES, PREFIX, ROOT, STATE, Sandbox, run

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"(?:<!-- test: (\w+) -->\n\s*)?```bash\n(.*?)```", README, re.DOTALL)
# The test command itself is what runs this file.
NOT_RUN = {"./scripts/test"}


def blocks(kind: str) -> list[str]:
    """Shell blocks of one kind, without the indentation of a list item."""
    return [re.sub(r"^ {3}", "", text, flags=re.MULTILINE) for mark, text in BLOCKS if mark == kind]


def test_every_block_of_the_readme_belongs_to_a_test() -> None:
    unmarked = {text.strip() for mark, text in BLOCKS if mark not in ("sandbox", "production")}
    assert unmarked == NOT_RUN
    assert blocks("sandbox") and blocks("production")


def test_the_quick_start_stores_and_recalls_a_memory(sandbox: Sandbox) -> None:
    """The two blocks in one shell, on a sandbox that is already up: `up` is safe to repeat."""
    script = "set -euo pipefail\n" + "\necho\n".join(blocks("sandbox"))
    done = run("bash", "-c", script, timeout=30 * MINUTES)
    stored, recalled = (
        json.loads(line) for line in done.stdout.replace("}{", "}\n{").splitlines() if line.startswith("{")
    )
    assert stored["result"]["success"] is True
    assert any("blue box" in item["text"] for item in recalled["result"]["results"])


@pytest.mark.parametrize("command", re.findall(r"^\| `(\./scripts/sandbox [^`]+)` \|", README, re.MULTILINE))
def test_the_commands_of_the_table(sandbox: Sandbox, command: str) -> None:
    if command.endswith(" down"):
        pytest.skip("the last acceptance test runs it")
    script = "memoryctl status && memoryctl readback" if command.endswith(" shell") else ""
    run("bash", "-c", command, stdin=script)


@pytest.fixture
def checkout(sandbox: Sandbox, tmp_path: Path) -> Iterator[Path]:
    """A copy of the project, as a person would have cloned it, and a bare second host for it."""
    tree = tmp_path / "bundle"
    listing = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for path in filter(None, names):
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, tree / path, follow_symlinks=False)
    name = f"{PREFIX}-readme"
    run("./scripts/hosts", "create", name)
    yield tree
    run("./scripts/hosts", "destroy", name)


def test_the_production_path_on_a_second_host(checkout: Path) -> None:
    """The example inventory, filled in for a bare host: every command of the section, then nothing is left running."""
    name = f"{PREFIX}-readme"
    address = json.loads((STATE / "hosts.json").read_text())[name]
    copy, *others = [block.strip() for block in blocks("production")]
    run("bash", "-c", copy, cwd=checkout)
    inventory = checkout / "inventories" / "mysite"
    shutil.copy(STATE / "images.lock.json", inventory / "images.lock.json")
    (inventory / "hosts.yml").write_text(
        json.dumps(
            {
                "memory": {
                    "hosts": {
                        name: {
                            "ansible_user": "root",
                            "ansible_ssh_common_args": f"-F {STATE}/ssh/config",
                            "memory_edge_names": [address],
                            "memory_edge_bind_addresses": [address],
                            "image_supply_registry_ca_files": {
                                "registry.memory.test:5000": f"{STATE}/registry/ca.crt"
                            },
                            "container_engine_address_pools": [{"base": "10.214.0.0/16", "size": 24}],
                        }
                    }
                }
            }
        )
    )
    for script in others:
        run("bash", "-c", f"set -euo pipefail\n{script}", cwd=checkout, timeout=20 * MINUTES)
    left = run(
        "docker", "exec", name, "bash", "-c", "docker ps -aq; ls /var/lib/memory/releases"
    ).stdout.split()
    assert len(left) == 1 and len(left[0]) == 64, "teardown keeps the release and removes every container"
