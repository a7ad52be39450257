"""The image lock: which images may run, by digest, and where they came from.

The lock is a strict JSON document. Whatever is not exactly as described here is refused, with the JSON path
of the fault, so that a lock that parses can be trusted by everything that renders from it. The module uses
the standard library only and is imported by Ansible filters on the controller.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from .errors import BundleError

SCHEMA = "memory-bundle.image-lock/v1"

#: The facts of each known image: exact keys and their types.
FACT_TYPES: Mapping[str, Mapping[str, type]] = {
    "postgres": {"uid": int, "gid": int, "postgres_major": int, "pgvector_version": str},
    "hindsight": {"uid": int, "gid": int, "api_version": str, "migration_head": str},
    "router": {"uid": int, "gid": int, "anvil_serving_version": str, "key_schema_version": int},
    "edge": {"uid": int, "gid": int, "caddy_version": str},
    "embeddings": {"uid": int, "gid": int, "model": str, "dimension": int},
}

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_HEX64 = re.compile(r"[0-9a-f]{64}\Z")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\Z")
_HOST = r"[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?(?::[0-9]{1,5})?"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_HOST}/{_PART}(?:/{_PART})*\Z")
_PLATFORM = re.compile(r"linux/(?:amd64|arm64)\Z")
_FACT_TEXT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+:~-]{0,127}\Z")
_MIN_DISTINCT = 8
_MAX_ID = 2**31 - 2

Fact = int | str


@dataclass(frozen=True)
class PlatformDigests:
    """Digests of one platform of an image: its manifest and its configuration."""

    manifest_digest: str
    config_digest: str


@dataclass(frozen=True)
class Package:
    """A package file that went into a built image. `sha256` is that of the downloaded file."""

    name: str
    version: str
    sha256: str


@dataclass(frozen=True)
class Built:
    """Provenance of an image assembled by this project from packages."""

    recipe_sha256: str
    debian: tuple[Package, ...]
    pypi: tuple[Package, ...]


@dataclass(frozen=True)
class Upstream:
    """Provenance of an image somebody else published; `statement` says who states the digest and where."""

    statement: str


@dataclass(frozen=True)
class Unsigned:
    """The image carries no signature, for the given reason."""

    reason: str


@dataclass(frozen=True)
class CosignKeyless:
    """The image is signed by cosign without keys: the certificate identity and its issuer."""

    identity_regexp: str
    issuer: str


@dataclass(frozen=True)
class Image:
    """One locked image. `repository` includes the registry host; `platforms` is keyed `os/architecture`."""

    name: str
    repository: str
    tag: str
    index_digest: str
    platforms: Mapping[str, PlatformDigests]
    provenance: Built | Upstream
    signature: Unsigned | CosignKeyless
    facts: Mapping[str, Fact]

    @property
    def reference(self) -> str:
        """The reference to deploy: `repository:tag@index digest`."""
        return f"{self.repository}:{self.tag}@{self.index_digest}"

    def accepts(self, digest: str) -> bool:
        """Tell whether a registry digest is this image: its index or one of its own platform manifests."""
        return digest == self.index_digest or any(
            digest == platform.manifest_digest for platform in self.platforms.values()
        )


@dataclass(frozen=True)
class Lock:
    """A parsed image lock, images in the order of the file."""

    images: tuple[Image, ...]

    def get(self, name: str) -> Image:
        """Return the image called `name`.

        Raises:
            BundleError: the lock has no such image.
        """
        for image in self.images:
            if image.name == name:
                return image
        raise BundleError(
            f"the image lock has no image named {name!r}",
            "an image that is not locked by digest is never deployed",
            "add it with `scripts/images build` or `scripts/images resolve`",
        )

    def with_images(self, images: Iterable[Image]) -> Lock:
        """Return a lock in which each of `images` replaces the one of its name or is added; sorted by name."""
        merged = {image.name: image for image in self.images}
        merged.update({image.name: image for image in images})
        return Lock(tuple(merged[name] for name in sorted(merged)))


def load(path: str | Path) -> Lock:
    """Read and parse the lock file at `path`.

    Raises:
        BundleError: the file cannot be read or is not a valid lock.
    """
    file = Path(path)
    try:
        text = file.read_bytes().decode("utf-8")
    except OSError as error:
        raise BundleError(
            f"the image lock {file} cannot be read: {error.strerror}",
            "without the lock no image digest is known, and nothing is deployed from a tag alone",
            "write it with `scripts/images build --output FILE` or `scripts/images resolve ... --output FILE`",
        ) from error
    except UnicodeDecodeError as error:
        raise BundleError(
            f"the image lock {file} is not UTF-8 text (byte {error.start})",
            "a damaged lock cannot be trusted",
            "restore the file or write it anew with `scripts/images`",
        ) from error
    try:
        return parse(text)
    except BundleError as error:
        raise BundleError(f"{file}: {error.what}", error.why, error.fix) from error


def parse(text: str) -> Lock:
    """Parse the text of a lock.

    Raises:
        BundleError: the text is not a valid lock; `what` names the JSON path.
    """
    try:
        document = json.loads(text, object_pairs_hook=_unique_pairs, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        _refuse("$", f"is not JSON: {error.msg} at line {error.lineno} column {error.colno}")
    except RecursionError:
        _refuse("$", "is nested too deeply")
    root = _object(document, "$", ("schema", "images"))
    if root["schema"] != SCHEMA:
        _refuse("$.schema", f"must be {SCHEMA!r}")
    items = _array(root["images"], "$.images")
    images = tuple(_image(item, f"$.images[{number}]") for number, item in enumerate(items))
    seen: dict[str, int] = {}
    for number, image in enumerate(images):
        if image.name in seen:
            _refuse(f"$.images[{number}].name", f"repeats {image.name!r} of $.images[{seen[image.name]}]")
        seen[image.name] = number
    return Lock(images)


def dump(lock: Lock) -> str:
    """Return the canonical text of `lock`: images by name, fixed key order, a final newline."""
    images = [_image_json(image) for image in sorted(lock.images, key=lambda image: image.name)]
    return json.dumps({"schema": SCHEMA, "images": images}, indent=2, ensure_ascii=False) + "\n"


def _image_json(image: Image) -> dict[str, Any]:
    provenance: dict[str, Any]
    if isinstance(image.provenance, Built):
        provenance = {
            "kind": "built",
            "recipe_sha256": image.provenance.recipe_sha256,
            "debian": [_package_json(package) for package in image.provenance.debian],
            "pypi": [_package_json(package) for package in image.provenance.pypi],
        }
    else:
        provenance = {"kind": "upstream", "statement": image.provenance.statement}
    signature: dict[str, Any]
    if isinstance(image.signature, Unsigned):
        signature = {"kind": "unsigned", "reason": image.signature.reason}
    else:
        signature = {
            "kind": "cosign-keyless",
            "identity_regexp": image.signature.identity_regexp,
            "issuer": image.signature.issuer,
        }
    return {
        "name": image.name,
        "repository": image.repository,
        "tag": image.tag,
        "index_digest": image.index_digest,
        "platforms": {
            name: {"manifest_digest": digests.manifest_digest, "config_digest": digests.config_digest}
            for name, digests in sorted(image.platforms.items())
        },
        "provenance": provenance,
        "signature": signature,
        "facts": {key: image.facts[key] for key in FACT_TYPES[image.name]},
    }


def _package_json(package: Package) -> dict[str, str]:
    return {"name": package.name, "version": package.version, "sha256": package.sha256}


def _refuse(path: str, problem: str) -> NoReturn:
    raise BundleError(
        f"image lock: {path} {problem}",
        "what runs is decided by this file alone, so it is read strictly and nothing in it is guessed",
        "correct that value, or write the lock anew with `scripts/images build` or `scripts/images resolve`",
    )


class _Repeated(dict[str, Any]):
    """An object with a key given twice; refused with its path once that is known."""

    key = ""


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            repeated = _Repeated(result)
            repeated.key = key
            return repeated
        result[key] = value
    return result


def _refuse_constant(name: str) -> NoReturn:
    _refuse("$", f"contains {name}, which is not JSON")


def _mapping(value: Any, path: str) -> dict[str, Any]:
    if isinstance(value, _Repeated):
        _refuse(path, f"has the key {value.key!r} twice")
    if not isinstance(value, dict):
        _refuse(path, f"must be an object, not {_kind(value)}")
    return value


def _object(value: Any, path: str, keys: Iterable[str]) -> dict[str, Any]:
    mapping = _mapping(value, path)
    wanted = list(keys)
    for key in mapping:
        if key not in wanted:
            _refuse(path, f"has the unknown key {key!r}")
    for key in wanted:
        if key not in mapping:
            _refuse(path, f"lacks the key {key!r}")
    return mapping


def _array(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        _refuse(path, f"must be an array, not {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array"}
    return names.get(type(value), "an object")


def _string(value: Any, path: str, pattern: re.Pattern[str] | None = None, meaning: str = "") -> str:
    if not isinstance(value, str):
        _refuse(path, f"must be a string, not {_kind(value)}")
    if pattern is not None and not pattern.match(value):
        _refuse(path, f"must be {meaning}, not {value[:80]!r}")
    return value


def _line(value: Any, path: str) -> str:
    text = _string(value, path)
    if not text.strip() or not text.isprintable() or len(text) > 1000:
        _refuse(path, "must be one line of text that says something (1 to 1000 printable characters)")
    return text


def _distinct(value: str, hexadecimal: str, path: str) -> str:
    if len(set(hexadecimal)) < _MIN_DISTINCT:
        _refuse(path, f"is not the digest of anything: {value[:40]}... repeats too few digits")
    return value


def _digest(value: Any, path: str) -> str:
    text = _string(value, path, _DIGEST, "sha256: and 64 lowercase hexadecimal digits")
    return _distinct(text, text.removeprefix("sha256:"), path)


def _sha256(value: Any, path: str) -> str:
    text = _string(value, path, _HEX64, "64 lowercase hexadecimal digits")
    return _distinct(text, text, path)


def _image(value: Any, path: str) -> Image:
    keys = ("name", "repository", "tag", "index_digest", "platforms", "provenance", "signature", "facts")
    item = _object(value, path, keys)
    name = _string(item["name"], f"{path}.name")
    if name not in FACT_TYPES:
        _refuse(f"{path}.name", f"must be one of {', '.join(FACT_TYPES)}, not {name[:80]!r}")
    platforms = _mapping(item["platforms"], f"{path}.platforms")
    if not platforms:
        _refuse(f"{path}.platforms", "must name at least one platform")
    return Image(
        name=name,
        repository=_string(
            item["repository"], f"{path}.repository", _REPOSITORY, "a registry host and a repository path"
        ),
        tag=_string(item["tag"], f"{path}.tag", _TAG, "an image tag"),
        index_digest=_digest(item["index_digest"], f"{path}.index_digest"),
        platforms={
            platform: _platform(platform, digests, f"{path}.platforms[{json.dumps(platform)}]")
            for platform, digests in platforms.items()
        },
        provenance=_provenance(item["provenance"], f"{path}.provenance"),
        signature=_signature(item["signature"], f"{path}.signature"),
        facts=_facts(item["facts"], f"{path}.facts", FACT_TYPES[name]),
    )


def _platform(name: str, value: Any, path: str) -> PlatformDigests:
    _string(name, path, _PLATFORM, "keyed linux/amd64 or linux/arm64")
    item = _object(value, path, ("manifest_digest", "config_digest"))
    digests = PlatformDigests(
        _digest(item["manifest_digest"], f"{path}.manifest_digest"),
        _digest(item["config_digest"], f"{path}.config_digest"),
    )
    if digests.manifest_digest == digests.config_digest:
        _refuse(path, "has the same digest for manifest and configuration")
    return digests


def _kind_of(value: Any, path: str, kinds: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    mapping = _mapping(value, path)
    kind = mapping.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        _refuse(f"{path}.kind", f"must be one of {', '.join(kinds)}")
    return _object(mapping, path, ("kind", *kinds[kind]))


def _provenance(value: Any, path: str) -> Built | Upstream:
    kinds = {"built": ("recipe_sha256", "debian", "pypi"), "upstream": ("statement",)}
    item = _kind_of(value, path, kinds)
    if item["kind"] == "upstream":
        return Upstream(_line(item["statement"], f"{path}.statement"))
    return Built(
        _sha256(item["recipe_sha256"], f"{path}.recipe_sha256"),
        _packages(item["debian"], f"{path}.debian"),
        _packages(item["pypi"], f"{path}.pypi"),
    )


def _packages(value: Any, path: str) -> tuple[Package, ...]:
    packages: list[Package] = []
    seen: set[str] = set()
    for number, entry in enumerate(_array(value, path)):
        place = f"{path}[{number}]"
        item = _object(entry, place, ("name", "version", "sha256"))
        name = _line(item["name"], f"{place}.name")
        if name in seen:
            _refuse(f"{place}.name", f"repeats {name!r}")
        seen.add(name)
        version = _line(item["version"], f"{place}.version")
        packages.append(Package(name, version, _sha256(item["sha256"], f"{place}.sha256")))
    return tuple(packages)


def _signature(value: Any, path: str) -> Unsigned | CosignKeyless:
    kinds = {"unsigned": ("reason",), "cosign-keyless": ("identity_regexp", "issuer")}
    item = _kind_of(value, path, kinds)
    if item["kind"] == "unsigned":
        return Unsigned(_line(item["reason"], f"{path}.reason"))
    identity = _line(item["identity_regexp"], f"{path}.identity_regexp")
    try:
        re.compile(identity)
    except re.error as error:
        _refuse(f"{path}.identity_regexp", f"is not a regular expression: {error}")
    return CosignKeyless(identity, _line(item["issuer"], f"{path}.issuer"))


def _facts(value: Any, path: str, types: Mapping[str, type]) -> dict[str, Fact]:
    item = _object(value, path, types)
    facts: dict[str, Fact] = {}
    for key, wanted in types.items():
        fact = item[key]
        place = f"{path}.{key}"
        if wanted is str:
            facts[key] = _string(fact, place, _FACT_TEXT, "a version or name (letters, digits, . _ + : ~ -)")
            continue
        if type(fact) is not int:
            _refuse(place, f"must be an integer, not {_kind(fact)}")
        if not 1 <= fact <= _MAX_ID:
            _refuse(place, f"must lie between 1 and {_MAX_ID}; an image that runs as root is refused too")
        facts[key] = fact
    return facts
