"""Images by digest: fetched before anything is replaced, never while it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from . import engine, files, process
from .errors import Refused

REGISTRY_AUTHORITIES = Path("/etc/docker/certs.d")


def ensure(
    authorities: Mapping[str, str], references: Sequence[str], timeout: float, check: bool
) -> list[str]:
    """Trust the given registry authorities (PEM by `host:port`) and pull what is missing. Returns what changes.

    Raises:
        Refused: an image is neither here nor to be had under its digest.
    """
    changed = []
    for registry, pem in sorted(authorities.items()):
        directory = REGISTRY_AUTHORITIES / registry
        if not check:
            directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        if files.ensure_file(directory / "ca.crt", pem.encode(), files.ROOT_PUBLIC, check):
            changed.append(str(directory / "ca.crt"))
    held = _held(references, check)
    for reference, present in held.items():
        if present:
            continue
        changed.append(reference)
        if not check:
            _pull(reference, timeout)
    return changed


def _held(references: Sequence[str], check: bool) -> dict[str, bool]:
    try:
        return {
            reference: found is not None for reference, found in engine.inspect_images(references).items()
        }
    except Refused:
        if check:
            # On a host that does not have the engine yet every image would be fetched.
            return dict.fromkeys(references, False)
        raise


def _pull(reference: str, timeout: float) -> None:
    try:
        process.run(["docker", "pull", "--quiet", reference], timeout=timeout, gate="images")
    except Refused as error:
        raise Refused(
            "images",
            f"{reference} cannot be fetched: {error.what}",
            "the lock names exactly this image, and no other is used in its place",
            "check that the registry is reached from this host and still holds the digest, or carry the image to it",
        ) from error
