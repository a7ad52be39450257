"""Deterministic assembly of OCI images from trees and root file systems, without a container engine.

Everything that could vary between two runs is fixed: entries are sorted, times are one constant, owners are
numeric, JSON is canonical. The same input therefore gives the same digests on every machine.
"""

from __future__ import annotations

import datetime
import gzip
import hashlib
import io
import json
import os
import posixpath
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from .errors import BundleError

#: Time stamp of every file and of the image itself (seconds since 1970) unless SOURCE_DATE_EPOCH says otherwise.
DEFAULT_EPOCH = 1735689600

MEDIA_INDEX = "application/vnd.oci.image.index.v1+json"
MEDIA_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
MEDIA_CONFIG = "application/vnd.oci.image.config.v1+json"
MEDIA_LAYER = "application/vnd.oci.image.layer.v1.tar"
MEDIA_LAYER_GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"

_GZIP_LEVEL = 6


def source_epoch() -> int:
    """Return the time stamp for files and images: SOURCE_DATE_EPOCH if it is set, else `DEFAULT_EPOCH`.

    Raises:
        BundleError: SOURCE_DATE_EPOCH is no whole number of seconds.
    """
    value = os.environ.get("SOURCE_DATE_EPOCH", "")
    if not value:
        return DEFAULT_EPOCH
    if not (value.isascii() and value.isdigit()):
        raise BundleError(
            f"SOURCE_DATE_EPOCH is {value!r}, not a number of seconds",
            "it becomes the time stamp of every file of the images",
            "unset SOURCE_DATE_EPOCH or set it to seconds since 1970",
        )
    return int(value)


def canonical_json(value: Any) -> bytes:
    """Return the one JSON text of `value`: sorted keys, no spaces, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def digest_of(data: bytes) -> str:
    """Return `sha256:<hex>` of `data`."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@dataclass(frozen=True)
class Descriptor:
    """A reference to a blob: media type, digest (`sha256:<hex>`) and size in bytes."""

    media_type: str
    digest: str
    size: int

    def json(self) -> dict[str, Any]:
        """Return the descriptor as it stands in a manifest."""
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size}


@dataclass(frozen=True)
class Layer:
    """A layer in the blob store. `diff_id` is the digest of the uncompressed tar; `comment` goes to the history."""

    blob: Descriptor
    diff_id: str
    comment: str


@dataclass(frozen=True)
class Platform:
    """The platform of an image in OCI terms, for example `linux` and `amd64`."""

    os: str
    architecture: str

    def __str__(self) -> str:
        return f"{self.os}/{self.architecture}"


@dataclass(frozen=True)
class ImageConfig:
    """What a container of the image starts with; the fields of an OCI image configuration."""

    user: str
    env: Mapping[str, str] = field(default_factory=dict)
    entrypoint: Sequence[str] = ()
    cmd: Sequence[str] = ()
    working_dir: str = "/"
    volumes: Sequence[str] = ()
    exposed_ports: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    stop_signal: str = ""

    def json(self) -> dict[str, Any]:
        """Return the `config` object of an OCI image configuration."""
        result: dict[str, Any] = {
            "User": self.user,
            "Env": [f"{name}={value}" for name, value in self.env.items()],
            "WorkingDir": self.working_dir,
        }
        if self.entrypoint:
            result["Entrypoint"] = list(self.entrypoint)
        if self.cmd:
            result["Cmd"] = list(self.cmd)
        if self.volumes:
            result["Volumes"] = {path: {} for path in self.volumes}
        if self.exposed_ports:
            result["ExposedPorts"] = {port: {} for port in self.exposed_ports}
        if self.labels:
            result["Labels"] = dict(self.labels)
        if self.stop_signal:
            result["StopSignal"] = self.stop_signal
        return result


@dataclass(frozen=True)
class BuiltImage:
    """An assembled one-platform image whose blobs are all in the blob store."""

    platform: Platform
    index: Descriptor
    manifest: Descriptor
    config: Descriptor
    layers: tuple[Layer, ...]

    @property
    def size(self) -> int:
        """Bytes of all layers as they are stored."""
        return sum(layer.blob.size for layer in self.layers)


class BlobStore:
    """Content-addressed files below one directory (`<directory>/sha256/<hex>`)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "sha256"
        self._directory.mkdir(parents=True, exist_ok=True)

    def path(self, digest: str) -> Path:
        """Return where the blob `digest` is or would be."""
        return self._directory / digest.removeprefix("sha256:")

    def has(self, blob: Descriptor) -> bool:
        """Tell whether the blob is here in its full size."""
        try:
            return self.path(blob.digest).stat().st_size == blob.size
        except FileNotFoundError:
            return False

    def read(self, digest: str) -> bytes:
        """Return a small blob and verify its digest.

        Raises:
            BundleError: the file is gone or was altered.
        """
        try:
            data = self.path(digest).read_bytes()
        except FileNotFoundError:
            data = b""
        if digest_of(data) != digest:
            raise BundleError(
                f"the cached blob {digest} is missing or damaged",
                "the image cannot be pushed from the cache",
                "run `scripts/images build --refresh` to build it anew",
            )
        return data

    def add(self, data: bytes, media_type: str) -> Descriptor:
        """Store `data` and return its descriptor."""
        with self.writer() as pending:
            pending.stream.write(data)
            return pending.commit(media_type)

    @contextmanager
    def writer(self) -> Iterator[PendingBlob]:
        """Yield a blob that is being written; it is kept only if `commit` is called."""
        handle, name = tempfile.mkstemp(prefix=".partial-", dir=self._directory)
        pending = PendingBlob(self, Path(name), os.fdopen(handle, "wb"))
        try:
            yield pending
        finally:
            pending.discard()

    def prune(self, keep: Iterable[str]) -> None:
        """Remove every blob whose digest is not in `keep`."""
        wanted = {digest.removeprefix("sha256:") for digest in keep}
        for file in self._directory.iterdir():
            if not file.name.startswith(".") and file.name not in wanted:
                file.unlink(missing_ok=True)


class PendingBlob:
    """A blob on its way into a `BlobStore`: write to `stream`, then `commit`."""

    def __init__(self, store: BlobStore, path: Path, stream: IO[bytes]) -> None:
        self._store = store
        self._path = path
        self._raw = stream
        self.stream = HashingWriter(stream)

    def commit(self, media_type: str) -> Descriptor:
        """Move the blob to its digest and return the descriptor."""
        self._raw.close()
        digest = "sha256:" + self.stream.hexdigest()
        os.chmod(self._path, 0o644)
        os.replace(self._path, self._store.path(digest))
        return Descriptor(media_type, digest, self.stream.size)

    def discard(self) -> None:
        """Drop whatever was not committed."""
        self._raw.close()
        self._path.unlink(missing_ok=True)


class HashingWriter(io.RawIOBase):
    """A write-only stream that counts and hashes what passes to `target`."""

    def __init__(self, target: IO[bytes] | HashingWriter | gzip.GzipFile) -> None:
        super().__init__()
        self._target = target
        self._hash = hashlib.sha256()
        self.size = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def write(self, data: Any) -> int:
        self._target.write(data)
        self._hash.update(data)
        self.size += len(data)
        return len(data)

    def hexdigest(self) -> str:
        """Return the SHA-256 of everything written so far."""
        return self._hash.hexdigest()


@dataclass(frozen=True)
class Entry:
    """One member of a layer. `mode` holds permission bits; `open_data` gives the bytes of a regular file."""

    kind: bytes
    mode: int
    uid: int = 0
    gid: int = 0
    target: str = ""
    size: int = 0
    open_data: Callable[[], IO[bytes]] | None = None


class Tree:
    """The content of one layer, by path without a leading slash.

    `base` holds the entries of the layers below: missing parent directories are repeated from there with
    their owner and mode, and a path that leads through a symbolic link of the base is refused, because the
    engine would put the file somewhere else or replace the link.
    """

    def __init__(self, base: Mapping[str, Entry] | None = None) -> None:
        self._base = base or {}
        self.entries: dict[str, Entry] = {}

    def _put(self, path: str, entry: Entry) -> None:
        name = _clean(path)
        parent = posixpath.dirname(name)
        while parent:
            known = self.entries.get(parent) or self._base.get(parent)
            if known is None:
                self.entries[parent] = Entry(tarfile.DIRTYPE, 0o755)
            elif known.kind != tarfile.DIRTYPE:
                raise ValueError(f"{parent} is not a directory, so {name} cannot be placed below it")
            else:
                self.entries.setdefault(parent, known)
            parent = posixpath.dirname(parent)
        self.entries[name] = entry

    def directory(self, path: str, mode: int = 0o755, uid: int = 0, gid: int = 0) -> None:
        """Add a directory."""
        self._put(path, Entry(tarfile.DIRTYPE, mode, uid, gid))

    def symlink(self, path: str, target: str) -> None:
        """Add a symbolic link."""
        self._put(path, Entry(tarfile.SYMTYPE, 0o777, target=target))

    def data(self, path: str, data: bytes, mode: int = 0o644, uid: int = 0, gid: int = 0) -> None:
        """Add a regular file with the given bytes."""
        opener = partial(io.BytesIO, data)
        self._put(path, Entry(tarfile.REGTYPE, mode, uid, gid, size=len(data), open_data=opener))

    def file(self, path: str, source: Path, mode: int, uid: int = 0, gid: int = 0) -> None:
        """Add a regular file read from `source` when the layer is written."""
        size = source.stat().st_size
        entry = Entry(tarfile.REGTYPE, mode, uid, gid, size=size, open_data=partial(_open_file, source))
        self._put(path, entry)

    def copy_directory(self, path: str, source: Path, uid: int = 0, gid: int = 0) -> None:
        """Add everything below the directory `source` at `path`: 0755 for directories and programs, else 0644."""
        self.directory(path, 0o755, uid, gid)
        for folder, folders, files in os.walk(source):
            for name in sorted(folders) + sorted(files):
                item = Path(folder, name)
                place = posixpath.join(path, item.relative_to(source).as_posix())
                status = item.lstat()
                if stat.S_ISLNK(status.st_mode):
                    self.symlink(place, os.readlink(item))
                elif stat.S_ISDIR(status.st_mode):
                    self.directory(place, 0o755, uid, gid)
                elif stat.S_ISREG(status.st_mode):
                    self.file(place, item, 0o755 if status.st_mode & 0o100 else 0o644, uid, gid)

    def copy_tar(
        self,
        archive: tarfile.TarFile,
        wanted: Callable[[str], bool],
        opener: Callable[[tarfile.TarInfo], Callable[[], IO[bytes]]] | None = None,
    ) -> None:
        """Add the members of `archive` whose path `wanted` accepts, with their owners and modes.

        Device nodes, sockets and FIFOs are left out. Of hard-linked files the first path keeps the data. Data is
        read from `archive`, which has to stay open, unless `opener` gives another way for a member.
        """
        open_member = opener or partial(_member_opener, archive)
        members: dict[str, tarfile.TarInfo] = {}
        for member in archive:
            name = _clean(member.name)
            if name and wanted(name):
                members[name] = member
        first: dict[str, str] = {}
        for name in sorted(members):
            source = members[name]
            if not (source.isreg() or source.islnk()):
                continue
            while source.islnk():
                source = archive.getmember(source.linkname)
            original = first.setdefault(_clean(source.name), name)
            mode = source.mode & 0o7777
            if original != name:
                self._put(name, Entry(tarfile.LNKTYPE, mode, source.uid, source.gid, target=original))
                continue
            data = open_member(source)
            self._put(
                name,
                Entry(tarfile.REGTYPE, mode, source.uid, source.gid, size=source.size, open_data=data),
            )
        for name, member in members.items():
            if member.isdir():
                self._put(name, Entry(tarfile.DIRTYPE, member.mode & 0o7777, member.uid, member.gid))
            elif member.issym():
                self._put(name, Entry(tarfile.SYMTYPE, 0o777, member.uid, member.gid, target=member.linkname))

    def merged(self) -> dict[str, Entry]:
        """Return the entries of the base with those of this tree over them."""
        return {**self._base, **self.entries}


def read_entries(path: Path, compressed: bool = False) -> dict[str, Entry]:
    """Return the entries of a layer file written by `write_layer`; data is read from it when asked for."""
    tree = Tree()
    with tarfile.open(path, "r:gz" if compressed else "r:") as archive:
        tree.copy_tar(
            archive, lambda _name: True, lambda member: partial(_read_slice, path, compressed, member)
        )
    return tree.entries


def _read_slice(path: Path, compressed: bool, member: tarfile.TarInfo) -> IO[bytes]:
    with gzip.open(path) if compressed else path.open("rb") as stream:
        stream.seek(member.offset_data)
        return io.BytesIO(stream.read(member.size))


def write_layer(store: BlobStore, tree: Tree, comment: str, epoch: int, compress: bool = False) -> Layer:
    """Write the entries of `tree` as one layer into `store`; `comment` tells in the image history what it is."""
    with store.writer() as pending:
        zipped = gzip.GzipFile("", "wb", _GZIP_LEVEL, fileobj=pending.stream, mtime=0) if compress else None
        plain = HashingWriter(zipped if zipped is not None else pending.stream)
        with tarfile.open(fileobj=plain, mode="w", format=tarfile.GNU_FORMAT) as archive:
            for name in sorted(tree.entries):
                entry = tree.entries[name]
                info = tarfile.TarInfo(name)
                info.type, info.mode, info.mtime = entry.kind, entry.mode, epoch
                info.uid, info.gid, info.linkname = entry.uid, entry.gid, entry.target
                if entry.open_data is None:
                    archive.addfile(info)
                else:
                    info.size = entry.size
                    with entry.open_data() as stream:
                        archive.addfile(info, stream)
        if zipped is not None:
            zipped.close()
        blob = pending.commit(MEDIA_LAYER_GZIP if compress else MEDIA_LAYER)
    return Layer(blob, "sha256:" + plain.hexdigest(), comment)


def assemble(
    store: BlobStore, layers: Sequence[Layer], config: ImageConfig, platform: Platform, epoch: int
) -> BuiltImage:
    """Write configuration, manifest and a one-platform index for `layers` into `store`."""
    created = datetime.datetime.fromtimestamp(epoch, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    config_blob = store.add(
        canonical_json(
            {
                "architecture": platform.architecture,
                "os": platform.os,
                "created": created,
                "config": config.json(),
                "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
                "history": [{"created": created, "created_by": layer.comment} for layer in layers],
            }
        ),
        MEDIA_CONFIG,
    )
    manifest_blob = store.add(
        canonical_json(
            {
                "schemaVersion": 2,
                "mediaType": MEDIA_MANIFEST,
                "config": config_blob.json(),
                "layers": [layer.blob.json() for layer in layers],
            }
        ),
        MEDIA_MANIFEST,
    )
    child = {
        **manifest_blob.json(),
        "platform": {"os": platform.os, "architecture": platform.architecture},
    }
    index_blob = store.add(
        canonical_json({"schemaVersion": 2, "mediaType": MEDIA_INDEX, "manifests": [child]}), MEDIA_INDEX
    )
    return BuiltImage(platform, index_blob, manifest_blob, config_blob, tuple(layers))


def write_docker_archive(store: BlobStore, image: BuiltImage, tag: str, output: IO[bytes]) -> None:
    """Write `image` to `output` in the form that `docker load` reads, under the name `tag`."""
    config_name = image.config.digest.removeprefix("sha256:") + ".json"
    names = [layer.diff_id.removeprefix("sha256:") + "/layer.tar" for layer in image.layers]
    manifest = canonical_json([{"Config": config_name, "RepoTags": [tag], "Layers": names}])
    with tarfile.open(fileobj=output, mode="w|", format=tarfile.GNU_FORMAT) as archive:
        for name, layer in zip(names, image.layers, strict=True):
            path = store.path(layer.blob.digest)
            info = tarfile.TarInfo(name)
            info.size = layer.blob.size
            with path.open("rb") as stream:
                archive.addfile(info, stream)
        for name, data in ((config_name, store.read(image.config.digest)), ("manifest.json", manifest)):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def _open_file(path: Path) -> IO[bytes]:
    return path.open("rb")


def _member_opener(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Callable[[], IO[bytes]]:
    def opener() -> IO[bytes]:
        stream = archive.extractfile(member)
        if stream is None:
            raise ValueError(f"{member.name} has no data")
        return stream

    return opener


def _clean(path: str) -> str:
    name = posixpath.normpath("/" + path).lstrip("/")
    if ".." in path.split("/"):
        raise ValueError(f"the path {path!r} leads outside the layer")
    return name
