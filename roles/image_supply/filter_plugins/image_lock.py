"""Filters that read the image lock on the controller."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

from bundle import lock
from bundle.errors import BundleError


def image_lock(text: str) -> dict[str, dict[str, Any]]:
    """Images of a lock by name: reference, digests that the engine may show for it, and facts."""
    try:
        parsed = lock.parse(text)
    except BundleError as error:
        raise AnsibleFilterError(str(error)) from error
    return {
        image.name: {
            "reference": image.reference,
            "index_digest": image.index_digest,
            "accepted_digests": sorted(
                {image.index_digest, *(platform.manifest_digest for platform in image.platforms.values())}
            ),
            "facts": dict(image.facts),
        }
        for image in parsed.images
    }


class FilterModule:
    """Registers the filters."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"image_lock": image_lock}
