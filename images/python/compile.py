"""Compile Python sources to byte code that does not depend on time stamps, and write it as a tar to stdout.

Run inside an image with the directories to compile as arguments. Two processes share the work by a fixed rule,
so that the result is the same on every machine.
"""

from __future__ import annotations

import importlib.util
import io
import os
import py_compile
import sys
import tarfile
import tempfile
from pathlib import Path

SHARES = 2


def sources(roots: list[str]) -> list[str]:
    """Return every source file below `roots`, sorted."""
    found = [str(path) for root in roots for path in Path(root).rglob("*.py") if path.is_file()]
    return sorted(set(found))


def compile_share(files: list[str], output: str) -> None:
    """Compile `files` into the tar `output`; a file that is not valid Python is left as it is."""
    with (
        tarfile.open(output, "w", format=tarfile.GNU_FORMAT) as archive,
        tempfile.TemporaryDirectory() as scratch,
    ):
        target = os.path.join(scratch, "code.pyc")
        for file in files:
            try:
                py_compile.compile(
                    file,
                    cfile=target,
                    dfile=file,
                    doraise=True,
                    invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
                )
            except (py_compile.PyCompileError, SyntaxError, ValueError):
                continue
            data = Path(target).read_bytes()
            member = tarfile.TarInfo(importlib.util.cache_from_source(file).lstrip("/"))
            member.size = len(data)
            member.mode = 0o644
            archive.addfile(member, io.BytesIO(data))


def main() -> int:
    """Compile in two processes and send both archives, one after the other, each preceded by its length."""
    files = sources(sys.argv[1:])
    with tempfile.TemporaryDirectory() as scratch:
        outputs = [os.path.join(scratch, f"{share}.tar") for share in range(SHARES)]
        children = []
        for share, output in enumerate(outputs):
            child = os.fork()
            if child == 0:
                compile_share(files[share::SHARES], output)
                os._exit(0)
            children.append(child)
        if any(os.waitpid(child, 0)[1] != 0 for child in children):
            return 1
        for output in outputs:
            data = Path(output).read_bytes()
            sys.stdout.buffer.write(len(data).to_bytes(8, "big") + data)
    return 0


sys.exit(main())
