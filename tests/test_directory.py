"""The directory of a pool: its description, its lock, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mmkv
from mmkv import directory
from mmkv.geometry import choose_geometry
from tests.computed import HYBRID, UNIFORM


@pytest.fixture
def described(tmp_path: Path) -> Path:
    directory.write_description(tmp_path, directory.describe(HYBRID, choose_geometry(HYBRID, 1 << 20)))
    return tmp_path


def edit(path: Path, **values: Any) -> None:
    file = path / "pool.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_description_is_there_again(described: Path) -> None:
    found = directory.read_description(described)
    assert found.layout == HYBRID
    assert found.geometry == choose_geometry(HYBRID, 1 << 20)
    assert (described / "pool.json").stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in described.iterdir()] == ["pool.json"], "no partial file is left"


def test_pools_have_uuids_of_their_own() -> None:
    geometry = choose_geometry(UNIFORM, 1 << 20)
    assert directory.describe(UNIFORM, geometry).uuid != directory.describe(UNIFORM, geometry).uuid


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"format": 2}, "format is 2, newer than 1"),
        ({"format": "1"}, "format is '1'"),
        ({"format": 0}, "format is 0"),
        ({"format": True}, "format is True"),
        ({"uuid": 5}, "uuid is 5"),
        ({"fingerprint": "0" * 64}, "fingerprint is not that of its layout"),
        ({"layout": []}, "not a layout"),
        ({"layout": None}, "not a layout"),
        ({"sizes": {}}, "sizes must be integers"),
        ({"sizes": None}, "sizes must be integers"),
    ],
)
def test_a_damaged_description_says_what_is_wrong(described: Path, values: dict[str, Any], text: str) -> None:
    edit(described, **values)
    with pytest.raises(mmkv.PoolCorrupt, match=text):
        directory.read_description(described)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, "\xff\xfe", '{"format": 1e999}'])
def test_text_that_is_no_description_is_refused(described: Path, text: str) -> None:
    (described / "pool.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(mmkv.PoolCorrupt, match=r"pool\.json is damaged"):
        directory.read_description(described)


@pytest.mark.parametrize("cut", [1, 10, 100])
def test_a_description_that_was_cut_is_refused(described: Path, cut: int) -> None:
    file = described / "pool.json"
    os.truncate(file, file.stat().st_size - cut)
    with pytest.raises(mmkv.PoolCorrupt, match="is damaged"):
        directory.read_description(described)


def test_a_description_that_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pool.json")
    with pytest.raises(mmkv.PoolCorrupt, match="not a plain file"):
        directory.read_description(tmp_path)


def test_a_link_in_the_place_of_the_description_is_refused(described: Path) -> None:
    (described / "pool.json").rename(described / "elsewhere")
    (described / "pool.json").symlink_to("elsewhere")
    with pytest.raises(mmkv.PoolCorrupt, match="cannot be read"):
        directory.read_description(described)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (mmkv.Layout(HYBRID.layers, "other"), "of the model 'hybrid', not 'other'"),
        (mmkv.Layout(HYBRID.layers[:2], "hybrid"), "has 4 layers, not 2"),
        (
            mmkv.Layout([mmkv.Layer({"k": mmkv.Plane("int8", (8,))}), *HYBRID.layers[1:]], "hybrid"),
            "layer 0, plane 'k'",
        ),
        (
            mmkv.Layout([mmkv.Layer(dict(reversed(HYBRID.layers[0].planes.items()))), *HYBRID.layers[1:]], "hybrid"),
            "layer 0: its planes come in the order",
        ),
    ],
)
def test_another_layout_is_named_by_what_differs(given: mmkv.Layout, text: str) -> None:
    directory.require_layout(Path("p"), HYBRID, HYBRID)
    with pytest.raises(mmkv.LayoutMismatch, match=text):
        directory.require_layout(Path("p"), HYBRID, given)


def test_a_new_directory_is_its_users_alone(tmp_path: Path) -> None:
    directory.prepare(tmp_path / "a" / "b", create=True)
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_directory_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ValueError, match=f"can be written by others .mode {mode:04o}.*run chmod 700"):
        directory.prepare(tmp_path, create=True)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is not a directory"):
        directory.prepare(tmp_path / "file", create=True)
    with pytest.raises(mmkv.MmkvError, match="cannot be made: Not a directory"):
        directory.prepare(tmp_path / "file" / "below", create=True)


def test_the_lock_is_for_one_and_tells_by_whom_it_is_held(tmp_path: Path) -> None:
    lock = directory.OwnerLock(tmp_path)
    with pytest.raises(mmkv.PoolLocked, match=f"owned by process {os.getpid()}") as caught:
        directory.OwnerLock(tmp_path)
    assert caught.value.pid == os.getpid()
    assert directory.owner_pid(tmp_path) == os.getpid()
    lock.release()
    assert directory.owner_pid(tmp_path) is None
    directory.OwnerLock(tmp_path).release()


def test_the_lock_ends_with_the_process(tmp_path: Path) -> None:
    code = (
        f"import mmkv.directory as d, pathlib; lock = d.OwnerLock(pathlib.Path({str(tmp_path)!r})); print('x'); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(mmkv.PoolLocked) as caught:
            directory.OwnerLock(tmp_path)
        assert caught.value.pid == other.pid
        other.kill()
    directory.OwnerLock(tmp_path).release()
