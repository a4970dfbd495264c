"""What a directory lies on, and how much memory may still be taken."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mmkv import medium as module
from mmkv.medium import Medium, available_ram, boot_id, medium_of

MOUNTS = r"""
23 1 253:0 / / rw,relatime - ext4 /dev/vda rw,discard
31 23 0:28 / {base}/shm rw,nosuid - tmpfs tmpfs rw,size=1024k,huge=always
32 23 0:29 / {base}/with\040space rw - tmpfs none rw
33 23 0:30 / {base}/huge rw - hugetlbfs none rw,pagesize=2M
34 23 0:31 / {base}/net ro - nfs4 server:/x ro
35 23 0:32 / {base}/net/inner rw - fuse.sshfs x rw
36 23 0:33 / {base}/shm rw - ramfs again rw
broken line
"""


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("shm", "with space", "huge", "net/inner"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(MOUNTS.format(base=tmp_path))
    monkeypatch.setattr(module, "_PROC", tmp_path / "proc")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "fs_type", "in_ram", "shared"),
    [
        ("shm", "ramfs", True, False),
        ("with space", "tmpfs", True, False),
        ("huge", "hugetlbfs", True, False),
        ("net", "nfs4", False, True),
        ("net/inner/not/there/yet", "fuse.sshfs", False, True),
        ("elsewhere", "ext4", False, False),
    ],
)
def test_the_longest_and_last_mount_point_counts(
    proc: Path, name: str, fs_type: str, in_ram: bool, shared: bool
) -> None:
    found = medium_of(proc / name)
    assert (found.fs_type, found.in_ram, found.shared) == (fs_type, in_ram, shared)
    assert found.path.exists()


def test_a_name_that_only_starts_alike_is_not_within(proc: Path) -> None:
    (proc / "shm2").mkdir()
    assert medium_of(proc / "shm2").fs_type == "ext4"


def test_options(proc: Path) -> None:
    (proc / "proc/self/mountinfo").write_text(MOUNTS.format(base=proc).replace("ramfs again", "tmpfs again"))
    assert medium_of(proc / "shm").huge == "never"
    (proc / "proc/self/mountinfo").write_text("\n".join(MOUNTS.format(base=proc).splitlines()[:3]))
    assert medium_of(proc / "shm").huge == "always"
    assert medium_of(proc / "net").huge is None
    assert not medium_of(proc / "shm").readonly


def test_without_mountinfo_the_type_is_unknown(proc: Path) -> None:
    (proc / "proc/self/mountinfo").unlink()
    found = medium_of(proc / "shm")
    assert found.fs_type == "unknown"
    assert not found.in_ram


def test_free_bytes_are_what_the_file_system_says(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    assert abs(medium_of(tmp_path).free_bytes() - status.f_bavail * status.f_frsize) < 1 << 30


def test_a_file_system_in_ram_without_a_limit_has_the_free_memory() -> None:
    assert Medium(Path("/proc"), "ramfs", Path("/proc"), (), 4096).free_bytes() > 0
    assert Medium(Path("/proc"), "proc", Path("/proc"), (), 4096).free_bytes() == 0


def test_free_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hugepages-2048kB").mkdir()
    (tmp_path / "hugepages-2048kB/free_hugepages").write_text("3\n")
    monkeypatch.setattr(module, "_HUGE_PAGES", tmp_path)
    assert Medium(Path("/proc"), "hugetlbfs", Path("/proc"), (), 2 << 20).free_bytes() == 6 << 20


def test_this_boot() -> None:
    assert boot_id() == boot_id()
    assert boot_id()


def write_memory(proc: Path, mem_available_kb: int, cgroup: str) -> None:
    (proc / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {mem_available_kb} kB\nHugetlb: 0 kB\n")
    (proc / "proc/self/cgroup").write_text(cgroup)


def test_available_ram_of_the_machine(proc: Path) -> None:
    write_memory(proc, 1000, "0::/\n")
    assert available_ram() == 1000 * 1024


def test_available_ram_within_cgroups_of_version_2(proc: Path) -> None:
    root = proc / "cgroup"
    (root / "outer/inner").mkdir(parents=True)
    (proc / "proc/self/mountinfo").write_text(f"40 23 0:40 / {root} rw - cgroup2 cgroup2 rw\n")
    write_memory(proc, 1 << 30, "0::/outer/inner\n")
    (root / "outer/memory.max").write_text("10000\n")
    (root / "outer/memory.current").write_text("7000\n")
    (root / "outer/memory.stat").write_text("anon 5\ninactive_file 500\n")
    (root / "outer/inner/memory.max").write_text("max\n")
    (root / "outer/inner/memory.current").write_text("7000\n")
    assert available_ram() == 3500
    (root / "outer/inner/memory.max").write_text("7100\n")
    assert available_ram() == 100
    (root / "outer/inner/memory.max").write_text("1\n")
    assert available_ram() == 0


def test_available_ram_within_a_container_of_version_1(proc: Path) -> None:
    root = proc / "cgroup"
    (root / "job").mkdir(parents=True)
    (proc / "proc/self/mountinfo").write_text(f"41 23 0:41 /docker/abc {root} rw - cgroup cgroup rw,memory\n")
    write_memory(proc, 1 << 30, "5:cpu:/x\n4:memory:/docker/abc/job\n0::/\n")
    (root / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (root / "memory.usage_in_bytes").write_text("5\n")
    (root / "job/memory.limit_in_bytes").write_text("5000\n")
    (root / "job/memory.usage_in_bytes").write_text("4000\n")
    (root / "job/memory.stat").write_text("total_inactive_file 10\n")
    assert available_ram() == 1010
