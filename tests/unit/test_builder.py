"""Recipes, requirement files and wheels of the images, and what the images' own programs do."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from bundle import builder, lock, oci
from bundle.errors import BundleError

ROOT = Path(__file__).resolve().parents[2]
IMAGES = (*builder.IMAGE_NAMES, "registry")
USERS = {
    "postgres": "999:999",
    "hindsight": "1000:1000",
    "router": "10001:10001",
    "edge": "10002:10002",
    "embeddings": "10003:10003",
}
ROUTER_ENTRY = ROOT / "images" / "router" / "memory-router.py"


def test_every_locked_image_has_a_recipe() -> None:
    assert set(builder.IMAGE_NAMES) == set(lock.FACT_TYPES) == set(USERS)


@pytest.mark.parametrize("name", IMAGES)
def test_recipes_are_complete(name: str) -> None:
    recipe = builder.load_recipe(ROOT, name)
    assert recipe.config is not None
    assert recipe.title
    assert recipe.licenses
    assert recipe.source.startswith("https://")
    assert "{" in recipe.version
    assert "{" in recipe.tag
    for placed in recipe.files:
        assert (recipe.directory / placed.source).is_file()
    if recipe.base:
        assert builder.load_recipe(ROOT, recipe.base).debian is not None


@pytest.mark.parametrize(("name", "user"), USERS.items())
def test_images_run_as_their_fixed_user(name: str, user: str) -> None:
    recipe = builder.load_recipe(ROOT, name)
    assert recipe.config is not None
    assert recipe.config.user == user
    if recipe.account is not None:
        assert f"{recipe.account.uid}:{recipe.account.gid}" == user
    assert recipe.probe is not None
    assert (recipe.directory / recipe.probe.script).is_file()


@pytest.mark.parametrize("name", IMAGES)
def test_volumes_belong_to_the_user_of_the_image(name: str) -> None:
    recipe = builder.load_recipe(ROOT, name)
    assert recipe.config is not None
    places = {placed.path: f"{placed.uid}:{placed.gid}" for placed in recipe.directories}
    for volume in recipe.config.volumes:
        assert places[volume] == recipe.config.user


def copy_of_repository(target: Path) -> Path:
    for name in ("images", "locks"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    return target


@pytest.mark.parametrize(
    "changed",
    [
        "images/router/recipe.json",
        "images/router/memory-router.py",
        "images/python/recipe.json",
        "images/python/compile.py",
        "locks/router-requirements.txt",
    ],
)
def test_the_recipe_hash_covers_everything_that_goes_in(tmp_path: Path, changed: str) -> None:
    root = copy_of_repository(tmp_path)
    before = builder.load_recipe(root, "router").sha256
    assert before == builder.load_recipe(ROOT, "router").sha256
    edge = builder.load_recipe(root, "edge").sha256
    with (root / changed).open("a") as file:
        file.write("\n")
    assert builder.load_recipe(root, "router").sha256 != before
    if changed != "images/python/compile.py":
        assert builder.load_recipe(root, "edge").sha256 == edge


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ('{"title": "x", "colour": 1}', "unknown key 'colour'"),
        ('{"title": "x"}', "needs either a base or Debian packages"),
        ('{"title": "x", "base": "python", "debian": {"suite": "x", "include": []}}', "needs either"),
        ('{"title": "x", "base": "python", "files": [{"path": "/x", "mode": "rwx"}]}', "is wrong"),
        ('{"title": "x", "base": "python", "config": {"user": "1", "command": []}}', "is wrong"),
    ],
)
def test_a_wrong_recipe_is_refused(tmp_path: Path, text: str, message: str) -> None:
    root = copy_of_repository(tmp_path)
    (root / "images" / "router" / "recipe.json").write_text(text)
    with pytest.raises(BundleError, match=message):
        builder.load_recipe(root, "router")


@pytest.mark.parametrize("name", IMAGES)
def test_requirement_files_pin_hashes_and_name_no_place(name: str) -> None:
    recipe = builder.load_recipe(ROOT, name)
    if recipe.pypi is None:
        return
    file = ROOT / "locks" / recipe.pypi.requirements
    text = file.read_text()
    assert builder.parse_requirements(text, file)
    for word in ("--index", "--extra-index", "--find-links", "file:", "http:", "https:", " @ "):
        assert word not in text


def test_the_image_leaves_out_what_its_server_does_not_need() -> None:
    file = ROOT / "locks" / "hindsight-requirements.txt"
    pins = builder.parse_requirements(file.read_text(), file)
    assert pins["hindsight-api-slim"][0] == "1.1.0"
    assert not {"claude-agent-sdk", "github-copilot-sdk"} & set(pins)


def test_requirements_are_parsed() -> None:
    first, second = "a" * 64, "b" * 64
    text = f"# comment\nPy_YAML.x==1.0 \\\n    --hash=sha256:{first} \\\n    --hash=sha256:{second}\n    # via y\n"
    assert builder.parse_requirements(text, Path("x")) == {"py-yaml-x": ("1.0", frozenset({first, second}))}


@pytest.mark.parametrize(
    "line",
    ["x==1.0", "x>=1.0 --hash=sha256:" + "a" * 64, "x==1 --hash=md5:0", "--index-url https://x", "-e ."],
)
def test_an_unlocked_requirement_is_refused(line: str) -> None:
    with pytest.raises(BundleError, match=re.escape(line[:20])):
        builder.parse_requirements(line, Path("x"))


@pytest.mark.parametrize(
    ("version", "upstream"),
    [
        ("17.12-0+deb13u1", "17.12"),
        ("0.8.0-1", "0.8.0"),
        ("2.8.3+ds1-2", "2.8.3"),
        ("1:9.18.1~rc1-1", "9.18.1"),
        ("20250419", "20250419"),
    ],
)
def test_upstream_version(version: str, upstream: str) -> None:
    assert builder.upstream_version(version) == upstream


def wheel(path: Path, files: Mapping[str, str], executable: str = "") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            item = zipfile.ZipInfo(name)
            item.external_attr = (0o755 if name == executable else 0o644) << 16
            archive.writestr(item, text)
    return path


def test_a_wheel_is_installed_for_the_interpreter_of_the_image(tmp_path: Path) -> None:
    entry_points = "[console_scripts]\nTool = pkg.cli:app.main [extra]\n\n[other]\nx = y\n"
    file = wheel(
        tmp_path / "pkg-1.0-py3-none-any.whl",
        {
            "pkg/__init__.py": "",
            "pkg/run.sh": "",
            "pkg-1.0.dist-info/entry_points.txt": entry_points,
            "pkg-1.0.data/scripts/old": "#!python\nprint()\n",
            "pkg-1.0.data/purelib/extra.py": "",
            "pkg-1.0.data/data/share/x": "",
        },
        executable="pkg/run.sh",
    )
    target = tmp_path / "target"
    builder.install_wheel(file, target, "/app/bin/python")
    assert (target / "bin" / "Tool").read_text() == (
        "#!/app/bin/python\nimport sys\n\nfrom pkg.cli import app\n\n"
        'if __name__ == "__main__":\n    sys.exit(app.main())\n'
    )
    assert (target / "bin" / "old").read_text() == "#!/app/bin/python\nprint()\n"
    modes = {path.name: path.stat().st_mode & 0o777 for path in target.rglob("*") if path.is_file()}
    assert modes["Tool"] == modes["old"] == modes["run.sh"] == 0o755
    assert modes["__init__.py"] == modes["extra.py"] == 0o644
    assert (target / "site-packages" / "extra.py").is_file()
    assert (target / "data" / "share" / "x").is_file()


@pytest.mark.parametrize("name", ["../evil.py", "pkg/../../evil.py", "x-1.data/purelib/../../evil.py"])
def test_a_wheel_that_writes_outside_is_refused(tmp_path: Path, name: str) -> None:
    file = wheel(tmp_path / "evil-1-py3-none-any.whl", {name: ""})
    with pytest.raises(BundleError, match="a wheel holds the file"):
        builder.install_wheel(file, tmp_path / "target", "/usr/bin/python3")
    assert not list(tmp_path.rglob("evil.py"))


def test_the_byte_code_of_an_image_does_not_depend_on_times(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "good.py").write_text("X = {1, 2, 3}\n")
    (tmp_path / "pkg" / "other.py").write_text("Y = 1\n")
    (tmp_path / "pkg" / "bad.py").write_text("print 'old'\n")
    command = [sys.executable, "-s", str(ROOT / "images" / "python" / "compile.py"), str(tmp_path / "pkg")]
    outputs = []
    for mtime in (1000, 2000):
        os.utime(tmp_path / "pkg" / "good.py", (mtime, mtime))
        environment = {"PATH": os.environ["PATH"], "PYTHONHASHSEED": "0"}
        outputs.append(subprocess.run(command, check=True, capture_output=True, env=environment).stdout)
    assert outputs[0] == outputs[1]
    assert b"good.cpython" in outputs[0]
    assert b"bad.cpython" not in outputs[0]
    assert not list(tmp_path.rglob("*.pyc"))


def run_router(directory: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "MEMORY_ROUTER_SECRETS": str(directory)}
    argv = [sys.executable, "-I", str(ROUTER_ENTRY), *command]
    return subprocess.run(argv, capture_output=True, text=True, env=environment, check=False, timeout=30)


def test_the_router_entry_reads_secrets_and_starts_the_program(tmp_path: Path) -> None:
    (tmp_path / "ROUTER_TOKEN").write_text("to ken\n")
    (tmp_path / "OTHER_1").write_text("x")
    (tmp_path / "readme.txt").write_text("")
    (tmp_path / "lower").write_text("x")
    (tmp_path / "DIRECTORY.d").mkdir()
    done = run_router(tmp_path, "env", "-0")
    assert done.returncode == 0, done.stderr
    found = dict(item.split("=", 1) for item in done.stdout.split("\0") if item)
    assert found["ROUTER_TOKEN"] == "to ken"
    assert found["OTHER_1"] == "x"
    assert "lower" not in found


def test_the_router_entry_needs_no_directory(tmp_path: Path) -> None:
    assert run_router(tmp_path / "absent", "echo", "hello").stdout == "hello\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"a\n\n", "control character"),
        (b"a\r\n", "control character"),
        (b"a\x00b", "control character"),
        ("p\u00e4ss".encode(), "outside ASCII"),
        (b"x" * 65537, "larger than"),
    ],
)
def test_the_router_entry_refuses_what_cannot_be_a_secret(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "TOKEN").write_bytes(content)
    done = run_router(tmp_path, "env")
    assert done.returncode == 78
    assert message in done.stderr
    assert done.stdout == ""


def test_the_router_entry_refuses_a_link_and_a_directory(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("x")
    (tmp_path / "TOKEN").symlink_to("elsewhere")
    assert "not a regular file" in run_router(tmp_path, "env").stderr
    (tmp_path / "TOKEN").unlink()
    (tmp_path / "TOKEN").mkdir()
    assert run_router(tmp_path, "env").returncode == 78


def test_the_router_entry_names_a_program_that_is_missing(tmp_path: Path) -> None:
    done = run_router(tmp_path, "no-such-program")
    assert done.returncode == 78
    assert "no-such-program cannot be started" in done.stderr
    assert run_router(tmp_path).returncode == 78


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> builder.Workshop:
    """A workshop whose Debian packages and wheels are made up and which starts no container."""
    platform = oci.Platform("linux", "amd64")
    monkeypatch.setattr(builder, "platform_of_controller", lambda: platform)
    root = copy_of_repository(tmp_path / "repository")
    made = make_workshop(root, tmp_path / "state", monkeypatch)
    assert made.platform == platform
    return made


def make_workshop(
    root: Path, state: Path, monkeypatch: pytest.MonkeyPatch, *, refresh: bool = False, compress: bool = False
) -> builder.Workshop:
    lines: list[str] = []
    made = builder.Workshop(root, state, "unit", lines.append, refresh=refresh, compress=compress)

    def mmdebstrap(_debian: builder.DebianPart, output: Path, work: Path) -> None:
        packages = work / "packages"
        name = "docker-registry"
        packages.write_text(
            f"Package: {name}\nVersion: 2.8.3+ds1-2\nSHA256: {hashlib.sha256().hexdigest()}\n\n"
        )
        passwd = work / "passwd"
        passwd.write_text("root:x:0:0:root:/root:/bin/sh\n")
        with tarfile.open(output, "w") as archive:
            archive.add(packages, "./.package-list")
            archive.add(passwd, "./etc/passwd")
            archive.add(passwd, "./etc/passwd-")
            archive.add(passwd, "./var/log/dpkg.log")

    monkeypatch.setattr(made, "_mmdebstrap", mmdebstrap)
    return made


def test_an_image_is_built_once_and_then_taken_from_the_cache(
    workshop: builder.Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = workshop.build("registry")
    assert built.tag == "2.8.3"
    assert [(package.name, package.version) for package in built.debian] == [
        ("docker-registry", "2.8.3+ds1-2")
    ]
    again = make_workshop(workshop.root, tmp_path / "state", monkeypatch)
    monkeypatch.setattr(again, "_build_rootfs", lambda _recipe: pytest.fail("nothing has changed"))
    assert again.is_built(again.recipe("registry"))
    assert again.build("registry") == built


def test_a_changed_file_makes_another_image_on_the_same_base(workshop: builder.Workshop) -> None:
    first = workshop.build("registry").image
    with (workshop.root / "images" / "registry" / "config.yml").open("a") as file:
        file.write("# more\n")
    second = workshop.build("registry").image
    assert second.index != first.index
    assert second.layers[0] == first.layers[0]


def test_the_second_build_from_nothing_gives_the_same_digests(
    workshop: builder.Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = workshop.build("registry")
    other = make_workshop(workshop.root, tmp_path / "other", monkeypatch)
    assert other.build("registry").image == first.image
    refreshed = make_workshop(workshop.root, tmp_path / "state", monkeypatch, refresh=True)
    assert not refreshed.is_built(refreshed.recipe("registry"))
    assert refreshed.build("registry").image == first.image


def test_an_image_has_labels_and_no_leftovers(workshop: builder.Workshop) -> None:
    built = workshop.build("registry")
    config = json.loads(workshop.store.read(built.image.config.digest))
    labels = config["config"]["Labels"]
    assert labels["org.opencontainers.image.version"] == "2.8.3"
    assert labels["org.opencontainers.image.revision"] == built.recipe.sha256
    assert {"title", "source", "licenses"} <= {name.rpartition(".")[2] for name in labels}
    entries = oci.read_entries(workshop.store.path(built.image.layers[0].blob.digest))
    assert "etc/passwd" in entries
    assert not {"etc/passwd-", "var/log/dpkg.log", ".package-list"} & set(entries)


def test_pruning_keeps_what_the_recipes_lead_to(workshop: builder.Workshop) -> None:
    old = workshop.build("registry")
    with (workshop.root / "images" / "registry" / "config.yml").open("a") as file:
        file.write("# more\n")
    new = workshop.build("registry")
    workshop.prune()
    assert workshop.store.has(new.image.index)
    assert workshop.store.has(new.image.layers[0].blob)
    assert not workshop.store.has(old.image.index)
    assert workshop.is_built(workshop.recipe("registry"))


def test_pruning_spares_the_other_compression(
    workshop: builder.Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = workshop.build("registry")
    packing = make_workshop(workshop.root, tmp_path / "state", monkeypatch, compress=True)
    packed = packing.build("registry")
    assert packed.image.layers[0].diff_id == plain.image.layers[0].diff_id
    assert packed.image.index != plain.image.index
    packing.prune()
    assert workshop.is_built(plain.recipe)
    assert packing.is_built(packed.recipe)


def test_images_are_built_for_known_architectures_only(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = subprocess.CompletedProcess(["dpkg"], 0, "riscv64\n", "")
    monkeypatch.setattr(builder, "run", lambda *_arguments, **_options: answer)
    with pytest.raises(BundleError, match="cannot be built on a riscv64 machine"):
        builder.platform_of_controller()


def test_facts_that_are_not_exactly_those_of_the_lock_are_refused() -> None:
    recipe = builder.load_recipe(ROOT, "edge")
    good = '{"uid": 10002, "gid": 10002, "caddy_version": "2.11.7"}'
    assert builder._checked_facts(recipe, good)["caddy_version"] == "2.11.7"
    for text in ("", "[]", '{"uid": 1}', good.replace('"2.11.7"', "2"), good.replace("}", ', "x": 1}')):
        with pytest.raises(BundleError, match="did not tell its facts"):
            builder._checked_facts(recipe, text)
