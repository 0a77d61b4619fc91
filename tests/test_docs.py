"""Docs that are generated are up to date, and what docs point to exists."""

import re
import runpy
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = runpy.run_path(str(ROOT / "docs" / "generate.py"))["PAGES"]


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_up_to_date(name: str) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    if "(typer " in page and f"(typer {version('typer')})" not in page:
        pytest.skip("another version of typer words its help differently")
    assert page == PAGES[name](), "run `make docs`"


@pytest.mark.parametrize("page", ["README.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert ((ROOT / page).parent / target).exists(), target


def test_the_map_names_every_module() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    modules = [path for path in (ROOT / "src" / "everwarm").glob("*/*.py") if path.stem != "__init__"]
    families = ("gguf_", "dequant_")  # one line stands for each of these
    assert [path.name for path in modules if not path.stem.startswith(families) and f"`{path.name}`" not in text] == []


def test_the_import_graph_is_up_to_date_and_has_no_cycle() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "import_graph.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
