"""The disk tier: hits after a restart, private files, damaged files, and deletion."""

import json
import os
import re
import shutil
import stat
from dataclasses import replace

import pytest
import torch

from labkit.cache.paged.cache import PagedCache
from labkit.cache.paged.pool import PagePool
from labkit.cache.prefix.disk import DiskTier, UntrustedFile, about, tensors_of
from labkit.cache.prefix.entry import Fingerprint
from labkit.cache.prefix.store import PrefixStore
from labkit.errors import BadRequest
from labkit.plan.kv import KVShape

posix = pytest.mark.skipif(os.name != "posix", reason="permissions and links as POSIX has them")
SHAPE = KVShape.uniform(2, 2, 8)
MODEL = Fingerprint("weights", ("adapter",), "formats", "settings")
TOKENS = [100, 200, 300, 400, 5, 6, 7, 8, 9, 10]
OTHER = [9, 9, 9, 9, 1]


def opened(folder, blocks=64, budget=2, kv_format=None, shape=SHAPE, **options):
    """Return a store with memory for one entry of TOKENS; the next entry sends it to disk."""
    pool = PagePool(shape, blocks, 4, kv_format=kv_format)
    disk = DiskTier(folder, options.pop("disk_bytes", None))
    return PrefixStore(pool, budget * pool.block_bytes, disk=disk, **options)


@pytest.fixture
def spilled(compute):
    def make(folder, **options):
        store = opened(folder, **options)
        compute(store.open("a", "read", MODEL), TOKENS, {"report": 5})
        compute(store.open("a", "read", MODEL), OTHER)
        assert store.counters.spilled == 1 and len(list(folder.iterdir())) == 1
        return store

    return make


def hit_length(store, tenant="a", scope="read", model=MODEL, tokens=TOKENS):
    lease = store.open(tenant, scope, model).lookup(tokens)
    length = lease.length
    lease.cache.rewind(0)
    return length


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "prefixes"


@pytest.mark.parametrize("kv_format", [None, "int8", "fp8"])
@pytest.mark.parametrize("restart", [False, True])
def test_prefixes_on_disk_hit_for_their_owner_and_miss_for_others(folder, restart, kv_format):
    store = opened(folder, kv_format=kv_format)
    view = store.open("a", "read", MODEL)
    lease = view.lookup(TOKENS)
    lease.cache.advance(8)
    for layer in range(2):
        keys = torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(layer))
        lease.cache.append(layer, keys, -keys)
    expected = lease.cache.dense(1)[0]
    view.keep(lease, lease.cache, 0, TOKENS)
    lease.cache.rewind(0)
    lease = view.lookup(OTHER)
    lease.cache.advance(4)
    view.keep(lease, lease.cache, 0, OTHER)
    lease.cache.rewind(0)
    assert store.counters.spilled == 1
    if restart:
        del store, view, lease
        store = opened(folder, kv_format=kv_format)
    assert (
        hit_length(store, tenant="b")
        == hit_length(store, scope="write")
        == hit_length(store, model=replace(MODEL, weights="X"))
        == 0
    )
    again = store.open("a", "read", MODEL).lookup(TOKENS)
    assert again.length == 8 and torch.equal(again.cache.dense(1)[0], expected)
    assert (store.counters.hits, store.counters.loaded) == (1, 1)


def test_tenant_scope_and_adapter_stay_separate_fields_on_disk(folder, compute):
    store = opened(folder)
    compute(store.open("X", "", replace(MODEL, adapters=())), TOKENS)
    compute(store.open("X", "", replace(MODEL, adapters=())), OTHER)
    store = opened(folder)
    assert (
        hit_length(store, "t", "", replace(MODEL, adapters=("X",)))
        == hit_length(store, "t", "X", replace(MODEL, adapters=()))
        == 0
    )
    assert hit_length(store, "X", "", replace(MODEL, adapters=())) == 8


def test_a_pool_of_another_format_does_not_find_the_prefixes(folder, spilled):
    spilled(folder)
    assert hit_length(opened(folder, kv_format="int8")) == 0
    assert hit_length(opened(folder)) == 8


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(
    "how", [{"tenant": "a"}, {"scope": "read"}, {"prefix": TOKENS[:3]}, "report"]
)
def test_forget_and_revoke_delete_files(folder, how, restart, spilled):
    store = spilled(folder)
    if restart:
        store = opened(folder)
    store.revoke(how) if how == "report" else store.forget(**how)
    assert list(folder.iterdir()) == []
    assert hit_length(store) == 0 and hit_length(opened(folder)) == 0


def test_a_document_named_later_is_known_after_a_restart(folder, compute, spilled):
    store = spilled(folder)
    compute(
        store.open("a", "read", MODEL), TOKENS, ["later"]
    )  # loaded, and now built on one more document
    compute(store.open("a", "read", MODEL), OTHER)
    store = opened(folder)
    assert (
        store.revoke("later") == 1 and hit_length(store) == 0 and len(list(folder.iterdir())) == 1
    )  # the file of the other entry


def test_every_entry_is_in_memory_or_on_disk(folder, compute):
    store = opened(folder, budget=5)
    view = store.open("a", "", MODEL)
    first, second = ([*TOKENS[:8], n, n, n, n, n] for n in (20, 30))
    for tokens in (first, second, OTHER, [8, 8, 8, 8, 1]):
        compute(view, tokens)
    assert store.counters.spilled == 1  # the first
    compute(
        view, [*second[:9], 99], ["late"]
    )  # shares a prefix with both; the document is new for the one on disk
    assert all(entry.pages or entry.file for entry in store.entries())
    assert hit_length(store, "a", "", tokens=first) == 8 and store.revoke("late") >= 1
    assert hit_length(opened(folder), "a", "", tokens=first) == 0


def test_files_expire_while_no_process_runs(folder, spilled):
    clock = lambda: time[0]  # noqa: E731
    time = [1000.0]
    spilled(folder, ttl_s=60, clock=clock)
    assert hit_length(opened(folder, ttl_s=60, clock=clock)) == 8
    time[0] += 60
    store = opened(folder, ttl_s=60, clock=clock)
    assert list(folder.iterdir()) == [] and store.counters.expired == 1


def test_the_disk_has_its_own_budget(folder, compute):
    store = opened(folder, disk_bytes=9000)
    view = store.open("a", "", MODEL)
    for first in range(20, 30):
        compute(view, [first, 2, 3, 4, 5, 6, 7, 8, 9])
    assert 0 < store.shelf.disk.nbytes() <= 9000
    assert sum(path.stat().st_size for path in folder.iterdir()) == store.shelf.disk.nbytes()
    assert view.lookup([20, 2, 3, 4, 5]).length == 0 and view.lookup([28, 2, 3, 4, 5]).length == 4


@posix
def test_folder_and_files_are_private_and_names_are_random(folder, spilled):
    spilled(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and len(path.stem) == 64
    shutil.rmtree(folder)
    spilled(folder)
    assert path.name not in {
        p.name for p in folder.iterdir()
    }  # equal content gets a new name each time


def damage(path, how):
    data = path.read_bytes()
    if how == "bit":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif how == "cut":
        path.write_bytes(data[:-10])
    elif how == "longer":
        path.write_bytes(data + b"0")
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "gone":
        path.unlink()
    elif how == "link":
        path.rename(path.parent.parent / "elsewhere")
        path.symlink_to(path.parent.parent / "elsewhere")
    elif how == "folder":
        path.unlink()
        path.mkdir()
    elif how == "open to others":
        path.chmod(0o644)
    elif how == "another's":  # well formed, but the content does not match the name
        end = 8 + int.from_bytes(data[:8], "little")
        path.write_bytes(
            data[:8] + re.sub(rb'(tenant[\\": ]+)a', rb"\1b", data[8:end]) + data[end:]
        )


HOW = ["bit", "cut", "longer", "empty", "gone", "link", "folder", "open to others", "another's"]


@posix
@pytest.mark.parametrize("how", HOW)
def test_a_changed_file_is_a_miss(folder, how, spilled):
    store = spilled(folder)
    (path,) = folder.iterdir()
    damage(path, how)
    with pytest.raises(BadRequest) as error:
        store.shelf.disk.read(path.name)
    assert "report" not in str(error.value)
    if how == "folder":
        return
    assert hit_length(store) == 0 and store.counters.untrusted == 1
    assert not os.path.lexists(path)  # the store could not forget it later
    assert hit_length(store, tokens=OTHER) == 4  # no other entry was lost
    assert (
        how != "link" or (folder.parent / "elsewhere").exists()
    )  # the target of a link is not deleted


@posix
@pytest.mark.parametrize("how", ["cut", "longer", "empty", "link", "folder", "open to others"])
def test_opening_a_store_over_damaged_files_raises(folder, how, spilled):
    spilled(folder)
    (path,) = folder.iterdir()
    damage(path, how)
    pool = PagePool(SHAPE, 8, 4)
    with pytest.raises(UntrustedFile):
        PrefixStore(pool, 10**6, disk=DiskTier(folder))
    assert (
        os.path.lexists(path) and pool.reclaim is None and not pool.wipe
    )  # the pool can be used again
    path.rmdir() if how == "folder" else path.unlink()
    assert PrefixStore(pool, 10**6, disk=DiskTier(folder)).entries() == []


@posix
def test_foreign_files_links_and_open_folders_raise(folder, tmp_path):
    folder.mkdir(mode=0o700)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UntrustedFile, match="notes.txt"):
        opened(folder)
    assert (folder / "notes.txt").read_text() == "mine"
    (folder / "notes.txt").rename(folder / ("0" * 64 + ".safetensors"))
    with pytest.raises(UntrustedFile):
        opened(folder)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(UntrustedFile, match="symbolic link"):
        DiskTier(tmp_path / "link")
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(UntrustedFile, match="chmod 700"):
        DiskTier(tmp_path / "open")


@pytest.mark.parametrize(
    "shape", [KVShape.uniform(1, 2, 8), KVShape.uniform(2, 1, 8), KVShape.uniform(2, 2, 4)]
)
def test_tensors_of_other_shapes_are_a_miss(folder, shape, spilled):
    store, other = spilled(folder), opened(folder.with_name("other"), shape=shape)
    entry = next(entry for entry in store.entries() if entry.file)
    foreign = PagedCache.over(other.pool)
    foreign.advance(8)
    twin = replace(entry, pages=foreign)
    store.shelf.disk.delete(entry.file)
    entry.file = store.shelf.disk.write(
        about(entry), tensors_of(twin)
    )  # a valid file with the right header
    assert hit_length(store) == 0 and store.counters.untrusted == 1 and store.pool.owned == 1


def test_names_with_a_path_raise(folder, tmp_path):
    disk = DiskTier(folder)
    for name in ("../secret", "/etc/passwd", "x", "." * 64):
        with pytest.raises(UntrustedFile):
            disk.read(name)


def test_unfinished_files_are_deleted(folder, monkeypatch, compute):
    store = opened(folder)
    compute(store.open("a", "read", MODEL), TOKENS)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    compute(store.open("a", "read", MODEL), OTHER)
    assert (
        store.counters.lost == 1
        and list(folder.iterdir()) == []
        and hit_length(store, tokens=OTHER) == 4
    )
    (folder / (".writing-" + "0" * 32)).write_bytes(b"half")
    opened(folder)
    assert list(folder.iterdir()) == []


def test_a_file_that_cannot_be_deleted_raises_and_is_never_found(folder, monkeypatch, spilled):
    store = spilled(folder)
    monkeypatch.setattr(DiskTier, "delete", lambda *_: (_ for _ in ()).throw(PermissionError()))
    with pytest.raises(BadRequest, match="could not be deleted"):
        store.forget(tenant="a")
    assert hit_length(store) == 0 and store.entries() == []


def test_a_file_without_a_valid_header_raises(folder):
    disk = DiskTier(folder)
    disk.write({"identity": json.dumps({"tenant": "a"})}, {})
    with pytest.raises(UntrustedFile, match="no valid header"):
        opened(folder)
