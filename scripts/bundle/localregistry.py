"""The sandbox's own container registry: Debian's docker-registry in a container, over TLS from an own CA."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import builder, registry
from .errors import BundleError
from .process import run

#: Name and port under which managed hosts reach the registry.
HOST_NAME = "registry.memory.test"
PORT = 5000

_CA_DAYS = 3650
_SERVER_DAYS = 365
_RENEW_SECONDS = 30 * 86400
_START_SECONDS = 30.0
_LABEL = "memory-bundle.inputs"


@dataclass(frozen=True)
class Endpoint:
    """Where the registry is.

    Attributes:
        host: `name:port` for managed hosts and for the image lock.
        push_host: loopback `address:port` for programs on the controller.
        ca: certificate authority file that both names are verified with.
        address: address of the registry in the sandbox network.
    """

    host: str
    push_host: str
    ca: Path
    address: str

    def client(self) -> registry.Client:
        """Return a client that talks to the registry from the controller."""
        return registry.Client(self.push_host, ca=self.ca)


def container_name(prefix: str) -> str:
    """Return the name of the registry's container, which is also that of its storage volume."""
    return f"{prefix}-registry"


def ensure(
    prefix: str,
    state_dir: Path,
    network: str,
    address: str,
    *,
    root: Path,
    say: Callable[[str], None] | None = None,
) -> Endpoint:
    """Make the registry run in `network` at `address`; change nothing if it does already.

    Args:
        prefix: prefix of the sandbox family.
        state_dir: state directory; certificates are kept in `registry` below it.
        network: name of an existing container network.
        address: free address of that network.
        root: top directory of the repository, for the recipe of the registry's image.
        say: receives progress lines.

    Raises:
        BundleError: the registry cannot be built or does not start.
    """
    tell = say or (lambda _text: None)
    tls = state_dir / "registry"
    ensure_certificates(tls, address)
    image = _ensure_image(prefix, state_dir, root, tell)
    name = container_name(prefix)
    inputs = _inputs(image, network, address, tls)
    if _running_inputs(name) != inputs:
        tell(f"registry: starting {name} at {address}")
        run(["docker", "rm", "--force", name], timeout=60, check=False)
        run(
            [
                *("docker", "run", "--detach", "--name", name, "--hostname", "registry"),
                *("--label", f"{_LABEL}={inputs}", "--restart", "always"),
                *("--network", network, "--ip", address, "--network-alias", HOST_NAME),
                *("--publish", f"127.0.0.1::{PORT}"),
                *("--read-only", "--tmpfs", "/tmp", "--pids-limit", "256", "--memory", "512m"),
                *("--cap-drop", "ALL", "--cap-add", "DAC_OVERRIDE", "--security-opt", "no-new-privileges"),
                *("--volume", f"{name}:/var/lib/registry"),
                *(
                    "--mount",
                    f"type=bind,source={(tls / 'server').resolve()},target=/etc/registry/tls,readonly",
                ),
                image,
            ],
            timeout=120,
        )
    endpoint = Endpoint(f"{HOST_NAME}:{PORT}", _published(name), tls / "ca.crt", address)
    _await(endpoint, name)
    return endpoint


def remove(prefix: str) -> None:
    """Remove the registry's container, its storage and its image; nothing there is no fault."""
    name = container_name(prefix)
    run(["docker", "rm", "--force", "--volumes", name], timeout=60, check=False)
    run(["docker", "volume", "rm", "--force", name], timeout=60, check=False)
    form = "{{.Repository}}:{{.Tag}}"
    listed = run(["docker", "image", "ls", "--format", form, name], timeout=60, check=False).stdout
    for reference in listed.split():
        run(["docker", "image", "rm", reference], timeout=120, check=False)


def ensure_certificates(directory: Path, address: str) -> None:
    """Make a certificate authority and a server certificate in `directory`, or renew what expires within 30 days.

    `ca.crt` and `ca.key` stay in `directory`; `server/server.crt` and `server/server.key` are for the container.
    """
    server = directory / "server"
    server.mkdir(parents=True, exist_ok=True, mode=0o700)
    directory.chmod(0o700)
    ca, ca_key = directory / "ca.crt", directory / "ca.key"
    names = f"DNS:{HOST_NAME},IP:127.0.0.1,IP:{address}"
    if not (ca_key.is_file() and _valid(ca)):
        _openssl(
            ca_key,
            ca,
            ["-days", str(_CA_DAYS), "-subj", "/CN=memory sandbox registry CA"],
            ["basicConstraints=critical,CA:TRUE,pathlen:0", "keyUsage=critical,keyCertSign,cRLSign"],
        )
        (server / "server.crt").unlink(missing_ok=True)
    certificate, key = server / "server.crt", server / "server.key"
    if not (key.is_file() and _valid(certificate, ca) and _names(certificate) == sorted(names.split(","))):
        _openssl(
            key,
            certificate,
            ["-days", str(_SERVER_DAYS), "-subj", f"/CN={HOST_NAME}", "-CA", str(ca), "-CAkey", str(ca_key)],
            [
                "basicConstraints=critical,CA:FALSE",
                "keyUsage=critical,digitalSignature",
                "extendedKeyUsage=serverAuth",
                f"subjectAltName={names}",
            ],
        )


def _openssl(key: Path, certificate: Path, options: list[str], extensions: list[str]) -> None:
    """Make a key and a certificate for it; both appear complete or not at all."""
    with tempfile.TemporaryDirectory(dir=key.parent) as scratch:
        new_key, new_certificate, settings = (Path(scratch, name) for name in ("key", "crt", "cnf"))
        settings.write_text("[req]\ndistinguished_name = dn\n[dn]\n")
        argv = ["openssl", "req", "-x509", "-config", str(settings), "-newkey", "ec"]
        argv += ["-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-sha256"]
        argv += ["-keyout", str(new_key), "-out", str(new_certificate), *options]
        for extension in extensions:
            argv += ["-addext", extension]
        run(argv, timeout=60)
        new_key.chmod(0o600)
        new_certificate.chmod(0o644)
        os.replace(new_key, key)
        os.replace(new_certificate, certificate)


def _valid(certificate: Path, ca: Path | None = None) -> bool:
    """Tell whether the certificate lasts 30 more days and, with `ca`, was issued by it."""
    if not certificate.is_file():
        return False
    ending = ["openssl", "x509", "-in", str(certificate), "-noout", "-checkend", str(_RENEW_SECONDS)]
    if run(ending, timeout=30, check=False).returncode != 0:
        return False
    if ca is None:
        return True
    return (
        run(["openssl", "verify", "-CAfile", str(ca), str(certificate)], timeout=30, check=False).returncode
        == 0
    )


def _names(certificate: Path) -> list[str]:
    shown = run(
        ["openssl", "x509", "-in", str(certificate), "-noout", "-ext", "subjectAltName"], timeout=30
    ).stdout.splitlines()
    names = shown[-1].replace("IP Address:", "IP:") if shown else ""
    return sorted(name.strip() for name in names.split(","))


def _ensure_image(prefix: str, state_dir: Path, root: Path, tell: Callable[[str], None]) -> str:
    recipe = builder.load_recipe(root, "registry")
    reference = f"{container_name(prefix)}:{recipe.sha256[:12]}"
    if run(["docker", "image", "inspect", reference], timeout=60, check=False).returncode == 0:
        return reference
    workshop = builder.Workshop(root, state_dir, prefix, tell)
    workshop.load(workshop.build("registry"), reference)
    return reference


def _inputs(image: str, network: str, address: str, tls: Path) -> str:
    parts = [image, network, address, (tls / "server" / "server.crt").read_text()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _running_inputs(name: str) -> str:
    shown = run(["docker", "inspect", "--type", "container", name], timeout=60, check=False)
    if shown.returncode != 0:
        return ""
    container = json.loads(shown.stdout)[0]
    running = container["State"]["Running"] and not container["State"]["Restarting"]
    return str(container["Config"]["Labels"].get(_LABEL, "")) if running else ""


def _published(name: str) -> str:
    shown = run(["docker", "port", name, f"{PORT}/tcp"], timeout=60).stdout.split()
    if not shown:
        raise BundleError(
            f"the registry {name} publishes no port",
            "images are pushed to it through a port on 127.0.0.1",
            f"see why with `docker logs {name}`, remove the container and run the command again",
        )
    return shown[0]


def _await(endpoint: Endpoint, name: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        with contextlib.closing(endpoint.client()) as client:
            try:
                client.ping()
            except BundleError as error:
                if time.monotonic() > deadline:
                    logs = run(["docker", "logs", "--tail", "5", name], timeout=30, check=False)
                    raise BundleError(
                        f"the registry {name} does not answer on {endpoint.push_host}",
                        f"images cannot be pushed ({error.what}); its last words were: {logs.stderr.strip()[-400:]}",
                        f"see `docker logs {name}`, remove the container and run the command again",
                    ) from error
                time.sleep(0.1)
            else:
                return
