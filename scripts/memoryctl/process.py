"""Child processes: bounded in time, never through a shell, output kept for the error message."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .errors import Exit, Refused

TAIL_LINES = 12


@dataclass(frozen=True)
class Output:
    """Result of a finished child process; text is UTF-8 with undecodable bytes replaced."""

    code: int
    out: str
    err: str


def run(
    argv: Sequence[str],
    *,
    stdin: bytes | None = None,
    extra_env: Mapping[str, str] | None = None,
    timeout: float = 60,
    check: bool = True,
    gate: str = "command",
) -> Output:
    """Run `argv` and return its output.

    Args:
        stdin: bytes for standard input; a secret goes here, never into `argv`.
        extra_env: variables added to the inherited environment.
        timeout: seconds after which the child is killed.
        check: raise when the exit code is not 0.
        gate: name used in the refusal.

    Raises:
        Refused: the program is missing, timed out, or (with `check`) failed.
    """
    env = {**os.environ, "LC_ALL": "C.UTF-8", **(extra_env or {})}
    shown = " ".join(argv)
    try:
        done = subprocess.run(
            argv, input=stdin or b"", capture_output=True, env=env, timeout=timeout, check=False
        )
    except FileNotFoundError as error:
        raise Refused(
            gate,
            f"{argv[0]} is not installed",
            f"it is needed for: {shown}",
            "run playbooks/site.yml on this host",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise Refused(
            gate,
            f"no answer within {timeout:g} s from: {shown}",
            "a step that hangs cannot be proved",
            "look at the engine and at the load of this host, then run again",
            Exit.COULD_NOT_ASK,
        ) from error
    result = Output(
        done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    )
    if check and result.code != 0:
        tail = "\n    ".join((result.err.strip() or result.out.strip()).splitlines()[-TAIL_LINES:])
        raise Refused(
            gate,
            f"exit code {result.code} from: {shown}\n    {tail}",
            "the step did not happen",
            "mend the cause named above and run again",
            Exit.FAILED,
        )
    return result
