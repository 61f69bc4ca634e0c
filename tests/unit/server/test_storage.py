"""Folders of weights, links to them, and when they go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from server.app import tokenizer_id
from server.checkpoints.downloads import Downloads, load_secret
from server.checkpoints.service import RETIREMENT_S, Checkpoints
from server.checkpoints.storage import Storage
from server.core.errors import NotFound
from server.store.database import Database
from tests.databases import Clock


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(tmp_path / "weights")


def written(storage: Storage) -> str:
    folder = storage.new()
    path = Path(storage.path(folder))
    path.mkdir()
    (path / "weights").write_text("numbers")
    return folder


def test_a_copy_shares_its_bytes_and_outlives_the_original(storage: Storage):
    folder = written(storage)
    copy = storage.copy(folder)
    files = [Path(storage.path(one)) / "weights" for one in (folder, copy)]
    assert files[0].samefile(files[1])
    storage.remove(folder)
    assert files[1].read_text() == "numbers"


def test_removing_what_is_gone_is_fine(storage: Storage):
    folder = written(storage)
    for _ in range(2):
        storage.remove(folder)
    storage.remove(None)
    assert not storage.exists(folder)


def test_orphans_go_at_the_start_and_all_else_stays(storage: Storage):
    assert storage.remove_all_but(set()) == 0
    kept, orphan = written(storage), written(storage)
    (storage.root / "half.tmp").write_text("")
    assert storage.remove_all_but({kept}) == 2
    assert storage.exists(kept)
    assert not storage.exists(orphan)


async def test_a_retired_folder_goes_after_a_while_unless_it_is_read(
    db: Database, storage: Storage, clock: Clock
):
    checkpoints = Checkpoints(db, storage, clock)
    read, unread = written(storage), written(storage)
    for folder in (read, unread, None):
        checkpoints.retire(folder)
    assert await checkpoints.remove_retired(set()) == 0

    clock.now += RETIREMENT_S
    assert await checkpoints.remove_retired({storage.path(read)}) == 1
    assert (storage.exists(read), storage.exists(unread)) == (True, False)
    assert await checkpoints.remove_retired(set()) == 1
    assert not storage.exists(read)


def test_the_secret_is_made_once_and_is_its_owners_alone(tmp_path: Path):
    path = tmp_path / "download.key"
    secret = load_secret(path)
    assert load_secret(path) == secret
    assert len(secret) == 32
    assert path.stat().st_mode & 0o077 == 0
    assert os.listdir(tmp_path) == ["download.key"]


@pytest.mark.parametrize("half", [b"", b"short"])
def test_half_a_secret_of_a_crash_is_no_secret(tmp_path: Path, half: bytes):
    path = tmp_path / "download.key"
    path.write_bytes(half)
    (tmp_path / "download.key.part").write_bytes(half)
    assert len(load_secret(path)) == 32


def test_a_link_opens_its_file_until_it_expires_and_no_other(storage: Storage):
    clock = Clock()
    downloads = Downloads(storage, b"x" * 32, clock)
    folder = written(storage)
    expires = int(clock()) + 10
    signature = downloads._sign(folder, "weights", expires)
    assert downloads.open(folder, "weights", expires, signature).read_text() == "numbers"
    for wrong in (
        (folder, "other", expires, signature),
        ("other", "weights", expires, signature),
        (folder, "weights", expires + 1, signature),
        (folder, "weights", expires, "ä\ud800"),
        (folder, "weights", expires, ""),
    ):
        with pytest.raises(NotFound):
            downloads.open(*wrong)
    clock.now += 11
    with pytest.raises(NotFound):
        downloads.open(folder, "weights", expires, signature)


@pytest.mark.parametrize(
    ("path", "name"), [("/models/tiny", "//models/tiny"), ("/a/b/c", "/a/b/c"), ("/a", "/a")]
)
def test_a_tokenizer_is_named_so_that_the_sdk_leaves_it_whole(path: str, name: str):
    assert tokenizer_id(Path(path)) == name
    assert Path(name).resolve() == Path(path)
