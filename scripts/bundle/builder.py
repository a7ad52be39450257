"""Builds the container images from locked Debian and PyPI packages, without a base image from anywhere.

A recipe (`images/NAME/recipe.json`) says what goes in. Debian packages are unpacked by mmdebstrap, whose apt
runs on the controller and so uses the controller's mirror, proxy and certificate settings. Wheels are downloaded
by pip against a requirement file with hashes and unpacked here. Layers are put together by `bundle.oci`; the
same inputs give the same digests.
"""

from __future__ import annotations

import configparser
import contextlib
import dataclasses
import email.parser
import fnmatch
import hashlib
import io
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from . import controller, oci, registry
from .errors import BundleError
from .lock import FACT_TYPES, Built, Fact, Image, Package, PlatformDigests, Unsigned
from .process import run

#: The images of the lock, in the order they are started on a host.
IMAGE_NAMES = ("postgres", "embeddings", "hindsight", "router", "edge")

#: Repository prefix of built images inside their registry.
NAMESPACE = "memory"

#: Counts changes of this module that change what the same recipe gives.
BUILD_FORMAT = 1

_PARALLEL = 2
_BUILD_ORDER = ("hindsight", "postgres", "embeddings", "router", "edge")
_DEBIAN_TIMEOUT = 1800.0
_PYPI_TIMEOUT = 1800.0
_DOCKER_TIMEOUT = 900.0
_MIN_MEMORY_DISK = 6 << 30
_PACKAGE_LIST = ".package-list"
_LIST_PACKAGES = (
    'APT_CONFIG="$MMDEBSTRAP_APT_CONFIG" apt-cache show '
    "$(dpkg-query --admindir=\"$1/var/lib/dpkg\" --show --showformat='${Package}=${Version} ') "
    f'>"$1/{_PACKAGE_LIST}"'
)
_KEYRINGS = ("debian-archive-keyring.pgp", "debian-archive-keyring.gpg")
_SYSTEM_AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
_WHEEL_MACHINES = {"amd64": "x86_64"}
_WHEEL_SCHEMES = {"purelib": "site-packages", "platlib": "site-packages", "scripts": "bin"}
_GLIBC_NEWEST = 41
_UNSIGNED = "assembled from packages on the controller and pushed to the sandbox registry; nobody signs it"

_NEVER_UNPACK = (
    "/usr/share/doc/*",
    "/usr/share/info/*",
    "/usr/share/lintian/*",
    "/usr/share/locale/*",
    "/usr/share/man/*",
)

_NEVER_PACK = (
    "dev/*",
    "etc/*-",
    "etc/apt/apt.conf.d/99mmdebstrap",
    "etc/apt/sources.list",
    "etc/dpkg/dpkg.cfg.d/99mmdebstrap",
    "etc/hostname",
    "etc/machine-id",
    "etc/resolv.conf",
    "etc/ssh/ssh_host_*",
    "proc/*",
    "run/*",
    "sys/*",
    "tmp/*",
    "var/cache/*/*",
    "var/lib/apt/lists/*",
    "var/lib/dbus/machine-id",
    "var/lib/dpkg/*-old",
    "var/log/*",
    "var/tmp/*",
    "*/__pycache__",
    "*/__pycache__/*",
    _PACKAGE_LIST,
)


@dataclass(frozen=True)
class DebianPart:
    """Debian packages of an image: what to install, what to leave out, what alone to keep."""

    suite: str
    include: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    essential_hooks: tuple[str, ...] = ()
    customize_hooks: tuple[str, ...] = ()
    keep_packages: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    compile_python: bool = False


@dataclass(frozen=True)
class PypiPart:
    """Wheels of an image and where they go: a `venv`, a `site` prefix, or single files to `extract`."""

    requirements: str
    venv: str = ""
    site: str = ""
    extract: Mapping[str, str] = field(default_factory=dict)
    remove: tuple[str, ...] = ()


@dataclass(frozen=True)
class Account:
    """The account that the image runs as."""

    name: str
    uid: int
    gid: int
    home: str
    shell: str


@dataclass(frozen=True)
class Placed:
    """A directory of an image, or a file when `source` names one of the recipe's files."""

    path: str
    mode: int
    uid: int
    gid: int
    source: str = ""


@dataclass(frozen=True)
class Probe:
    """How the facts of an image are measured: a script given to an interpreter inside the image."""

    interpreter: tuple[str, ...]
    script: str


@dataclass(frozen=True)
class Recipe:
    """One parsed recipe; `directory` holds its files, `sha256` covers everything that decides the result."""

    name: str
    directory: Path
    sha256: str
    title: str
    source: str
    licenses: str
    version: str
    tag: str
    base: str
    debian: DebianPart | None
    pypi: PypiPart | None
    account: Account | None
    directories: tuple[Placed, ...]
    files: tuple[Placed, ...]
    symlinks: Mapping[str, str]
    config: oci.ImageConfig | None
    probe: Probe | None


@dataclass(frozen=True)
class RootFs:
    """The Debian layer of an image and the packages in it."""

    layer: oci.Layer
    packages: tuple[Package, ...]


@dataclass(frozen=True)
class Product:
    """A built image before it is pushed."""

    recipe: Recipe
    image: oci.BuiltImage
    tag: str
    debian: tuple[Package, ...]
    pypi: tuple[Package, ...]


class Progress:
    """Prints one line per step on standard error, with the seconds since the start."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, text: str) -> None:
        """Print one line."""
        with self._lock:
            sys.stderr.write(f"[{time.monotonic() - self._start:6.1f}s] {text}\n")
            sys.stderr.flush()


def megabytes(size: int) -> str:
    """Return a size in bytes as text in MB."""
    return f"{size / 1e6:.0f} MB"


def platform_of_controller() -> oci.Platform:
    """Return the platform images are built for: that of the controller's Debian architecture.

    Raises:
        BundleError: dpkg is missing or images cannot be built for this architecture.
    """
    architecture = run(["dpkg", "--print-architecture"], timeout=30).stdout.strip()
    if architecture not in _WHEEL_MACHINES:
        raise BundleError(
            f"images cannot be built on a {architecture} machine",
            "the requirement files of the images are locked for " + ", ".join(_WHEEL_MACHINES),
            "build on an amd64 machine, or take images from a registry with `scripts/images resolve`",
        )
    return oci.Platform("linux", architecture)


class Workshop:
    """Builds images and keeps what it built in a cache.

    Args:
        root: top directory of the repository.
        state: state directory; the cache lives in `cache` below it.
        prefix: prefix of everything created in the container engine.
        say: receives progress lines.
        compress: compress layers with gzip.
        refresh: build anew from the packages the mirrors offer now, whatever the cache holds.
    """

    def __init__(
        self,
        root: Path,
        state: Path,
        prefix: str,
        say: Callable[[str], None],
        *,
        compress: bool = False,
        refresh: bool = False,
    ) -> None:
        self.root = root
        self.prefix = prefix
        self.say = say
        self.platform = platform_of_controller()
        self._compress = compress
        self._refresh = refresh
        self._cache = state / "cache"
        self._epoch = oci.source_epoch()
        self._records = self._cache / "records"
        self._records.mkdir(parents=True, exist_ok=True)
        self.store = oci.BlobStore(self._cache / "blobs")
        self._fresh: set[str] = set()
        self._pip: tuple[str, ...] = ()
        self._pip_lock = threading.Lock()
        self._step_locks: dict[str, threading.Lock] = {}
        self._bases: dict[str, RootFs] = {}
        self._engine_images: list[str] = []
        self._engine_lock = threading.Lock()

    def recipe(self, name: str) -> Recipe:
        """Read the recipe of image `name`.

        Raises:
            BundleError: there is no such recipe or it is wrong.
        """
        return load_recipe(self.root, name)

    def is_built(self, recipe: Recipe) -> bool:
        """Tell whether the cache holds the image of `recipe`."""
        return self._load_product(recipe) is not None

    def build(self, name: str) -> Product:
        """Build image `name`, or take it from the cache when nothing that goes in has changed."""
        recipe = self.recipe(name)
        if recipe.config is None:
            _bad_recipe(recipe.directory, "has no config, so it is a base and no image")
        cached = self._load_product(recipe)
        if cached is not None:
            built = time.strftime(
                "%Y-%m-%d", time.gmtime(self._product_record(recipe, self._compress).stat().st_mtime)
            )
            self.say(f"{name}: unchanged since {built}, from the cache ({megabytes(cached.image.size)})")
            return cached
        started = time.monotonic()
        base = self._rootfs(self.recipe(recipe.base) if recipe.base else recipe)
        entries = oci.read_entries(self.store.path(base.layer.blob.digest), self._compress)
        with self._work_directory(name) as work:
            tree = oci.Tree(entries)
            wheels = self._wheels(recipe)
            if recipe.pypi:
                self._add_wheels(recipe, recipe.pypi, tree, base, work, wheels)
            _add_account(recipe.account, tree, entries)
            for placed in recipe.directories:
                tree.directory(placed.path, placed.mode, placed.uid, placed.gid)
            for placed in recipe.files:
                tree.file(placed.path, recipe.directory / placed.source, placed.mode, placed.uid, placed.gid)
            for path, target in recipe.symlinks.items():
                tree.symlink(path, target)
            layer = oci.write_layer(self.store, tree, f"memory-bundle {name}", self._epoch, self._compress)
        pypi = tuple(sorted((package for package, _ in wheels.values()), key=lambda package: package.name))
        labels = {
            "org.opencontainers.image.title": recipe.title,
            "org.opencontainers.image.version": _versioned(recipe, recipe.version, base.packages, pypi),
            "org.opencontainers.image.revision": recipe.sha256,
            "org.opencontainers.image.source": recipe.source,
            "org.opencontainers.image.licenses": recipe.licenses,
        }
        config = dataclasses.replace(recipe.config, labels=labels)
        image = oci.assemble(self.store, (base.layer, layer), config, self.platform, self._epoch)
        tag = _versioned(recipe, recipe.tag, base.packages, pypi)
        product = Product(recipe, image, tag, base.packages, pypi)
        self._save_product(product)
        self.say(f"{name}: built in {time.monotonic() - started:.1f} s, {megabytes(image.size)}, {tag}")
        return product

    def measure(self, product: Product, reference: str) -> Mapping[str, Fact]:
        """Start the pushed image once, as it will run, and return the facts its probe prints.

        `reference` is an address from which the container engine can pull it by digest.
        """
        record = self._record_path("facts", product.image.index.digest)
        if record.is_file():
            return _checked_facts(product.recipe, record.read_text())
        probe = product.recipe.probe
        if probe is None:
            _bad_recipe(product.recipe.directory, "has no facts, so the image cannot be locked")
        self.say(f"{product.recipe.name}: starting the image once to measure its facts")
        run(["docker", "pull", "--quiet", reference], timeout=_DOCKER_TIMEOUT)
        self._note_engine_image(reference)
        script = (product.recipe.directory / probe.script).read_bytes()
        argv = self._sealed_container(f"facts-{product.recipe.name}")
        argv += ["--entrypoint", probe.interpreter[0], reference, *probe.interpreter[1:]]
        text = run(argv, stdin=script, timeout=_DOCKER_TIMEOUT).stdout.strip()
        facts = _checked_facts(product.recipe, text.splitlines()[-1] if text else "")
        _write_atomically(record, json.dumps(dict(facts)) + "\n")
        return facts

    def load(self, product: Product, reference: str) -> None:
        """Load a built image into the local container engine under the name `reference`."""
        self._load_engine_image(product.image, reference)

    def close(self) -> None:
        """Remove the images that building left in the container engine."""
        with self._engine_lock:
            for reference in reversed(self._engine_images):
                run(["docker", "image", "rm", reference], timeout=120, check=False)
            self._engine_images.clear()

    def prune(self) -> None:
        """Drop blobs and records that the present recipes do not lead to, compressed or not."""
        keep: set[str] = set()
        records: set[Path] = set()
        for recipe_file in sorted((self.root / "images").glob("*/recipe.json")):
            recipe = self.recipe(recipe_file.parent.name)
            for compress in (False, True):
                image_record = self._product_record(recipe, compress)
                rootfs_record = self._rootfs_record(recipe, compress)
                records.update((image_record, rootfs_record))
                product = self._read_product(recipe, image_record)
                if product is not None:
                    image = product.image
                    records.add(self._record_path("facts", image.index.digest))
                    keep.update(blob.digest for blob in (image.index, image.manifest, image.config))
                    keep.update(layer.blob.digest for layer in image.layers)
                rootfs = self._read_rootfs(rootfs_record)
                if rootfs is not None:
                    keep.add(rootfs.layer.blob.digest)
        self.store.prune(keep)
        for record in self._records.iterdir():
            if record not in records:
                record.unlink(missing_ok=True)

    # Cache records

    def _record_path(self, kind: str, key: str) -> Path:
        return self._records / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"

    def _product_record(self, recipe: Recipe, compress: bool) -> Path:
        key = f"{recipe.name} {recipe.sha256} {self.platform} {self._epoch} {compress}"
        return self._record_path("image", key)

    def _rootfs_record(self, recipe: Recipe, compress: bool) -> Path:
        inputs: list[Any] = [BUILD_FORMAT, str(self.platform), self._epoch, compress]
        if recipe.debian is not None:
            inputs.append(dataclasses.asdict(recipe.debian))
            if recipe.debian.compile_python:
                inputs.append(oci.sha256_file(self.root / "images" / "python" / "compile.py"))
        return self._record_path("rootfs", json.dumps(inputs))

    def _usable(self, record: Path) -> bool:
        return not self._refresh or record.name in self._fresh

    def _write_record(self, record: Path, value: Mapping[str, Any]) -> None:
        _write_atomically(record, json.dumps(value, indent=1) + "\n")
        self._fresh.add(record.name)

    def _load_product(self, recipe: Recipe) -> Product | None:
        record = self._product_record(recipe, self._compress)
        return self._read_product(recipe, record) if self._usable(record) else None

    def _read_product(self, recipe: Recipe, record: Path) -> Product | None:
        if not record.is_file():
            return None
        value = json.loads(record.read_text())
        layers = tuple(_layer_from(item) for item in value["layers"])
        index, manifest, config = (oci.Descriptor(*value[key]) for key in ("index", "manifest", "config"))
        if not all(
            self.store.has(blob) for blob in (index, manifest, config, *(layer.blob for layer in layers))
        ):
            return None
        image = oci.BuiltImage(self.platform, index, manifest, config, layers)
        return Product(
            recipe,
            image,
            value["tag"],
            tuple(Package(*item) for item in value["debian"]),
            tuple(Package(*item) for item in value["pypi"]),
        )

    def _save_product(self, product: Product) -> None:
        image = product.image
        self._write_record(
            self._product_record(product.recipe, self._compress),
            {
                "tag": product.tag,
                "index": dataclasses.astuple(image.index),
                "manifest": dataclasses.astuple(image.manifest),
                "config": dataclasses.astuple(image.config),
                "layers": [dataclasses.astuple(layer) for layer in image.layers],
                "debian": [dataclasses.astuple(package) for package in product.debian],
                "pypi": [dataclasses.astuple(package) for package in product.pypi],
            },
        )

    def _load_rootfs(self, recipe: Recipe) -> RootFs | None:
        record = self._rootfs_record(recipe, self._compress)
        return self._read_rootfs(record) if self._usable(record) else None

    def _read_rootfs(self, record: Path) -> RootFs | None:
        if not record.is_file():
            return None
        value = json.loads(record.read_text())
        layer = _layer_from(value["layer"])
        if not self.store.has(layer.blob):
            return None
        return RootFs(layer, tuple(Package(*item) for item in value["packages"]))

    # Debian

    def prepare_base(self, recipe: Recipe) -> RootFs:
        """Build the Debian layer that `recipe` stands on, or take it from the cache."""
        return self._rootfs(self.recipe(recipe.base) if recipe.base else recipe)

    def _rootfs(self, recipe: Recipe) -> RootFs:
        with self._step_locks.setdefault(f"base {recipe.name}", threading.Lock()):
            if recipe.name not in self._bases:
                self._bases[recipe.name] = self._load_rootfs(recipe) or self._build_rootfs(recipe)
            return self._bases[recipe.name]

    def _build_rootfs(self, recipe: Recipe) -> RootFs:
        debian = recipe.debian
        if debian is None:
            _bad_recipe(recipe.directory, "has neither a base nor Debian packages")
        self.say(f"{recipe.name}: installing Debian {debian.suite} packages ({', '.join(debian.include)})")
        started = time.monotonic()
        with self._work_directory(recipe.name) as work:
            archive_path = work / "rootfs.tar"
            self._mmdebstrap(debian, archive_path, work)
            with tarfile.open(archive_path, "r:") as archive:
                packages = _read_package_list(archive, debian)
                tree = oci.Tree()
                tree.copy_tar(archive, _layer_filter(debian.keep))
                comment = f"debian {debian.suite}: {' '.join(debian.include)}"
                if debian.compile_python:
                    self._compile_base(recipe, tree, comment)
                layer = oci.write_layer(self.store, tree, comment, self._epoch, self._compress)
        rootfs = RootFs(layer, packages)
        self._write_record(
            self._rootfs_record(recipe, self._compress),
            {
                "layer": dataclasses.astuple(layer),
                "packages": [dataclasses.astuple(package) for package in packages],
            },
        )
        self.say(
            f"{recipe.name}: {len(packages)} Debian packages, {megabytes(layer.blob.size)}, "
            f"{time.monotonic() - started:.1f} s"
        )
        return rootfs

    def _mmdebstrap(self, debian: DebianPart, output: Path, work: Path) -> None:
        argv = ["env", f"TMPDIR={work}", f"SOURCE_DATE_EPOCH={self._epoch}", "mmdebstrap", "--quiet"]
        argv += ["--variant=essential", f"--architectures={self.platform.architecture}", "--format=tar"]
        argv += [f"--keyring={_debian_keyring()}", f"--include={','.join(debian.include)}"]
        options = ['Acquire::Languages "none"', 'APT::Install-Recommends "false"', *controller.apt_options()]
        argv += [f"--aptopt={option}" for option in options]
        argv += [f"--dpkgopt=path-exclude={pattern}" for pattern in (*_NEVER_UNPACK, *debian.exclude)]
        argv += ["--dpkgopt=path-include=/usr/share/doc/*/copyright"]
        argv += [f"--essential-hook={hook}" for hook in debian.essential_hooks]
        argv += [f"--customize-hook={hook}" for hook in debian.customize_hooks]
        argv += [f"--customize-hook={_LIST_PACKAGES}"]
        argv += [debian.suite, "-", *controller.debian_mirror().sources(debian.suite)]
        with output.open("wb") as stream:
            _run_to_file(controller.as_root(argv), stream, _DEBIAN_TIMEOUT)

    def _compile_base(self, recipe: Recipe, tree: oci.Tree, comment: str) -> None:
        raw = oci.write_layer(self.store, tree, comment, self._epoch)
        config = oci.ImageConfig(user="0:0")
        reference = f"{self.prefix}-build:raw-{recipe.name}"
        self._load_engine_image(
            oci.assemble(self.store, (raw,), config, self.platform, self._epoch), reference
        )
        self._note_engine_image(reference)
        version = _python_version(tree.entries)
        roots = [f"/usr/lib/{version}", "/usr/lib/python3/dist-packages"]
        self._compile(tree, reference, recipe.name, (), roots)

    # PyPI

    def prepare_wheels(self, recipe: Recipe) -> None:
        """Download the wheels of `recipe` unless they are in the cache."""
        self._wheels(recipe)

    def _wheels(self, recipe: Recipe) -> dict[str, tuple[Package, Path]]:
        if recipe.pypi is None:
            return {}
        with self._step_locks.setdefault(f"wheels {recipe.name}", threading.Lock()):
            return self._locked_wheels(recipe, self.root / "locks" / recipe.pypi.requirements)

    def _locked_wheels(self, recipe: Recipe, requirements: Path) -> dict[str, tuple[Package, Path]]:
        pins = parse_requirements(requirements.read_text(), requirements)
        folder = self._cache / "wheels" / recipe.name
        folder.mkdir(parents=True, exist_ok=True)
        found = _match_wheels(pins, folder)
        if len(found) < len(pins):
            self.say(f"{recipe.name}: downloading {len(pins) - len(found)} Python packages")
            started = time.monotonic()
            self._pip_download(requirements, folder)
            found = _match_wheels(pins, folder)
            size = sum(path.stat().st_size for _, path in found.values())
            self.say(
                f"{recipe.name}: {len(found)} wheels, {megabytes(size)}, {time.monotonic() - started:.1f} s"
            )
        missing = sorted(set(pins) - set(found))
        if missing:
            raise BundleError(
                f"no wheel of {', '.join(missing[:5])} matches the hashes in {requirements.name}",
                "only files whose hash is locked go into an image",
                f"check the package index, or lock anew as locks/README.md says, and commit {requirements.name}",
            )
        return found

    def _pip_download(self, requirements: Path, folder: Path) -> None:
        machine = _WHEEL_MACHINES[self.platform.architecture]
        glibc = [f"manylinux_2_{minor}_{machine}" for minor in range(_GLIBC_NEWEST, 4, -1)]
        older = [f"{name}_{machine}" for name in ("manylinux2014", "manylinux2010", "manylinux1", "linux")]
        argv = [*self._pip_command(), "download", "--quiet", "--no-deps", "--require-hashes"]
        argv += ["--only-binary=:all:", "--python-version=3.13", "--implementation=cp", "--no-cache-dir"]
        argv += [f"--platform={platform}" for platform in (*glibc, *older)]
        argv += ["--dest", str(folder), "--requirement", str(requirements)]
        run(argv, env=self._pip_environment(), timeout=_PYPI_TIMEOUT)

    def _pip_environment(self) -> dict[str, str]:
        """Return an environment in which pip trusts what the system trusts, unless pip is told otherwise."""
        environment = dict(os.environ)
        told = run([*self._pip_command(), "config", "list"], timeout=60, check=False).stdout
        bundle = os.environ.get("SSL_CERT_FILE") or _SYSTEM_AUTHORITIES
        if not re.search(r"\.cert=", told) and os.path.isfile(bundle):
            environment["PIP_CERT"] = bundle
        return environment

    def _pip_command(self) -> tuple[str, ...]:
        with self._pip_lock:
            if self._pip:
                return self._pip
            venv = self._cache / "pip"
            for python in (Path(sys.executable), venv / "bin" / "python"):
                probe = [str(python), "-m", "pip", "--version"]
                if python.exists() and run(probe, timeout=60, check=False).returncode == 0:
                    self._pip = tuple(probe[:3])
                    return self._pip
            shutil.rmtree(venv, ignore_errors=True)
            maker = controller.choose_python(self._cache.parent / "logs" / "packages.log")
            run([maker, "-I", "-m", "venv", str(venv)], timeout=300)
            self._pip = (str(venv / "bin" / "python"), "-m", "pip")
            return self._pip

    def _add_wheels(
        self,
        recipe: Recipe,
        pypi: PypiPart,
        tree: oci.Tree,
        base: RootFs,
        work: Path,
        wheels: Mapping[str, tuple[Package, Path]],
    ) -> None:
        if pypi.extract:
            for pattern, path in pypi.extract.items():
                tree.data(path, _member_of_wheels(recipe, wheels, pattern), 0o755)
            return
        version = _python_version(tree.merged())
        interpreter = f"{pypi.venv}/bin/python" if pypi.venv else "/usr/bin/python3"
        for _, wheel in wheels.values():
            install_wheel(wheel, work, interpreter)
        for pattern in pypi.remove:
            _remove(recipe, work, pattern)
        prefix = pypi.venv or pypi.site
        packages = f"{prefix}/lib/{version}/{'site-packages' if pypi.venv else 'dist-packages'}"
        tree.copy_directory(packages, work / "site-packages")
        if (work / "bin").is_dir():
            tree.copy_directory(f"{prefix}/bin", work / "bin")
        if pypi.venv:
            tree.symlink(f"{prefix}/bin/python", "/usr/bin/python3")
            tree.symlink(f"{prefix}/bin/python3", "python")
            number = version.removeprefix("python")
            settings = f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {number}\n"
            tree.data(f"{prefix}/pyvenv.cfg", settings.encode())
        reference = f"{self.prefix}-build:{base.layer.diff_id[7:19]}"
        with self._engine_lock:
            known = reference in self._engine_images
            if not known:
                self._load_base(base, reference)
                self._engine_images.append(reference)
        self.say(f"{recipe.name}: compiling {len(wheels)} Python packages")
        self._compile(tree, reference, recipe.name, ((work / "site-packages", packages),), [packages])

    def _load_base(self, base: RootFs, reference: str) -> None:
        config = oci.ImageConfig(user="0:0")
        image = oci.assemble(self.store, (base.layer,), config, self.platform, self._epoch)
        self._load_engine_image(image, reference)

    def _compile(
        self,
        tree: oci.Tree,
        reference: str,
        name: str,
        mounts: Iterable[tuple[Path, str]],
        roots: Sequence[str],
    ) -> None:
        """Compile the sources below `roots` inside the image `reference` and add the byte code to `tree`."""
        argv = self._sealed_container(f"compile-{name}")
        argv += ["--env", "PYTHONHASHSEED=0", "--env", "PYTHONDONTWRITEBYTECODE=1", "--env", "LANG=C.UTF-8"]
        for source, target in mounts:
            argv += ["--mount", f"type=bind,source={source},target={target},readonly"]
        argv += ["--user", "65534:65534", "--entrypoint", "/usr/bin/python3", reference, "-", *roots]
        script = (self.root / "images" / "python" / "compile.py").read_bytes()
        stream = io.BytesIO(_run_bytes(argv, script, _DOCKER_TIMEOUT))
        while length := int.from_bytes(stream.read(8), "big"):
            with tarfile.open(fileobj=io.BytesIO(stream.read(length)), mode="r:") as archive:
                for member in archive:
                    data = archive.extractfile(member)
                    if data is not None:
                        tree.data(member.name, data.read())

    # Container engine

    def _sealed_container(self, name: str) -> list[str]:
        return [
            *("docker", "run", "--rm", "--interactive", "--name", f"{self.prefix}-{name}-{os.getpid()}"),
            *("--network", "none", "--read-only", "--tmpfs", "/tmp:rw,size=1g", "--cap-drop", "ALL"),
            *("--security-opt", "no-new-privileges"),
        ]

    def _load_engine_image(self, image: oci.BuiltImage, reference: str) -> None:
        with subprocess.Popen(
            ["docker", "load", "--quiet"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        ) as process:
            if process.stdin is None or process.stderr is None:
                raise AssertionError("the pipes were asked for")
            with contextlib.suppress(BrokenPipeError), process.stdin:
                oci.write_docker_archive(self.store, image, reference, process.stdin)
            message = process.stderr.read().decode(errors="replace")
        if process.returncode != 0:
            raise BundleError(
                f"the container engine did not load {reference}",
                "it said: " + message.strip()[-400:],
                "check that the engine runs and that its disk is not full",
            )

    def _note_engine_image(self, reference: str) -> None:
        with self._engine_lock:
            if reference not in self._engine_images:
                self._engine_images.append(reference)

    @contextlib.contextmanager
    def _work_directory(self, name: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix=f"{self.prefix}-{name}-", dir=self._work_parent()) as work:
            os.chmod(work, 0o755)
            yield Path(work)

    def _work_parent(self) -> Path:
        memory = Path("/dev/shm")
        with contextlib.suppress(OSError):
            status = os.statvfs(memory)
            unusable = status.f_flag & (os.ST_NOEXEC | os.ST_NODEV)
            if not unusable and status.f_bavail * status.f_frsize >= _MIN_MEMORY_DISK:
                return memory
        disk = self._cache / "work"
        disk.mkdir(exist_ok=True)
        return disk


def build_images(
    workshop: Workshop,
    names: Sequence[str],
    connect: Callable[[], registry.Client],
    repository_host: str,
) -> tuple[Image, ...]:
    """Build, push, start once and tag the images `names`; return their lock entries.

    Args:
        workshop: builds and caches.
        names: which of `IMAGE_NAMES`.
        connect: makes the registry ready and returns a client of it; called once, beside the first builds.
        repository_host: host of the registry as it is written into the lock.
    """
    pool = ThreadPoolExecutor(max_workers=_PARALLEL)
    order = [name for name in _BUILD_ORDER if name in names]
    try:
        early: list[Future[Any]] = []
        longest = workshop.recipe(order[0])
        if not workshop.is_built(longest):
            early = [
                pool.submit(workshop.prepare_base, longest),
                pool.submit(workshop.prepare_wheels, longest),
            ]
        products = [pool.submit(workshop.build, name) for name in (*order[1:2], order[0], *order[2:])]
        images: list[Image] = []
        with connect() as client:
            for product in as_completed(products):
                images.append(_publish(workshop, product.result(), client, repository_host))
        for step in early:
            step.result()
        return tuple(images)
    finally:
        pool.shutdown(cancel_futures=True)


def _publish(workshop: Workshop, product: Product, client: registry.Client, repository_host: str) -> Image:
    name = product.recipe.name
    path = f"{NAMESPACE}/{name}"
    started = time.monotonic()
    sent = registry.push_content(client, path, workshop.store, product.image)
    if sent:
        workshop.say(f"{name}: pushed {megabytes(sent)} in {time.monotonic() - started:.1f} s")
    digest = product.image.index.digest
    facts = workshop.measure(product, f"{client.host}/{path}@{digest}")
    registry.push_tag(client, path, workshop.store, product.image, product.tag)
    return Image(
        name=name,
        repository=f"{repository_host}/{path}",
        tag=product.tag,
        index_digest=digest,
        platforms={
            str(product.image.platform): PlatformDigests(
                product.image.manifest.digest, product.image.config.digest
            )
        },
        provenance=Built(product.recipe.sha256, product.debian, product.pypi),
        signature=Unsigned(_UNSIGNED),
        facts=facts,
    )


# Recipes


def load_recipe(root: Path, name: str) -> Recipe:
    """Read and check `images/NAME/recipe.json` below `root`.

    Raises:
        BundleError: the recipe is missing or wrong.
    """
    directory = root / "images" / name
    try:
        value = json.loads((directory / "recipe.json").read_bytes())
    except (OSError, ValueError) as error:
        _bad_recipe(directory, f"cannot be read: {error}")
    try:
        return _parse_recipe(root, directory, name, value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        _bad_recipe(directory, f"is wrong: {error}")


def _bad_recipe(directory: Path, problem: str) -> NoReturn:
    raise BundleError(
        f"images/{directory.name}/recipe.json {problem}",
        "the recipe alone decides what goes into the image",
        "restore the file from version control",
    )


def _parse_recipe(root: Path, directory: Path, name: str, value: dict[str, Any]) -> Recipe:
    known = {
        *("title", "source", "licenses", "version", "tag", "base", "debian", "pypi", "account"),
        *("directories", "files", "symlinks", "config", "facts"),
    }
    unknown = sorted(set(value) - known)
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}")
    debian = DebianPart(**_tuples(value["debian"])) if "debian" in value else None
    pypi = PypiPart(**_tuples(value["pypi"])) if "pypi" in value else None
    base = value.get("base", "")
    if bool(base) == (debian is not None):
        raise ValueError("it needs either a base or Debian packages")
    facts = value.get("facts")
    return Recipe(
        name=name,
        directory=directory,
        sha256=_recipe_hash(root, directory, base, pypi),
        title=value["title"],
        source=value.get("source", ""),
        licenses=value.get("licenses", ""),
        version=value.get("version", ""),
        tag=value.get("tag", ""),
        base=base,
        debian=debian,
        pypi=pypi,
        account=Account(**value["account"]) if "account" in value else None,
        directories=tuple(_placed(item, "0755") for item in value.get("directories", [])),
        files=tuple(_placed(item, "0644") for item in value.get("files", [])),
        symlinks=value.get("symlinks", {}),
        config=oci.ImageConfig(**value["config"]) if "config" in value else None,
        probe=Probe(tuple(facts["interpreter"]), facts["script"]) if facts else None,
    )


def _tuples(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(item) if isinstance(item, list) else item for key, item in value.items()}


def _placed(item: Mapping[str, Any], mode: str) -> Placed:
    settings = {"mode": mode, "uid": 0, "gid": 0, **item}
    return Placed(**{**settings, "mode": int(settings["mode"], 8)})


def _recipe_hash(root: Path, directory: Path, base: str, pypi: PypiPart | None) -> str:
    files = [path for path in directory.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    files += [root / "images" / "python" / "compile.py"]
    if base:
        files += [root / "images" / base / "recipe.json"]
    if pypi is not None:
        files.append(root / "locks" / pypi.requirements)
    total = hashlib.sha256(f"format {BUILD_FORMAT}\n".encode())
    for path in sorted(set(files)):
        total.update(f"{path.relative_to(root).as_posix()} {oci.sha256_file(path)}\n".encode())
    return total.hexdigest()


def _versioned(recipe: Recipe, template: str, debian: Iterable[Package], pypi: Iterable[Package]) -> str:
    known = {f"debian:{package.name}": upstream_version(package.version) for package in debian}
    known.update({f"pypi:{package.name}": package.version for package in pypi})

    def replace(match: re.Match[str]) -> str:
        if match[1] not in known:
            _bad_recipe(recipe.directory, f"names {match[1]}, which is not in the image")
        return known[match[1]]

    return re.sub(r"\{([^}]*)\}", replace, template)


def upstream_version(version: str) -> str:
    """Return the upstream part of a Debian version: no epoch, no revision, no repackaging mark."""
    upstream = version.partition(":")[2] or version
    upstream = upstream.rpartition("-")[0] or upstream
    return re.split(r"[+~]", upstream, maxsplit=1)[0]


def _checked_facts(recipe: Recipe, text: str) -> Mapping[str, Fact]:
    types = FACT_TYPES[recipe.name]
    try:
        facts = json.loads(text)
        wrong = set(facts) != set(types) or any(type(facts[key]) is not types[key] for key in types)
    except (ValueError, TypeError):
        facts, wrong = {}, True
    if wrong:
        raise BundleError(
            f"the image {recipe.name} did not tell its facts but {text[:200]!r}",
            "the lock records what was measured in the built image",
            f"check images/{recipe.name}/{recipe.probe.script if recipe.probe else ''}",
        )
    return {key: facts[key] for key in types}


def _layer_from(item: Sequence[Any]) -> oci.Layer:
    return oci.Layer(oci.Descriptor(*item[0]), item[1], item[2])


def _write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    os.replace(partial, path)


# Debian packages


def _debian_keyring() -> Path:
    for name in _KEYRINGS:
        path = Path("/usr/share/keyrings", name)
        if path.is_file():
            return path
    raise BundleError(
        "the keyring of the Debian archive is not on this machine",
        "the packages of the images are verified with it",
        "install the package debian-archive-keyring",
    )


def _layer_filter(keep: Sequence[str]) -> Callable[[str], bool]:
    def wanted(name: str) -> bool:
        if keep:
            return name in keep
        return not any(fnmatch.fnmatchcase(name, pattern) for pattern in _NEVER_PACK)

    return wanted


def _read_package_list(archive: tarfile.TarFile, debian: DebianPart) -> tuple[Package, ...]:
    stream = archive.extractfile(f"./{_PACKAGE_LIST}")
    if stream is None:
        raise AssertionError("mmdebstrap writes the package list as a regular file")
    packages: dict[str, Package] = {}
    for stanza in stream.read().decode().split("\n\n"):
        fields = email.parser.HeaderParser().parsestr(stanza)
        name = fields.get("Package", "")
        if not name or (debian.keep_packages and name not in debian.keep_packages):
            continue
        packages[name] = Package(name, fields.get("Version", ""), fields.get("SHA256", ""))
    return tuple(packages[name] for name in sorted(packages))


def _python_version(entries: Mapping[str, oci.Entry]) -> str:
    target = entries["usr/bin/python3"].target
    if not re.fullmatch(r"python3\.\d+", target):
        raise AssertionError(f"python3 leads to {target}")
    return target


# Wheels


def parse_requirements(text: str, source: Path) -> dict[str, tuple[str, frozenset[str]]]:
    """Parse a requirement file with hashes into `{name: (version, hashes)}`.

    Raises:
        BundleError: a line is no pinned requirement with SHA-256 hashes.
    """
    pins: dict[str, tuple[str, frozenset[str]]] = {}
    for line in text.replace("\\\n", " ").splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, separator, version = words[0].partition("==")
        hashes = [word.removeprefix("--hash=sha256:") for word in words[1:]]
        if not separator or not hashes or not all(re.fullmatch(r"[0-9a-f]{64}", item) for item in hashes):
            raise BundleError(
                f"{source.name} has the line {line.strip()[:80]!r}",
                "every Python package of an image is pinned to a version and to hashes of its files",
                "lock anew as locks/README.md says",
            )
        pins[normalised(name)] = (version, frozenset(hashes))
    return pins


def normalised(name: str) -> str:
    """Return the normalised form of a Python project name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _match_wheels(
    pins: Mapping[str, tuple[str, frozenset[str]]], folder: Path
) -> dict[str, tuple[Package, Path]]:
    """Return the wheels of `folder` whose hash is locked; remove all others."""
    found: dict[str, tuple[Package, Path]] = {}
    for path in sorted(folder.iterdir()):
        name = normalised(path.name.partition("-")[0])
        version, hashes = pins.get(name, ("", frozenset()))
        sha256 = oci.sha256_file(path) if path.suffix == ".whl" else ""
        if sha256 in hashes:
            found[name] = (Package(name, version, sha256), path)
        else:
            path.unlink()
    return found


def install_wheel(wheel: Path, target: Path, interpreter: str) -> None:
    """Unpack a wheel into `target`: packages in `site-packages`, programs in `bin`, the rest in `data`.

    Console scripts and scripts of the wheel start with `interpreter`. Signatures and hashes inside the wheel
    are not looked at: the file as a whole was compared with the lock.
    """
    with zipfile.ZipFile(wheel) as archive:
        scripts = ""
        for item in archive.infolist():
            if item.is_dir():
                continue
            data = archive.read(item)
            top, _, rest = item.filename.partition("/")
            executable = bool(item.external_attr >> 16 & 0o111)
            if top.endswith(".data"):
                scheme, _, inner = rest.partition("/")
                name = f"{_WHEEL_SCHEMES.get(scheme, 'data')}/{inner}"
                executable = executable or scheme == "scripts"
                if scheme == "scripts" and data.startswith(b"#!python"):
                    data = b"#!" + interpreter.encode() + data[data.index(b"\n") :]
            else:
                name = f"site-packages/{item.filename}"
                if rest == "entry_points.txt" and top.endswith(".dist-info"):
                    scripts = data.decode()
            _unpack(target, name, data, executable)
        for name, text in _console_scripts(scripts, interpreter):
            _unpack(target, f"bin/{name}", text.encode(), True)


def _unpack(target: Path, name: str, data: bytes, executable: bool) -> None:
    if posixpath.isabs(name) or ".." in name.split("/"):
        raise BundleError(
            f"a wheel holds the file {name!r}",
            "it would be written outside of the image",
            "do not use this package",
        )
    path = target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(0o755 if executable else 0o644)


def _console_scripts(text: str, interpreter: str) -> Iterator[tuple[str, str]]:
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    if not parser.has_section("console_scripts"):
        return
    for name, value in parser.items("console_scripts"):
        module, _, function = value.partition("[")[0].strip().partition(":")
        first = function.partition(".")[0]
        start = f"#!{interpreter}\nimport sys\n\nfrom {module} import {first}\n\n"
        yield name, start + f'if __name__ == "__main__":\n    sys.exit({function}())\n'


def _remove(recipe: Recipe, work: Path, pattern: str) -> None:
    matches = list(work.glob(pattern))
    if not matches:
        _bad_recipe(recipe.directory, f"removes {pattern}, which no package brings")
    for path in matches:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _member_of_wheels(recipe: Recipe, wheels: Mapping[str, tuple[Package, Path]], pattern: str) -> bytes:
    for _, path in wheels.values():
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if fnmatch.fnmatchcase(name, pattern):
                    return archive.read(name)
    _bad_recipe(recipe.directory, f"extracts {pattern}, which no package brings")


def _add_account(account: Account | None, tree: oci.Tree, base: Mapping[str, oci.Entry]) -> None:
    if account is None:
        return
    passwd = _base_text(base, "etc/passwd") or "root:x:0:0:root:/root:/bin/sh\n"
    group = _base_text(base, "etc/group") or "root:x:0:\n"
    line = f"{account.name}:x:{account.uid}:{account.gid}::{account.home}:{account.shell}\n"
    tree.data("etc/passwd", (passwd + line).encode())
    tree.data("etc/group", (group + f"{account.name}:x:{account.gid}:\n").encode())


def _base_text(base: Mapping[str, oci.Entry], path: str) -> str:
    entry = base.get(path)
    if entry is None or entry.open_data is None:
        return ""
    with entry.open_data() as stream:
        return stream.read().decode()


# Programs with binary output


def _run_bytes(argv: Sequence[str], stdin: bytes, timeout: float) -> bytes:
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, timeout=timeout, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise _program_fault(argv, str(error)) from error
    if done.returncode != 0:
        raise _program_fault(argv, done.stderr.decode(errors="replace"))
    return done.stdout


def _run_to_file(argv: Sequence[str], output: Any, timeout: float) -> None:
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE,
            timeout=timeout,
            check=False,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise _program_fault(argv, str(error)) from error
    if done.returncode != 0:
        raise _program_fault(argv, done.stderr.decode(errors="replace"))


def _program_fault(argv: Sequence[str], output: str) -> BundleError:
    program = next(word for word in argv if word not in ("sudo", "--", "env") and "=" not in word)
    tail = "\n    ".join(output.strip().splitlines()[-15:]) or "(nothing)"
    return BundleError(
        f"{program} failed",
        f"an image cannot be built; the last output was:\n    {tail}",
        f"install {program} if it is missing; otherwise correct the cause named above and run the command again",
    )
