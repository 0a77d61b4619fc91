"""Where a setting comes from, and what sizes may look like."""

from pathlib import Path

import pytest

from everwarm import config
from everwarm.config import Share, parse_size
from everwarm.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * 1024**3),
        ("512MB", 512 * 1000**2),
        ("1.5k", 1500),
        ("2 kib", 2048),
        ("3Ti", 3 * 1024**4),
        ("7", 7),
        ("7b", 7),
        (7, 7),
        ("75%", Share(0.75)),
        ("100%", Share(1.0)),
    ],
)
def test_sizes(text: str | int, size: int | Share) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "many", "5 apples", "101%", "1e3", "GiB", -5, True, "9" * 400])
def test_what_is_no_size(text: str | int) -> None:
    with pytest.raises(ValueError):
        parse_size(text)


def test_flag_beats_environment_beats_file_beats_default(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.resolve()["threads"] == config.Value(None, "default")
    home.mkdir()
    (home / "config.toml").write_text('threads = 3\nkv_type = "q8"\n')
    assert config.resolve()["threads"] == config.Value(3, "config.toml threads")
    monkeypatch.setenv("EVERWARM_THREADS", "4")
    assert config.resolve()["threads"] == config.Value(4, "variable EVERWARM_THREADS")
    found = config.resolve({"threads": 5})
    assert found["threads"] == config.Value(5, "flag --threads")
    assert found["kv_type"].value == "q8"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("THREADS", "0"),
        ("THREADS", "9" * 20),
        ("THREADS", "two"),
        ("BACKEND", "cuda"),
        ("KV_TYPE", "q3"),
        ("KV_BUDGET", "-1GiB"),
    ],
)
def test_a_value_that_can_not_be_parsed_is_fatal_and_named(
    home: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv("EVERWARM_" + name, value)
    with pytest.raises(ConfigError, match=f"EVERWARM_{name}: can't understand '{value}'"):
        config.resolve()


@pytest.mark.parametrize(
    ("text", "message"),
    [("threds = 3", "unknown setting 'threds'"), ("threads = [", "can't read it"), ("threads = 1.5", "a whole number")],
)
def test_a_bad_config_file_is_named(home: Path, text: str, message: str) -> None:
    home.mkdir()
    (home / "config.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        config.resolve()
