"""Files that are missing, change, or belong to a split model that is not whole: each is refused in one line."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from handmade_gguf import ARRAY, STRING, array, gguf, pair, small_model, string, tensor, u32
from hostile_gguf import assert_refused

from everwarm.errors import GGUFError
from everwarm.weights.gguf.file import GGUFFile


def test_missing_file(tmp_path: Path) -> None:
    assert_refused(tmp_path / "none.gguf", tmp_path / "none.gguf", ["no such file"])


def test_directory(tmp_path: Path) -> None:
    assert_refused(tmp_path, tmp_path, ["is a directory"])


def test_named_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert_refused(tmp_path / "pipe.gguf", tmp_path / "pipe.gguf", ["not a regular file"])


def test_endless_device() -> None:
    assert_refused(Path("/dev/zero"), Path("/dev/zero"), ["not a regular file"])


def test_permission_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)  # chmod does not stop root
    assert_refused(tmp_path / "m.gguf", tmp_path / "m.gguf", ["Permission denied"])


def test_path_with_a_zero_byte(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match=r"a\\x00b: can't be opened"):
        GGUFFile(tmp_path / "a\0b")


def test_path_with_a_line_break_still_gives_one_line(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match=r"a\\nb: no such file"):
        GGUFFile(tmp_path / "a\nb")


def test_file_that_shrinks_while_open(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(small_model())
    with GGUFFile(path) as file:
        os.truncate(path, 100)
        for read in (
            lambda: file.data("x.weight"),
            lambda: list(file.metadata["a.tokens"]),
            lambda: file.metadata["a.floats"][0],
        ):
            with pytest.raises(GGUFError, match=r"shrank from [\d,]+ to 100 bytes while open; open it again"):
                read()


def test_file_that_shrinks_before_it_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(small_model())
    fstat = os.fstat
    asked = []

    def late(descriptor: int) -> os.stat_result:
        status = fstat(descriptor)
        asked.append(status)
        if len(asked) == 2:  # first its kind, then its size
            os.truncate(path, 10)
        return status

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", late)
        with pytest.raises(GGUFError, match="can't be mapped"):
            GGUFFile(path)


def test_strings_that_change_while_open(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf([pair("tokens", ARRAY, array(STRING, [string("abcd")]))]))
    with GGUFFile(path) as file:
        with path.open("r+b") as writer:
            writer.seek(-12, os.SEEK_END)
            writer.write(b"\xff" * 8)
        with pytest.raises(GGUFError, match=r"changed at byte \d+ while open; open it again"):
            list(file.metadata["tokens"])


def test_file_that_grows_is_read_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(small_model())
    with GGUFFile(path) as file:
        os.truncate(path, 1 << 20)
        assert file.data("z.weight").tolist() == [64, 65, 66]


# Split models


def write_parts(folder: Path, *parts: Sequence[bytes], tensors: Sequence[Sequence[bytes]] = ((), ())) -> Path:
    for number, pairs in enumerate(parts):
        content = gguf(pairs, tensors[number], bytes(64) if tensors[number] else b"")
        (folder / f"m-{number + 1:05}-of-{len(parts):05}.gguf").write_bytes(content)
    return folder / f"m-00001-of-{len(parts):05}.gguf"


def split(number: int, count: int, tensors: int = 0) -> list[bytes]:
    return [u32("split.no", number), u32("split.count", count), u32("split.tensors.count", tensors)]


def test_missing_part(tmp_path: Path) -> None:
    first = write_parts(tmp_path, split(0, 3), split(1, 3), split(2, 3), tensors=((), (), ()))
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    assert_refused(first, first, ["split.count is 3", "part 2 is missing: m-00002-of-00003.gguf"])


def test_absurd_number_of_parts(tmp_path: Path) -> None:
    (tmp_path / "m-00001-of-65535.gguf").write_bytes(gguf(split(0, 65_535)))
    path = tmp_path / "m-00001-of-65535.gguf"
    assert_refused(path, path, ["m-00002-of-65535.gguf"])


def test_parts_in_the_wrong_order(tmp_path: Path) -> None:
    first = write_parts(tmp_path, split(0, 2), split(0, 2))
    second = tmp_path / "m-00002-of-00002.gguf"
    assert_refused(first, second, ["split.no 0 of split.count 2, expected 1 of 2"])


def test_part_of_another_split(tmp_path: Path) -> None:
    first = write_parts(tmp_path, split(0, 2), split(1, 3))
    assert_refused(first, tmp_path / "m-00002-of-00002.gguf", ["split.no 1 of split.count 3, expected 1 of 2"])


def test_wrong_number_of_tensors(tmp_path: Path) -> None:
    first = write_parts(tmp_path, split(0, 2, 2), split(1, 2, 2), tensors=([tensor("a")], []))
    assert_refused(first, first, ["split.tensors.count is 2, but there are 1 tensors"])


def test_tensor_in_two_parts(tmp_path: Path) -> None:
    first = write_parts(tmp_path, split(0, 2, 2), split(1, 2, 2), tensors=([tensor("a")], [tensor("a")]))
    assert_refused(first, tmp_path / "m-00002-of-00002.gguf", ["tensor a: is there twice"])


def test_a_refused_model_leaves_no_file_open(tmp_path: Path) -> None:
    first = write_parts(tmp_path, split(0, 2), split(1, 2)[:2], tensors=([], [tensor("a", kind=99)]))
    before = len(os.listdir("/proc/self/fd"))
    assert_refused(first, tmp_path / "m-00002-of-00002.gguf", ["type 99 is unknown"])
    assert len(os.listdir("/proc/self/fd")) == before
