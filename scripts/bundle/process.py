"""Running other programs, with errors an operator can act on."""

from __future__ import annotations

import os
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from .errors import BundleError

_TAIL_LINES = 15


def run(
    argv: Sequence[str | os.PathLike[str]],
    *,
    stdin: str | bytes | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float,
    check: bool = True,
    log: Callable[[str], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return what it printed.

    Args:
        argv: program and arguments; never put a secret here.
        stdin: text or bytes for standard input; without it standard input is empty.
        env: the whole environment of the program; the caller's own when None.
        timeout: seconds after which the program is killed.
        check: raise when the exit status is not 0.
        log: called with every line the program printed, after it ended.

    Raises:
        BundleError: the program is missing, took too long, or failed (with `check`).
    """
    words = [os.fspath(word) for word in argv]
    data = stdin.encode() if isinstance(stdin, str) else stdin
    try:
        done = subprocess.run(
            words,
            input=data,
            stdin=subprocess.DEVNULL if data is None else None,
            capture_output=True,
            env=None if env is None else dict(env),
            timeout=timeout,
            check=False,
        )
    except OSError as error:
        _refuse_start(words, error)
    except subprocess.TimeoutExpired as error:
        raise _too_slow(words, timeout) from error
    result = subprocess.CompletedProcess(
        words, done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    )
    if log is not None:
        for line in (result.stdout + result.stderr).splitlines():
            log(line)
    if check and result.returncode != 0:
        tail = (result.stderr + result.stdout).strip().splitlines()[-_TAIL_LINES:]
        raise BundleError(
            f"{' '.join(words[:3])} failed with exit status {result.returncode}",
            "its last output was:\n    " + "\n    ".join(tail or ["(nothing)"]),
            "correct the cause named in that output and run the command again",
        )
    return result


def run_to_log(
    argv: Sequence[str | os.PathLike[str]],
    log: Path,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float,
    on_line: Callable[[str], None] | None = None,
) -> None:
    """Run a long program to its end with all its output appended to the file `log`.

    Args:
        argv: program and arguments; never put a secret here.
        log: file for standard output and standard error; its directory is made when absent.
        env: the whole environment of the program; the caller's own when None.
        cwd: directory to run in; the caller's own when None.
        timeout: seconds after which the program is killed.
        on_line: called with every line as it is printed, without its end.

    Raises:
        BundleError: the program is missing, took too long, or failed; the log's last lines are shown.
    """
    words = [os.fspath(word) for word in argv]
    log.parent.mkdir(parents=True, exist_ok=True)
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    late = threading.Event()
    with log.open("a", encoding="utf-8") as output:
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=None if env is None else dict(env),
                cwd=cwd,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as error:
            _refuse_start(words, error)

        def give_up() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(timeout, give_up)
        timer.start()
        with process:
            try:
                for line in process.stdout or ():
                    output.write(line)
                    output.flush()
                    if line.strip():
                        tail.append(line.rstrip())
                    if on_line is not None:
                        on_line(line.rstrip("\n"))
            except BaseException:
                process.terminate()
                raise
            finally:
                timer.cancel()
    if late.is_set():
        raise _too_slow(words, timeout)
    if process.returncode != 0:
        raise BundleError(
            f"{' '.join(words[:3])} failed with exit status {process.returncode}",
            "its last output was:\n    " + "\n    ".join(tail or ["(nothing)"]),
            f"correct the cause named there (all of it is in {log}) and run the command again",
        )


def _refuse_start(words: list[str], error: OSError) -> NoReturn:
    if isinstance(error, FileNotFoundError):
        raise BundleError(
            f"the program {words[0]} is not installed",
            "the step that was being done cannot go on without it",
            f"install the package that provides {words[0]} and run the command again",
        ) from error
    raise BundleError(
        f"the program {words[0]} cannot be started: {error.strerror}",
        "the step that was being done cannot go on without it",
        "correct that on this machine and run the command again",
    ) from error


def _too_slow(words: list[str], timeout: float) -> BundleError:
    return BundleError(
        f"{words[0]} did not end within {timeout:.0f} seconds",
        f"the step {' '.join(words[:3])} is not done",
        "check load, disk and network of this machine, then run the command again",
    )
