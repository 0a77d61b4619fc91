"""How much memory there is: the machine's, or what the control groups of a service or a container leave."""

from pathlib import Path

import pytest

from everwarm.weights.memory import available_bytes

MEGABYTE = 1 << 20


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 9999999 kB\nMemAvailable: 8192000 kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def limited(directory: str, limit: str, used: int, cached: int = 0) -> dict[str, str]:
    """A group of the second version."""
    return {
        f"{directory}memory.max": limit,
        f"{directory}memory.current": str(used * MEGABYTE),
        f"{directory}memory.stat": f"anon 5\ninactive_file {cached * MEGABYTE}\nactive_file 0\n",
    }


V1 = {
    "memory/box/memory.limit_in_bytes": str(600 * MEGABYTE),
    "memory/box/memory.usage_in_bytes": str(500 * MEGABYTE),
    "memory/box/memory.stat": f"total_inactive_file {300 * MEGABYTE}\ntotal_active_file {100 * MEGABYTE}\n",
}


@pytest.mark.parametrize(
    ("groups", "files", "megabytes"),
    [
        ("", {}, 8000),
        ("0::/\n", limited("", "max\n", 100), 8000),
        ("0::/\n", limited("", str(1000 * MEGABYTE), 100), 900),  # a container
        ("0::/\n", limited("", str(1000 * MEGABYTE), 900, cached=800), 900),  # files' pages make room
        ("0::/a/b\n", limited("a/b/", str(700 * MEGABYTE), 100), 600),  # a service
        ("0::/a/b\n", limited("a/", str(300 * MEGABYTE), 100) | limited("a/b/", "max", 50), 200),  # its slice
        ("0::/a\n", limited("a/", str(100 * MEGABYTE), 200), 0),
        ("0::/gone\n", limited("", str(1000 * MEGABYTE), 100), 900),  # the path of another namespace
        ("4:cpu:/box\n3:memory:/box\n0::/\n", V1, 500),
    ],
)
def test_available_memory(tmp_path: Path, groups: str, files: dict[str, str], megabytes: int) -> None:
    assert available_bytes(machine(tmp_path, groups, files)) == megabytes * MEGABYTE


def test_this_machine_has_some() -> None:
    assert available_bytes() > 0
