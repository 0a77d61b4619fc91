"""Weights read from a pack as they are needed: the same bytes, and what becomes of files that change meanwhile."""

import os
from pathlib import Path

import numpy as np
import pytest

import everwarm
from everwarm.errors import EverwarmError, GGUFError, ModelError, PackError
from everwarm.kernels.backend import Span
from everwarm.weights import memory
from everwarm.weights.cache.stats import Counts
from everwarm.weights.memory import Buffers
from everwarm.weights.pack import file as pack
from everwarm.weights.pack.file import Pack
from tiny import Tiny

PROMPT = list(range(40, 60))


@pytest.fixture
def model(tmp_path: Path, home: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    Tiny(type="Q4_K", layers=6, tied=False).write(path)
    everwarm.load(path).close()
    return path


def the_pack(home: Path) -> Path:
    (path,) = (home / "packs").iterdir()
    return path


def _buffered(path: Path, opened: int) -> tuple[int, bool]:
    return os.open(path, os.O_RDONLY), False


def _refusing(path: Path, opened: int) -> tuple[int, bool]:
    """A file system that opens for direct reading, but reads into no odd place: here, a page is one byte too high."""
    return os.open(path, os.O_RDONLY), True


@pytest.mark.parametrize("opened", [memory.open_for_streaming, _buffered])
def test_what_is_read_is_what_is_mapped(
    model: Path, home: Path, opened: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "open_for_streaming", opened)
    file, buffers = Pack(the_pack(home)), Buffers(1 << 20)
    for _ in range(2):  # the second time in memory that was used before
        for name in file.entries:
            data = file.read(name, buffers)
            assert data.ctypes.data % 64 == 0
            assert (data == file.data(name)).all()
    file.close()


def test_where_direct_reading_fails_it_is_read_through_the_cache(
    model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failed = os.preadv, []

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if not failed:
            failed.append(descriptor)
            raise OSError(22, "Invalid argument")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(pack, "open_for_streaming", _refusing)
    monkeypatch.setattr(os, "preadv", preadv)
    file = Pack(the_pack(home))
    for name in file.entries:
        assert (file.read(name, Buffers()) == file.data(name)).all()
    assert failed
    file.close()


def test_a_read_error_reaches_the_caller_and_the_cache_goes_on(
    model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with everwarm.load(model) as llm:
        expected = llm.logits(PROMPT)
    with everwarm.load(model, weight_budget="50%", prefetch="off", verify="eager") as llm:
        assert (llm.logits(PROMPT) == expected).all()
        with monkeypatch.context() as broken:
            broken.setattr(os, "preadv", _fails)
            with pytest.raises(EverwarmError, match="can't be read at"):
                llm.logits(PROMPT)
        assert (llm.logits(PROMPT) == expected).all()
        assert llm.weights.stats().resident_bytes <= llm.weights.budget


def _fails(descriptor: int, buffers: list[memoryview], offset: int) -> int:
    raise OSError(5, "Input/output error")


def test_a_pack_that_is_cut_under_a_running_process_is_an_error_and_no_crash(model: Path, home: Path) -> None:
    with everwarm.load(model, weight_budget="50%", prefetch="off", verify="eager") as llm:
        llm.logits(PROMPT)
        path = the_pack(home)
        whole = path.read_bytes()
        os.truncate(path, 8192)
        with pytest.raises(PackError, match="ends at"):
            llm.logits(PROMPT)
        path.write_bytes(whole)
        assert llm.logits(PROMPT).shape == (len(PROMPT), 260)


@pytest.mark.parametrize("budget", ["50%", "100%"])
def test_files_that_are_replaced_under_a_running_process_change_nothing(model: Path, home: Path, budget: str) -> None:
    with everwarm.load(model, weight_budget=budget) as llm:
        expected = llm.logits(PROMPT)
        for path in (model, the_pack(home)):
            other = path.with_name("other")
            other.write_bytes(np.random.default_rng(0).bytes(path.stat().st_size))
            other.replace(path)
        for _ in range(3):
            assert (llm.logits(PROMPT) == expected).all()


def overwrite(path: Path, at: int, size: int = 5000) -> None:
    """Bytes of a file become others in place, as `rsync --inplace` or `dd` do it."""
    with path.open("r+b") as file:
        file.seek(at)
        data = file.read(size)
        file.seek(at)
        file.write(bytes(byte ^ 0x55 for byte in data))


def test_a_model_file_that_is_overwritten_in_place_is_never_computed_with(model: Path, home: Path) -> None:
    """Its pack is mapped, or read; the file itself is needed for rows of the embedding only."""
    with everwarm.load(model, verify="eager") as mapped, everwarm.load(model, weight_budget="50%") as streaming:
        expected = mapped.logits(PROMPT)
        assert (streaming.logits(PROMPT) == expected).all()
        overwrite(model, model.stat().st_size - 100_000)
        assert (mapped.logits(PROMPT) == expected).all()
        with pytest.raises(GGUFError, match="was changed in place while it was open; load it again"):
            streaming.logits(PROMPT)
        with pytest.raises(GGUFError, match="was changed in place"):
            streaming.generate(tokens=PROMPT, max_tokens=2, agent="bob")
        assert streaming.agents.ids.weights_id == mapped.agents.ids.weights_id
    assert not list((home / "agents").glob("*/manifests/*"))
    assert (everwarm.load(model).logits(PROMPT) == everwarm.load(model, pack="off").logits(PROMPT)).all()
    assert (everwarm.load(model).logits(PROMPT) != expected).any()


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_without_a_pack_what_was_built_stays_and_what_was_not_is_an_error(
    tmp_path: Path, home: Path, backend: str
) -> None:
    path = tmp_path / "model.gguf"
    Tiny(type="F32", layers=2).write(path)
    with everwarm.load(path, backend=backend, pack="off") as llm:
        expected = llm.logits(PROMPT)
        overwrite(path, path.stat().st_size // 2, 100_000)
        assert (llm.logits(PROMPT) == expected).all()
        with pytest.raises(GGUFError, match="was changed in place"):
            llm.generate(tokens=PROMPT, max_tokens=2, agent="bob")  # which model's agent would that be?
    with everwarm.load(path, backend=backend, pack="off") as llm:
        overwrite(path, path.stat().st_size // 2, 100_000)
        with pytest.raises(GGUFError, match="was changed in place"):
            llm.logits(PROMPT)


def test_a_model_file_that_was_only_touched_is_read_again_and_used(model: Path, home: Path) -> None:
    with everwarm.load(model, weight_budget="50%", verify="eager") as llm:
        expected = llm.logits(PROMPT)
        os.utime(model)
        for _ in range(2):
            assert (llm.logits(PROMPT) == expected).all()
        overwrite(model, model.stat().st_size - 100_000)
        overwrite(model, model.stat().st_size - 100_000)  # and back
        assert (llm.logits(PROMPT) == expected).all()


def test_a_file_that_changes_while_it_is_packed_is_refused(model: Path, home: Path) -> None:
    the_pack(home).unlink()
    told: list[int] = []

    def progress(done: int, total: int) -> None:
        if not told:
            overwrite(model, model.stat().st_size - 100_000)
        told.append(done)

    with pytest.raises(GGUFError, match="was changed in place"):
        everwarm.load(model, progress=progress)
    assert list((home / "packs").iterdir()) == []


def test_a_model_that_is_replaced_while_loaded_keeps_its_id_and_does_not_pass_it_on(model: Path, home: Path) -> None:
    """Agents are kept under the id of the file that was opened, not of what its path has become."""
    other = model.with_name("other.gguf")
    Tiny(type="Q4_K", layers=6, tied=False, seed=1).write(other)
    with everwarm.load(other) as llm:
        others_id = llm.agents.ids.weights_id
    with everwarm.load(model) as llm:
        own = llm.agents.ids.weights_id
    for known in (True, False):  # whether the new one was ever loaded before
        first, second = model.with_name(f"{known}.gguf"), model.with_name(f"new-{known}.gguf")
        os.link(model, first)
        second.write_bytes(other.read_bytes())
        if known:
            everwarm.load(second).close()
        with everwarm.load(first, pack="on" if known else "off") as llm:
            second.replace(first)
            assert llm.agents.ids.weights_id == own
        with everwarm.load(first) as llm:
            assert llm.agents.ids.weights_id == others_id
            assert (llm.logits(PROMPT) != everwarm.load(model).logits(PROMPT)).any()


def test_a_mapped_pack_that_is_overwritten_in_place_is_mended_before_the_next_step(
    model: Path, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with everwarm.load(model, verify="eager") as llm:
        expected = llm.logits(PROMPT)
        os.link(the_pack(home), home / "another-name")  # a hard link: the same file
        overwrite(home / "another-name", the_pack(home).stat().st_size // 2)
        for _ in range(2):
            assert (llm.logits(PROMPT) == expected).all()
        assert "was altered on disk; built again" in caplog.text
        os.utime(the_pack(home))
        assert (llm.logits(PROMPT) == expected).all()


def test_a_step_during_which_the_pack_was_overwritten_does_not_count(model: Path, home: Path) -> None:
    with everwarm.load(model, verify="eager") as llm:
        expected = llm.logits(PROMPT)
        get = llm.weights.get

        def tampering(name: str) -> object:
            if name == "output_norm.weight":  # all layers are done by then
                llm.weights.get = get  # type: ignore[method-assign]
                overwrite(the_pack(home), the_pack(home).stat().st_size // 2)
            return get(name)

        llm.weights.get = tampering  # type: ignore[method-assign, assignment]
        kv = llm.new_kv()
        with pytest.raises(ModelError, match="altered on disk while they were in use"):
            llm.model.forward([Span(PROMPT, kv, 0)])
        assert kv.length == 0
        assert (llm.model.forward([Span(PROMPT, kv, 0)]) == expected).all()
        kv.close()


def test_a_mapped_pack_that_is_cut_between_two_steps_is_an_error_and_no_crash(model: Path, home: Path) -> None:
    with everwarm.load(model, verify="eager") as llm:
        expected = llm.logits(PROMPT)
        path = the_pack(home)
        whole = path.read_bytes()
        os.truncate(path, 8192)
        with pytest.raises(PackError, match="was cut from"):
            llm.logits(PROMPT)
        path.write_bytes(whole)
        assert (llm.logits(PROMPT) == expected).all()


def test_a_pack_that_is_overwritten_while_streaming_is_mended(
    model: Path, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with everwarm.load(model, weight_budget="50%", verify="eager", prefetch="off") as llm:
        expected = llm.logits(PROMPT)
        path = the_pack(home)
        overwrite(path, 8192, path.stat().st_size - 8192)
        for _ in range(2):
            assert (llm.logits(PROMPT) == expected).all()
        assert "was altered while in use; built from" in caplog.text


def test_an_altered_pack_is_noticed_and_mended_while_streaming(
    model: Path, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with everwarm.load(model) as llm:
        expected = llm.logits(PROMPT)
    path = the_pack(home)
    data = bytearray(path.read_bytes())
    data[-5000] ^= 0xFF
    path.write_bytes(data)
    with everwarm.load(model, weight_budget="50%", verify="eager") as llm:
        assert "was altered" in caplog.text
        for _ in range(2):
            assert (llm.logits(PROMPT) == expected).all()


def test_packing_in_the_background_does_not_wait_for_the_step_that_waits_for_it(model: Path) -> None:
    with everwarm.load(model, pack="off") as llm:
        expected = llm.logits(PROMPT)
    with everwarm.load(model, pack="off", weight_budget="50%", prefetch_ahead=2) as llm:
        for _ in range(20):
            assert (llm.logits(PROMPT) == expected).all()
        assert llm.weights.stats().prefetch_hits > 0


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "Q2_K", "IQ2_XXS"])
def test_rows_of_the_embedding_are_read_by_themselves_and_are_the_same(
    tmp_path: Path, home: Path, backend: str, kind: str
) -> None:
    """Of a model whose output is a matrix of its own, the embedding is never needed as a whole."""
    path = tmp_path / "model.gguf"
    Tiny(type=kind, layers=6, tied=False).write(path)
    with everwarm.load(path, backend=backend) as llm:
        expected = llm.logits(PROMPT)
    with everwarm.load(path, backend=backend, weight_budget="50%") as llm:
        for _ in range(2):
            assert (llm.logits(PROMPT) == expected).all()
        llm.generate(tokens=PROMPT, max_tokens=2)  # the cache plans, and has no reason to keep it
        stats = llm.weights.stats()
        assert stats.by_tensor["token_embd.weight"] == Counts()
        assert stats.by_tensor["output.weight"].uses > 0
        llm.weights.preload(["token_embd.weight"])
        assert (llm.logits(PROMPT) == expected).all()


def test_a_model_file_that_is_cut_under_a_running_process_is_an_error_and_no_crash(model: Path, home: Path) -> None:
    with everwarm.load(model, weight_budget="50%", prefetch="off", verify="eager") as llm:
        expected = llm.logits(PROMPT)
        whole = model.read_bytes()
        os.truncate(model, 4096)
        with pytest.raises(GGUFError, match="shorter than when it was opened"):
            llm.logits(PROMPT)
        model.write_bytes(whole)
        assert (llm.logits(PROMPT) == expected).all()
