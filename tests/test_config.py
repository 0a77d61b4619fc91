"""Where a setting comes from, and what sizes may look like."""

from pathlib import Path

import pytest

from everwarm import config
from everwarm.errors import ConfigError
from everwarm.settings import ServeSettings, Settings
from everwarm.sizes import Share, in_bytes, parse_size, show_size


@pytest.fixture(autouse=True)
def _default_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests compute with one thread (conftest.py); here it is looked at what a setting is by default."""
    monkeypatch.delenv(config.PREFIX + "THREADS")


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
    assert parse_size(size) == size
    assert parse_size(show_size(size)) == size


def test_the_whole_of_a_share_is_asked_for_only_if_it_is_needed() -> None:
    assert in_bytes(Share(0.25), lambda: 1000) == 250
    assert in_bytes(7, lambda: pytest.fail("not needed")) == 7


@pytest.mark.parametrize("text", ["", "-1", "many", "5 apples", "101%", "1e3", "GiB", -5, True, 1.5, "9" * 400])
def test_what_is_no_size(text: str | int) -> None:
    with pytest.raises(ValueError):
        parse_size(text)


def test_flag_beats_environment_beats_file_beats_default(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(**given: int) -> tuple[int | None, str]:
        found = config.resolve(Settings, given)
        return found.settings.threads, found.sources["threads"]

    assert threads() == (None, "default")
    home.mkdir()
    (home / "config.toml").write_text('threads = 3\nkv_type = "q8"\n')
    assert threads() == (3, "config.toml threads")
    monkeypatch.setenv("EVERWARM_THREADS", "4")
    assert threads() == (4, "variable EVERWARM_THREADS")
    assert threads(threads=5) == (5, "flag --threads")
    assert config.resolve(Settings, {"threads": 5}, given_as="argument").sources["threads"] == "argument threads"
    assert config.resolve(Settings).settings.kv_type == "q8"


def test_what_is_empty_is_not_given(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERWARM_THREADS", "")
    assert config.resolve(Settings, {"threads": ""}).sources["threads"] == "default"


def test_a_setting_of_serve_does_not_disturb_other_commands(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERWARM_PORT", "tcp://10.0.0.1:80")  # Kubernetes sets this for a service named everwarm
    config.resolve(Settings)
    with pytest.raises(ConfigError, match="EVERWARM_PORT"):
        config.resolve(ServeSettings)


def test_an_unknown_keyword_is_refused(home: Path) -> None:
    with pytest.raises(TypeError, match="unknown settings: threds; known are backend"):
        config.load_settings({"threds": 3})


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
        config.resolve(Settings)


@pytest.mark.parametrize(
    ("text", "message"),
    [("threds = 3", "unknown setting 'threds'"), ("threads = [", "can't read it"), ("threads = 1.5", "a whole number")],
)
def test_a_bad_config_file_is_named(home: Path, text: str, message: str) -> None:
    home.mkdir()
    (home / "config.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        config.resolve(Settings)
