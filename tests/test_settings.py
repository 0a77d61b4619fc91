"""A setting is one field: flag, variable, config.toml and keyword follow from it, and all give the same typed value."""

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

import everwarm
from everwarm import config
from everwarm.cli.doctor import examine
from everwarm.cli.options import takes_settings
from everwarm.setting_kinds import Setting, settings_of
from everwarm.settings import ServeSettings, Settings
from tiny import Tiny

LOAD, ALL = settings_of(Settings), settings_of(ServeSettings)
TEXTS = (
    "off",
    "on",
    "3GiB",
    "7",
    "1",
    "http://localhost:3000",
    "{{ text }}",
)  # a field of any kind takes one of them, or a choice


@pytest.fixture(autouse=True)
def _default_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests compute with one thread (conftest.py); here it is looked at what a setting is by default."""
    monkeypatch.delenv(config.PREFIX + "THREADS")


def example(setting: Setting) -> str:
    """A text that gives a setting another value than its default."""
    for text in (*reversed(setting.rule.choices), *TEXTS):
        try:
            if setting.rule.parse(text) != setting.default:
                return text
        except ValueError:
            pass
    raise AssertionError(f"{setting.name}: none of {TEXTS} is a value; add one that is")


@pytest.mark.parametrize("setting", ALL.values(), ids=ALL)
def test_every_way_to_give_a_setting_gives_the_same_value(
    setting: Setting, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = example(setting)
    expected = setting.rule.parse(text)
    assert expected != setting.default
    assert setting.rule.parse(expected) == expected
    assert setting.rule.parse(setting.show(expected)) == expected

    assert getattr(flags_give(setting.flag, *(() if setting.rule.off_flag else (text,))), setting.name) == expected
    for given in (text, expected):
        found = config.resolve(ServeSettings, {setting.name: given}, given_as="argument")  # type: ignore[dict-item]
        assert (getattr(found.settings, setting.name), found.sources[setting.name]) == (
            expected, f"argument {setting.name}",
        )  # fmt: skip

    home.mkdir()
    for written in (json.dumps(text), *([] if setting.show(expected) != str(expected) else [json.dumps(expected)])):
        (home / "config.toml").write_text(f"{setting.name} = {written}\n")
        found = config.resolve(ServeSettings)
        assert (getattr(found.settings, setting.name), found.sources[setting.name]) == (
            expected, f"config.toml {setting.name}",
        )  # fmt: skip
    (home / "config.toml").unlink()

    monkeypatch.setenv(setting.variable, text)
    found = config.resolve(ServeSettings)
    assert (getattr(found.settings, setting.name), found.sources[setting.name]) == (
        expected, f"variable {setting.variable}",
    )  # fmt: skip
    shown = {"value": setting.show(expected), "source": f"variable {setting.variable}"}
    assert examine()["settings"][setting.name] == shown


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    Tiny().write(path)
    return path


@pytest.mark.parametrize("setting", LOAD.values(), ids=LOAD)
def test_load_takes_every_setting_as_a_keyword(
    setting: Setting, home: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "{{ messages }}" if setting.name == "chat_template" else example(setting)
    monkeypatch.chdir(tmp_path)
    if setting.name.endswith("_file"):
        (tmp_path / text).write_text("what it is to be read from")
    with everwarm.load(tiny, **{setting.name: text}) as llm:
        assert getattr(llm.settings, setting.name) == setting.rule.parse(text)


def test_help_of_load_names_every_setting() -> None:
    assert list(inspect.signature(everwarm.load).parameters) == ["path_or_name", "progress", *LOAD]


def test_names_are_the_same_everywhere() -> None:
    for name, setting in ALL.items():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", name)
        assert setting.variable == "EVERWARM_" + name.upper()
        assert setting.flag in ("--" + name.replace("_", "-"), "--no-" + name.replace("_", "-"))


def test_defaults_have_the_type_of_what_is_read() -> None:
    for setting in ALL.values():
        if setting.default not in (None, ()):
            assert setting.rule.parse(setting.default) == setting.default
            assert setting.rule.parse(setting.show(setting.default)) == setting.default


@pytest.mark.parametrize(
    ("name", "value"),
    [("pack", 1), ("pack", "yes"), ("threads", True), ("threads", 1.5), ("grace", "nan"), ("grace", -1),
     ("max_body", "75%"), ("max_body", 0), ("host", 3), ("cors", [3]), ("kv_type", ["q8"]), ("port", 65536)],
)  # fmt: skip
def test_a_value_of_another_type_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        ALL[name].rule.parse(value)


def test_a_list_is_given_by_several_flags_or_by_spaces(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert flags_give("--cors", "http://a", "--cors", "http://b").cors == ("http://a", "http://b")
    monkeypatch.setenv("EVERWARM_CORS", " http://a  http://b ")
    assert config.resolve(ServeSettings).settings.cors == ("http://a", "http://b")


def flags_give(*arguments: str) -> ServeSettings:
    """What a command gets that is called with these arguments."""
    got: list[ServeSettings] = []

    def command(*, settings: ServeSettings) -> None:
        got.append(settings)

    app = typer.Typer()
    wrapped: Callable[..., None] = takes_settings(ServeSettings)(command)
    app.command()(wrapped)
    app(args=list(arguments), standalone_mode=False)
    return got[0]
