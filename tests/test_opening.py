"""Only regular files are opened, and opening waits for nobody."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from everwarm.opening import create_new, open_regular, read_whole


def link(path: Path) -> None:
    path.with_name("target").write_bytes(b"secret")
    path.symlink_to(path.with_name("target"))


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "link": (link, "symbolic link"),
    "dangling link": (lambda path: path.symlink_to("nowhere"), "symbolic link"),
    "link to a device": (lambda path: path.symlink_to("/dev/zero"), "symbolic link"),
    "pipe": (os.mkfifo, "not a regular file"),
    "directory": (Path.mkdir, "not a regular file"),
    "socket": (unix_socket, "not a regular file"),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_regular_file_is_refused(kind: str, tmp_path: Path) -> None:
    make, words = ODD[kind]
    path = tmp_path / "x"
    make(path)
    descriptors = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=words):
        open_regular(path)
    with pytest.raises(OSError, match=words):
        read_whole(path, 100)
    with pytest.raises(FileExistsError):
        create_new(path)
    assert set(os.listdir("/proc/self/fd")) == descriptors


def test_devices_are_refused_even_if_links_are_followed() -> None:
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(Path("/dev/zero"), follow=True)


def test_a_link_may_be_followed_if_its_owner_has_chosen_it(tmp_path: Path) -> None:
    link(tmp_path / "x")
    with open(open_regular(tmp_path / "x", follow=True), "rb") as file:
        assert file.read() == b"secret"


def test_small_files_are_read_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert read_whole(tmp_path / "x", 3) == b"abc"
    with pytest.raises(OSError, match="more than 2 bytes"):
        read_whole(tmp_path / "x", 2)
    with pytest.raises(FileNotFoundError):
        read_whole(tmp_path / "y", 2)


def test_new_files_are_private(tmp_path: Path) -> None:
    os.close(create_new(tmp_path / "x"))
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600
