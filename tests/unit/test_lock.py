"""The image lock: what is accepted, what is refused and with which path."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bundle import lock
from bundle.errors import BundleError

HEX = "0123456789abcdef"


def digest(number: int) -> str:
    return "sha256:" + hexadecimal(number)


def hexadecimal(number: int) -> str:
    return f"{HEX}{number:048x}"


def entry(name: str, facts: dict[str, Any], number: int) -> dict[str, Any]:
    return {
        "name": name,
        "repository": f"registry.memory.test:5000/memory/{name}",
        "tag": "1.0",
        "index_digest": digest(number),
        "platforms": {
            "linux/amd64": {"manifest_digest": digest(number + 1), "config_digest": digest(number + 2)},
            "linux/arm64": {"manifest_digest": digest(number + 3), "config_digest": digest(number + 4)},
        },
        "provenance": {
            "kind": "built",
            "recipe_sha256": hexadecimal(number + 5),
            "debian": [{"name": "libc6", "version": "2.41-12", "sha256": hexadecimal(number + 6)}],
            "pypi": [{"name": "numpy", "version": "2.5.5", "sha256": hexadecimal(number + 7)}],
        },
        "signature": {"kind": "unsigned", "reason": "built here"},
        "facts": facts,
    }


def document() -> dict[str, Any]:
    postgres = {"uid": 999, "gid": 999, "postgres_major": 17, "pgvector_version": "0.8.0"}
    edge = entry("edge", {"uid": 10002, "gid": 10002, "caddy_version": "2.11.7"}, 100)
    edge["provenance"] = {"kind": "upstream", "statement": "https://hub.docker.com/_/caddy"}
    edge["signature"] = {"kind": "cosign-keyless", "identity_regexp": "^https://x$", "issuer": "https://y"}
    return {"schema": lock.SCHEMA, "images": [edge, entry("postgres", postgres, 0)]}


def test_parses_what_it_dumps() -> None:
    parsed = lock.parse(json.dumps(document()))
    text = lock.dump(parsed)
    assert lock.parse(text) == parsed
    assert lock.dump(lock.parse(text)) == text
    assert text.endswith("}\n")


def test_dump_does_not_depend_on_order() -> None:
    shuffled = document()
    shuffled["images"].reverse()
    for image in shuffled["images"]:
        image["platforms"] = dict(reversed(image["platforms"].items()))
        image["facts"] = dict(reversed(image["facts"].items()))
    assert lock.dump(lock.parse(json.dumps(shuffled))) == lock.dump(lock.parse(json.dumps(document())))


def test_reference_names_tag_and_index() -> None:
    image = lock.parse(json.dumps(document())).get("postgres")
    assert image.reference == f"registry.memory.test:5000/memory/postgres:1.0@{digest(0)}"


def test_accepts_its_index_and_its_own_platforms_only() -> None:
    parsed = lock.parse(json.dumps(document()))
    postgres = parsed.get("postgres")
    assert postgres.accepts(digest(0))
    assert postgres.accepts(digest(1))
    assert postgres.accepts(digest(3))
    assert not postgres.accepts(digest(2)), "a configuration is no registry digest"
    assert not postgres.accepts(digest(100)), "the index of another image"
    assert not postgres.accepts(digest(101)), "a platform of another image"
    assert not postgres.accepts("")


def test_get_refuses_an_image_that_is_not_locked() -> None:
    with pytest.raises(BundleError, match="no image named 'router'"):
        lock.parse(json.dumps(document())).get("router")


def test_with_images_replaces_and_sorts() -> None:
    parsed = lock.parse(json.dumps(document()))
    other = copy.deepcopy(document()["images"][1])
    other["tag"] = "2.0"
    newer = lock.parse(json.dumps({"schema": lock.SCHEMA, "images": [other]})).images
    merged = parsed.with_images(newer)
    assert [image.name for image in merged.images] == ["edge", "postgres"]
    assert merged.get("postgres").tag == "2.0"


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(root: dict[str, Any]) -> None:
        keys: list[Any] = [int(key) if key.isdigit() else key for key in path.split("|")]
        target: Any = root
        for key in keys[:-1]:
            target = target[key]
        if value is ...:
            del target[keys[-1]]
        else:
            target[keys[-1]] = value

    return apply


REFUSED = [
    ("schema", "memory-bundle.image-lock/v2", r"\$\.schema must be"),
    ("more", 1, r"\$ has the unknown key 'more'"),
    ("images", ..., r"\$ lacks the key 'images'"),
    ("images", {}, r"\$\.images must be an array"),
    ("images|1", None, r"\$\.images\[1\] must be an object, not null"),
    ("images|1|extra", 1, r"\$\.images\[1\] has the unknown key 'extra'"),
    ("images|1|tag", ..., r"\$\.images\[1\] lacks the key 'tag'"),
    ("images|1|name", "edge", r"\$\.images\[1\]\.facts"),
    ("images|1|name", "database", r"\$\.images\[1\]\.name must be one of"),
    ("images|1|repository", "postgres", r"\$\.images\[1\]\.repository must be"),
    ("images|1|repository", "Registry.test/x", r"\.repository must be"),
    ("images|1|repository", "registry.test/x:1", r"\.repository must be"),
    ("images|1|repository", "registry.test/$x", r"\.repository must be"),
    ("images|1|tag", "a b", r"\.tag must be"),
    ("images|1|tag", "1.0\n", r"\.tag must be"),
    ("images|1|index_digest", digest(0)[:-1], r"\$\.images\[1\]\.index_digest must be"),
    ("images|1|index_digest", digest(0).upper(), r"\.index_digest must be"),
    ("images|1|index_digest", digest(0) + "\n", r"\.index_digest must be"),
    ("images|1|index_digest", hexadecimal(0), r"\.index_digest must be"),
    ("images|1|index_digest", "sha256:" + "0" * 64, r"\.index_digest is not the digest of anything"),
    (
        "images|1|index_digest",
        "sha256:" + "0123456" * 9 + "0",
        r"\.index_digest is not the digest of anything",
    ),
    ("images|1|index_digest", 5, r"\.index_digest must be a string, not a number"),
    ("images|1|platforms", {}, r"\.platforms must name at least one"),
    ("images|1|platforms|windows/amd64", {}, r'\.platforms\["windows/amd64"\] must be keyed'),
    ("images|1|platforms|linux/amd64|config_digest", digest(1), r'\["linux/amd64"\] has the same digest'),
    ("images|1|platforms|linux/amd64|manifest_digest", "sha256:x", r"\.manifest_digest must be"),
    ("images|1|provenance|kind", "found", r"\.provenance\.kind must be one of built, upstream"),
    ("images|1|provenance|kind", "upstream", r"\.provenance has the unknown key 'recipe_sha256'"),
    ("images|1|provenance|kind", ["built"], r"\.provenance\.kind must be one of"),
    ("images|1|provenance|debian", None, r"\.provenance\.debian must be an array"),
    ("images|1|provenance|debian|0|sha256", "1" * 64, r"\.debian\[0\]\.sha256 is not the digest"),
    ("images|1|provenance|pypi|0|version", " ", r"\.pypi\[0\]\.version must be one line"),
    ("images|0|provenance|statement", "", r"\.statement must be one line"),
    ("images|0|signature|identity_regexp", "(", r"\.identity_regexp is not a regular expression"),
    ("images|1|signature|issuer", "x", r"\.signature has the unknown key 'issuer'"),
    ("images|1|facts|uid", 0, r"\.facts\.uid must lie between 1"),
    ("images|1|facts|uid", True, r"\.facts\.uid must be an integer, not a boolean"),
    ("images|1|facts|uid", 999.0, r"\.facts\.uid must be an integer, not a number"),
    ("images|1|facts|uid", "999", r"\.facts\.uid must be an integer, not a string"),
    ("images|1|facts|pgvector_version", "${X}", r"\.pgvector_version must be"),
    ("images|1|facts|caddy_version", "2", r"\.facts has the unknown key 'caddy_version'"),
    ("images|1|facts|gid", ..., r"\.facts lacks the key 'gid'"),
]


@pytest.mark.parametrize(("path", "value", "message"), REFUSED)
def test_refuses(path: str, value: Any, message: str) -> None:
    root = document()
    change(path, value)(root)
    with pytest.raises(BundleError, match=message) as caught:
        lock.parse(json.dumps(root))
    assert caught.value.why
    assert caught.value.fix


def test_refuses_a_name_given_twice() -> None:
    root = document()
    root["images"].append(copy.deepcopy(root["images"][1]))
    with pytest.raises(BundleError, match=r"\$\.images\[2\]\.name repeats 'postgres' of \$\.images\[1\]"):
        lock.parse(json.dumps(root))


def test_refuses_a_package_given_twice() -> None:
    root = document()
    packages = root["images"][1]["provenance"]["debian"]
    packages.append(dict(packages[0]))
    with pytest.raises(BundleError, match=r"\.debian\[1\]\.name repeats 'libc6'"):
        lock.parse(json.dumps(root))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('{"schema"', '{"schema": "x", "schema"', r"\$ has the key 'schema' twice"),
        ('"tag": "1.0"', '"tag": "1.0", "tag": "1.0"', r"\$\.images\[0\] has the key 'tag' twice"),
        ('"uid": 999', '"uid": 999, "uid": 999', r"\.facts has the key 'uid' twice"),
        ('"kind": "built"', '"kind": "upstream", "kind": "built"', r"\.provenance has the key 'kind' twice"),
        ('"uid": 999', '"uid": NaN', "contains NaN"),
        ('{"schema"', '{,"schema"', "is not JSON"),
    ],
)
def test_refuses_text_that_other_parsers_let_pass(old: str, new: str, message: str) -> None:
    text = json.dumps(document())
    assert old in text
    with pytest.raises(BundleError, match=message):
        lock.parse(text.replace(old, new, 1))


def test_refuses_deep_nesting_without_a_stack_trace() -> None:
    with pytest.raises(BundleError, match=r"nested too deeply|is not JSON"):
        lock.parse("[" * 200_000)


def test_load_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "images.lock.json"
    with pytest.raises(BundleError, match="cannot be read"):
        lock.load(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(BundleError, match="not UTF-8"):
        lock.load(file)
    file.write_text("{}")
    with pytest.raises(BundleError, match=r"images\.lock\.json: image lock: \$ lacks the key 'schema'"):
        lock.load(file)
    file.write_text(json.dumps(document()))
    assert lock.load(file).get("edge").facts["caddy_version"] == "2.11.7"
