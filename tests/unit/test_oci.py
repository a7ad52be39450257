"""Assembly of images: the same input gives the same bytes, whatever the file system says."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from pathlib import Path

import pytest
from bundle import oci
from bundle.errors import BundleError

EPOCH = 1_000_000_000


@pytest.fixture
def store(tmp_path: Path) -> oci.BlobStore:
    return oci.BlobStore(tmp_path / "blobs")


def members(store: oci.BlobStore, layer: oci.Layer) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(store.path(layer.blob.digest)) as archive:
        return {member.name: member for member in archive}


def fill(directory: Path, names: list[str], mtime: int) -> Path:
    for name in names:
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
        file.chmod(0o700 if name.endswith("run") else 0o664)
        os.utime(file, (mtime, mtime))
    return directory


@pytest.mark.parametrize("compress", [False, True])
def test_a_layer_does_not_depend_on_times_modes_or_order(
    tmp_path: Path, store: oci.BlobStore, compress: bool
) -> None:
    layers = []
    for number, names in enumerate((["b/run", "a", "b/c"], ["b/c", "b/run", "a"])):
        source = fill(tmp_path / str(number), names, 1000 + number)
        tree = oci.Tree()
        tree.copy_directory("opt/app", source)
        layers.append(oci.write_layer(store, tree, "app", EPOCH, compress))
    assert layers[0] == layers[1]
    found = members(store, layers[0])
    assert list(found) == ["opt", "opt/app", "opt/app/a", "opt/app/b", "opt/app/b/c", "opt/app/b/run"]
    assert {member.mtime for member in found.values()} == {EPOCH}
    assert {(member.uid, member.gid, member.uname) for member in found.values()} == {(0, 0, "")}
    assert found["opt/app/b/run"].mode == 0o755
    assert found["opt/app/a"].mode == 0o644


def test_compression_changes_the_blob_but_not_the_content(store: oci.BlobStore) -> None:
    tree = oci.Tree()
    tree.data("file", b"x" * 5000)
    plain = oci.write_layer(store, tree, "x", EPOCH)
    packed = oci.write_layer(store, tree, "x", EPOCH, compress=True)
    assert plain.diff_id == packed.diff_id == plain.blob.digest
    assert packed.blob.size < plain.blob.size
    assert packed.blob.media_type.endswith("+gzip")
    unpacked = gzip.decompress(store.path(packed.blob.digest).read_bytes())
    assert oci.digest_of(unpacked) == plain.diff_id


def rootfs(path: Path) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, kind, mode, uid, target in (
            ("./", tarfile.DIRTYPE, 0o755, 0, ""),
            ("./usr", tarfile.DIRTYPE, 0o755, 0, ""),
            ("./usr/bin", tarfile.DIRTYPE, 0o755, 0, ""),
            ("./bin", tarfile.SYMTYPE, 0o777, 0, "usr/bin"),
            ("./usr/bin/perl5", tarfile.REGTYPE, 0o755, 0, ""),
            ("./usr/bin/perl", tarfile.LNKTYPE, 0o755, 0, "./usr/bin/perl5"),
            ("./var", tarfile.DIRTYPE, 0o755, 0, ""),
            ("./var/mail", tarfile.DIRTYPE, 0o2775, 8, ""),
            ("./var/log", tarfile.DIRTYPE, 0o755, 0, ""),
            ("./var/log/dpkg.log", tarfile.REGTYPE, 0o644, 0, ""),
            ("./dev", tarfile.DIRTYPE, 0o755, 0, ""),
            ("./dev/null", tarfile.CHRTYPE, 0o666, 0, ""),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.mode, member.uid, member.linkname = kind, mode, uid, target
            member.uname, member.mtime = "somebody", 5
            data = b"program" if kind == tarfile.REGTYPE else b""
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def base_layer(tmp_path: Path, store: oci.BlobStore) -> oci.Layer:
    tree = oci.Tree()
    with tarfile.open(rootfs(tmp_path / "rootfs.tar")) as archive:
        tree.copy_tar(archive, lambda name: not name.startswith("var/log/"))
        return oci.write_layer(store, tree, "base", EPOCH)


def test_a_root_file_system_is_normalised(tmp_path: Path, store: oci.BlobStore) -> None:
    layer = base_layer(tmp_path, store)
    found = members(store, layer)
    assert "var/log" in found
    assert "var/log/dpkg.log" not in found
    assert "dev/null" not in found
    assert found["var/mail"].mode == 0o2775
    assert found["var/mail"].uid == 8
    assert found["bin"].linkname == "usr/bin"
    assert found["usr/bin/perl"].isreg(), "the first path in order keeps the data"
    assert found["usr/bin/perl5"].islnk()
    assert found["usr/bin/perl5"].linkname == "usr/bin/perl"
    assert {member.uname for member in found.values()} == {""}


@pytest.mark.parametrize("compress", [False, True])
def test_entries_of_a_written_layer_can_be_read_back(
    tmp_path: Path, store: oci.BlobStore, compress: bool
) -> None:
    base_layer(tmp_path, store)
    tree = oci.Tree()
    tree.data("etc/passwd", b"root:x:0:0\n", 0o640, 1, 2)
    layer = oci.write_layer(store, tree, "x", EPOCH, compress)
    entry = oci.read_entries(store.path(layer.blob.digest), compress)["etc/passwd"]
    assert (entry.mode, entry.uid, entry.gid) == (0o640, 1, 2)
    assert entry.open_data is not None
    with entry.open_data() as stream:
        assert stream.read() == b"root:x:0:0\n"


def test_an_upper_layer_repeats_parents_as_they_are_below(tmp_path: Path, store: oci.BlobStore) -> None:
    layer = base_layer(tmp_path, store)
    tree = oci.Tree(oci.read_entries(store.path(layer.blob.digest)))
    tree.data("var/mail/box", b"")
    assert tree.entries["var/mail"].mode == 0o2775
    assert tree.entries["var/mail"].uid == 8
    assert tree.merged()["usr/bin/perl"].size == len(b"program")


def test_a_path_through_a_link_of_the_base_is_refused(tmp_path: Path, store: oci.BlobStore) -> None:
    layer = base_layer(tmp_path, store)
    tree = oci.Tree(oci.read_entries(store.path(layer.blob.digest)))
    with pytest.raises(ValueError, match="bin is not a directory"):
        tree.data("/bin/tool", b"")


def test_a_path_that_leads_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="leads outside"):
        oci.Tree().data("usr/../../etc/passwd", b"")


def image(store: oci.BlobStore) -> oci.BuiltImage:
    tree = oci.Tree()
    tree.data("hello", b"hello")
    layer = oci.write_layer(store, tree, "memory-bundle test", EPOCH)
    config = oci.ImageConfig(
        user="10001:10001",
        env={"PATH": "/bin"},
        entrypoint=["/entry"],
        cmd=["serve"],
        working_dir="/srv",
        volumes=["/data"],
        exposed_ports=["80/tcp"],
        labels={"org.opencontainers.image.version": "1"},
        stop_signal="SIGINT",
    )
    return oci.assemble(store, [layer], config, oci.Platform("linux", "amd64"), EPOCH)


def test_an_image_is_an_index_of_one_manifest(store: oci.BlobStore) -> None:
    built = image(store)
    index = json.loads(store.read(built.index.digest))
    assert index["mediaType"] == oci.MEDIA_INDEX
    assert [child["digest"] for child in index["manifests"]] == [built.manifest.digest]
    assert index["manifests"][0]["platform"] == {"os": "linux", "architecture": "amd64"}
    manifest = json.loads(store.read(built.manifest.digest))
    assert manifest["config"] == built.config.json()
    assert [layer["digest"] for layer in manifest["layers"]] == [built.layers[0].blob.digest]
    config = json.loads(store.read(built.config.digest))
    assert config["created"] == "2001-09-09T01:46:40Z"
    assert config["rootfs"]["diff_ids"] == [built.layers[0].diff_id]
    assert config["config"] == {
        "User": "10001:10001",
        "Env": ["PATH=/bin"],
        "Entrypoint": ["/entry"],
        "Cmd": ["serve"],
        "WorkingDir": "/srv",
        "Volumes": {"/data": {}},
        "ExposedPorts": {"80/tcp": {}},
        "Labels": {"org.opencontainers.image.version": "1"},
        "StopSignal": "SIGINT",
    }
    assert built == image(store), "the second time gives the same digests"


def test_a_docker_archive_holds_what_docker_load_needs(store: oci.BlobStore) -> None:
    built = image(store)
    output = io.BytesIO()
    oci.write_docker_archive(store, built, "name:tag", output)
    output.seek(0)
    with tarfile.open(fileobj=output) as archive:
        files = {member.name: archive.extractfile(member) for member in archive}
        content = {name: stream.read() for name, stream in files.items() if stream is not None}
    (entry,) = json.loads(content["manifest.json"])
    assert entry["RepoTags"] == ["name:tag"]
    assert oci.digest_of(content[entry["Config"]]) == built.config.digest
    assert oci.digest_of(content[entry["Layers"][0]]) == built.layers[0].diff_id


def test_the_store_notices_damage_and_prunes(store: oci.BlobStore) -> None:
    kept = store.add(b"kept", "text/plain")
    dropped = store.add(b"dropped", "text/plain")
    store.prune([kept.digest])
    assert store.has(kept)
    assert not store.has(dropped)
    store.path(kept.digest).write_bytes(b"fake")
    with pytest.raises(BundleError, match="missing or damaged"):
        store.read(kept.digest)


def test_an_unfinished_blob_leaves_nothing(tmp_path: Path, store: oci.BlobStore) -> None:
    with pytest.raises(RuntimeError), store.writer() as pending:
        pending.stream.write(b"half")
        raise RuntimeError
    assert list((tmp_path / "blobs" / "sha256").iterdir()) == []


def test_source_date_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    assert oci.source_epoch() == oci.DEFAULT_EPOCH
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert oci.source_epoch() == 1_700_000_000
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(BundleError, match="not a number of seconds"):
        oci.source_epoch()
