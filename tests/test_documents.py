"""The pages for readers name only what is there: files, make targets, programs, dependencies."""

import re
import tomllib
from pathlib import Path

import pytest

from dasc_jax.cli import PROGRAMS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/README.md",
    "docs/request.md",
    "checkpoints/README.md",
]
INSIDE = r"(?:dasc_jax|pallas_kernels|scripts|tests|docs|checkpoints|\.ci)/[\w./]*"


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    named = re.findall(rf"`({INSIDE})`|\]\(([\w./]+\.md)\)", text)
    missing = [
        inside or link
        for inside, link in named
        if not ((ROOT / inside) if inside else (ROOT / page).parent / link).exists()
    ]
    assert not missing


def test_the_layout_in_the_readme_is_the_layout() -> None:
    tree = re.search(r"```\n(dasc_jax/\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert tree is not None
    folder, missing = ROOT, []
    for line in tree[1].splitlines():
        names = [word for word in line.split("  ") if word][: 2 if "types.py" in line else 1]
        folder = folder if line.startswith(" ") else ROOT / names[0].strip()
        paths = [folder / name.strip() if line.startswith(" ") else folder for name in names]
        missing += [str(path) for path in paths if not path.exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_every_command_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) <= targets
    assert set(re.findall(r"(?:^|`)dasc ([a-z-]+)", text, re.MULTILINE)) <= set(PROGRAMS)


def test_every_dependency_is_pinned_in_the_lock_and_has_its_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    lock = set(re.findall(r"^([\w.-]+)==", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    for requirement in project["dependencies"] + project["optional-dependencies"]["dev"]:
        name = re.split(r"[\[<>=]", requirement)[0]
        assert name in lock, f"{name} is not in requirements.lock: run `make lock`"
        assert re.search(re.escape(f'"{requirement}",') + r"\s+# \w", text), f"{name}: no reason"
