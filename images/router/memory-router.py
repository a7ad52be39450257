#!/usr/bin/python3 -I
"""Entry point of the router image: load secret files into the environment, then become the given program.

Every regular file of the directory MEMORY_ROUTER_SECRETS (default /run/secrets/router) whose name is that of an
environment variable is read into the variable of that name, less one final newline. Other files are left alone,
and no directory at all is no fault. A file that cannot be a secret ends the start with status 78 and the reason;
its content is never printed.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from pathlib import Path
from typing import NoReturn

DEFAULT_DIRECTORY = "/run/secrets/router"
EXIT_CONFIG = 78
MAX_BYTES = 65536
NAME = re.compile(r"[A-Z][A-Z0-9_]*\Z")


def refuse(what: str, why: str, fix: str) -> NoReturn:
    """Print the fault in three parts and end with the status for a configuration fault."""
    sys.stderr.write(f"memory-router: {what}\n    why it matters: {why}\n    how to fix it:  {fix}\n")
    sys.exit(EXIT_CONFIG)


def read_secret(path: Path) -> str:
    """Return the secret in `path`, checked."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            refuse(
                f"{path} is not a regular file",
                "a secret behind a link or a directory may be another than the one meant",
                "put the secret itself into the file",
            )
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        refuse(
            f"{path} cannot be read: {error.strerror}",
            "the router would start without that secret",
            f"make the file readable for uid {os.getuid()}, for example 0400 and owned by it",
        )
    if len(data) > MAX_BYTES:
        refuse(f"{path} is larger than {MAX_BYTES} bytes", "no secret is", "mount the right file")
    secret = data.removesuffix(b"\n")
    if not secret:
        refuse(
            f"{path} is empty",
            "an empty secret opens or breaks what it protects",
            "write the secret into the file",
        )
    if any(byte < 0x20 or byte > 0x7E for byte in secret):
        refuse(
            f"{path} holds a control character or a byte outside ASCII",
            "it could not be sent in a header, or would be cut at that place",
            "write the secret as printable ASCII on one line",
        )
    return secret.decode("ascii")


def load_secrets(directory: Path, environment: dict[str, str]) -> None:
    """Put every secret of `directory` into `environment`."""
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return
    except OSError as error:
        refuse(
            f"{directory} cannot be listed: {error.strerror}",
            "the router would start without its secrets",
            f"mount a directory there that uid {os.getuid()} may read",
        )
    for name in names:
        if NAME.match(name):
            environment[name] = read_secret(directory / name)


def main() -> NoReturn:
    """Load the secrets and run the program given as arguments in place of this one."""
    program = sys.argv[1:]
    if not program:
        refuse("no program is given", "there is nothing to start", "pass the program to run as arguments")
    environment = dict(os.environ)
    load_secrets(Path(environment.get("MEMORY_ROUTER_SECRETS") or DEFAULT_DIRECTORY), environment)
    try:
        os.execvpe(program[0], program, environment)
    except OSError as error:
        refuse(
            f"{program[0]} cannot be started: {error.strerror}",
            "it is what this container is for",
            "check the command",
        )


main()
