"""The sandbox that the first command of the README brings up, as tests on it see it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PREFIX = os.environ.get("MEMORY_SANDBOX", "memory-sandbox")
STATE = Path(os.environ.get("MEMORY_SANDBOX_STATE", ROOT / ".sandbox"))
MINUTES = 60.0


def run(
    *argv: str, cwd: Path = ROOT, timeout: float = 15 * MINUTES, check: bool = True, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command of an operator and keep what it prints."""
    done = subprocess.run(
        argv, cwd=cwd, input=stdin, capture_output=True, text=True, timeout=timeout, check=False
    )
    if check:
        assert done.returncode == 0, f"{' '.join(argv)[:300]}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    return done


@dataclass(frozen=True)
class Sandbox:
    """A deployed sandbox, as a client on this machine sees it."""

    url: str
    authority: Path
    alias: str
    key_file: Path
    host: str

    def on_host(self, command: str, check: bool = True) -> str:
        """Output of a shell command on the managed host."""
        return run("docker", "exec", self.host, "bash", "-c", command, check=check).stdout.strip()

    def playbook(self, name: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a playbook against the sandbox."""
        return run("./scripts/sandbox", "playbook", name, *arguments, check=check)

    def call(
        self, operation: str, arguments: dict[str, Any], *, key: str | None = None
    ) -> tuple[int, dict[str, Any]]:
        """One REST call with curl: status and body."""
        secret = self.key_file.read_text().strip() if key is None else key
        body = json.dumps({"alias": self.alias, "operation": operation, "arguments": arguments})
        headers = [
            "-H",
            "Content-Type: application/json",
            *(["-H", f"Authorization: Bearer {secret}"] if secret else []),
        ]
        done = run(
            *("curl", "-sS", "--max-time", "120", "--cacert", str(self.authority), *headers),
            *("-w", "\n%{http_code}", "--data-binary", "@-", f"{self.url}/v1/memory"),
            stdin=body,
        )
        text, status = done.stdout.rsplit("\n", 1)
        return int(status), json.loads(text)

    def status_of(self, target: str, *options: str) -> str:
        """HTTP status of a request through the edge."""
        curl = [
            "curl",
            "-sS",
            "--path-as-is",
            "--cacert",
            str(self.authority),
            "-o",
            "/dev/null",
            "-w",
            "%{http_code}",
        ]
        return run(*curl, *options, self.url + target).stdout


def changed(output: str) -> list[int]:
    """The `changed` counts of a play recap, one for each host."""
    counts = [int(count) for count in re.findall(r"ok=\d+\s+changed=(\d+)", output)]
    assert counts, output[-2000:]
    return counts


def make_certificate(directory: Path, address: str) -> dict[str, Any]:
    """A self-signed leaf for `address`, as a site's own authority might give it."""
    certificate, key = directory / "tls.crt", directory / "tls.key"
    run(
        *(
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-days",
            "30",
        ),
        *("-keyout", str(key), "-out", str(certificate), "-subj", "/CN=memory.sandbox.test"),
        *("-addext", f"subjectAltName=IP:{address},DNS:memory.sandbox.test"),
    )
    key.chmod(0o600)
    leaf = ssl.PEM_cert_to_DER_cert(certificate.read_text())
    return {
        "memory_edge_tls_mode": "provided",
        "memory_edge_certificate_file": str(certificate),
        "memory_edge_private_key_file": str(key),
        "memory_edge_certificate_sha256": hashlib.sha256(leaf).hexdigest(),
    }


def bring_up() -> Sandbox:
    """The sandbox, brought up or up to date."""
    run("./scripts/sandbox", "up", timeout=40 * MINUTES)
    lines = run("./scripts/sandbox", "env").stdout
    values = dict(re.findall(r"^export (\w+)='?(.*?)'?$", lines, re.MULTILINE))
    return Sandbox(
        url=values["MEMORY_URL"],
        authority=Path(values["MEMORY_CA"]),
        alias=values["MEMORY_ALIAS"],
        key_file=Path(values["MEMORY_KEY_FILE"]),
        host=values["MEMORY_HOST"],
    )
