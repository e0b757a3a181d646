"""Builds the documentation site from the pages of the repository: `python -m tools.documentation FOLDER`.

The pages are those that stand in docs/, README.md, CHANGELOG.md and CONTRIBUTING.md; the examples, the notebook, and one page
for each public name are made here. A link to a file that is not there is an error, and so is every warning of mkdocs. The site
needs no network: it searches offline and loads no font.
"""

import argparse
import json
import logging
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from thresher.methods import registry

ROOT = Path(__file__).resolve().parents[1]
TOP_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
NAVIGATION: Mapping[str, tuple[str, ...]] = {
    "Start": ("index.md", "first-steps.md", "choosing.md", "faq.md"),
    "How-to": (
        "guide.md",
        "frameworks.md",
        "fine-tuning.md",
        "loops.md",
        "loaders.md",
        "samplers.md",
        "composition.md",
        "cached.md",
        "fast-loops.md",
        "advise.md",
        "compare.md",
        "report.md",
        "recipes.md",
        "observe.md",
        "tables.md",
        "audit.md",
        "rl.md",
        "scale.md",
        "contributing.md",
        "changelog.md",
        "examples/",
    ),
    "Concepts": ("how-it-works.md", "attribution.md", "subset-backward.md", "stratified.md"),
    "Methods": ("methods/", "winnow.md"),
    "Evidence": (
        "evidence/results.md",
        "evidence/composition.md",
        "evidence/league.md",
        "evidence/league-tasks.md",
        "evidence/reproduce.md",
        "evidence/kakurenbo.md",
        "evidence/kakurenbo-tables.md",
        "evidence/selective-backprop.md",
        "evidence/selective-backprop-tables.md",
        "evidence/adaselection.md",
        "evidence/adaselection-tables.md",
        "evidence/diet-selective-backprop.md",
        "evidence/diet-selective-backprop-tables.md",
        "evidence/winnow-measured.md",
        "evidence/grpo.md",
        "evidence/wrong-labels.md",
        "evidence/subset-backward.md",
        "evidence/lemma-1.md",
    ),
    "API": ("api/",),
}
"""Parts of the site with their pages; a page that does not exist is left out, and a folder stands for its pages."""
FOLDERS = {"examples/": "Examples", "methods/": "Cards of the methods"}
"""Folders whose pages are a group of their own within a part, and the title of the group."""
THEME_FILES = ROOT / "tools" / "site"
"""Style, logo, and the script with which a page that was opened from a file can search."""

LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


class BrokenLinkError(ValueError):
    """A page links to something that is not there."""


@dataclass(frozen=True)
class Site:
    """The site before it is built.

    Args:
        pages: Text of each page by its path in the site.
        files: Files of the repository that pages link to, by their paths in the site.
    """

    pages: dict[str, str]
    files: dict[str, Path]


def site() -> Site:
    """Returns all pages with the links between them, and the files that they link to.

    Raises:
        BrokenLinkError: A page links to something that is not there.
    """
    sources = {ROOT / name: place for name, place in TOP_PAGES.items()}
    sources |= {
        path: path.relative_to(ROOT / "docs").as_posix()
        for path in sorted((ROOT / "docs").rglob("*.md"))
    }
    examples = {path: f"examples/{_stem(path)}.md" for path in _examples()}
    places = {path.resolve(): place for path, place in (sources | examples).items()}
    files: dict[str, Path] = {}
    pages = {place: _linked(path, place, places, files) for path, place in sources.items()}
    pages |= {place: _example_page(path) for path, place in examples.items()}
    pages |= _api_pages()
    notebook = ROOT / "examples" / "first_steps.ipynb"
    if notebook.is_file():
        pages["first-steps.md"] = notebook_page(json.loads(notebook.read_text(encoding="utf-8")))
    return Site(pages, files)


def _examples() -> list[Path]:
    return sorted(path for path in (ROOT / "examples").rglob("*.py") if path.name != "__init__.py")


def _stem(path: Path) -> str:
    return path.relative_to(ROOT / "examples").with_suffix("").as_posix()


def _linked(path: Path, place: str, places: Mapping[Path, str], files: dict[str, Path]) -> str:
    """Returns the text of a page whose links lead to the pages and files of the site."""
    text = path.read_text(encoding="utf-8")
    kept: list[str] = []

    def keep(match: re.Match[str]) -> str:
        kept.append(match[0])
        return f"\0{len(kept) - 1}\0"

    def moved(match: re.Match[str]) -> str:
        target, _, anchor = match[2].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        file = (path.parent / target).resolve()
        if file.is_dir():
            file = file / "README.md"
        if not file.is_file():
            raise BrokenLinkError(
                f"{path.relative_to(ROOT)} links to {match[2]}, which is not there"
            )
        to = places.get(file) or f"files/{file.relative_to(ROOT).as_posix()}"
        if file not in places:
            files[to] = file
        return f"{match[1]}({_relative(to, place)}{'#' * bool(anchor)}{anchor})"

    text = LINK.sub(moved, CODE.sub(keep, text))
    return re.sub(r"\0(\d+)\0", lambda match: kept[int(match[1])], text).replace(
        "```py\n", "```python\n"
    )


def _relative(to: str, place: str) -> str:
    """Returns the path from one page of the site to another."""
    up = len(PurePosixPath(place).parts) - 1
    return "../" * up + to


def _example_page(path: Path) -> str:
    return f"# {_stem(path).rpartition('/')[2]}\n\n```python\n{path.read_text(encoding='utf-8').rstrip()}\n```\n"


def public_names() -> dict[str, str]:
    """Returns the public names and where they are defined, as dotted paths."""
    homes = {
        **registry.reexports(ROOT / "src/thresher/__init__.pyi"),
        **registry.reexports(registry.FOLDER / "built_in.py"),
    }
    return {
        name: f"thresher.{name}" if home == "thresher" else f"{home}.{name}"
        for name, home in sorted(homes.items())
    }


def _api_pages() -> dict[str, str]:
    names = public_names()
    pages = {
        f"api/{name}.md": _api_page(name, _place_of(home), names) for name, home in names.items()
    }
    listed = "\n".join(f"- [`thresher.{name}`]({name}.md)" for name in names)
    return pages | {"api/index.md": f"# Public names\n\n{listed}\n"}


def _api_page(name: str, place: str, names: Mapping[str, str]) -> str:
    """Returns the page of a public name; that of a module leaves out what has a page of its own."""
    own = [one for one, home in names.items() if _place_of(home) == f"{place}.{one}"]
    hidden = ["^_", *(f"^{one}$" for one in own)]
    return f"# thresher.{name}\n\n::: {place}\n    options:\n      filters: {json.dumps(['!' + one for one in hidden])}\n"


def _place_of(home: str) -> str:
    """Returns the module that defines a name which a package passes on."""
    package, _, name = home.rpartition(".")
    file = ROOT / "src" / package.replace(".", "/") / "__init__.py"
    if not file.is_file():
        return home
    passed_on = re.search(
        rf"^from ([\w.]+) import .*\b{name}\b", file.read_text(encoding="utf-8"), re.MULTILINE
    )
    return f"{passed_on[1]}.{name}" if passed_on else home


def notebook_page(notebook: Mapping[str, Any]) -> str:
    """Returns a notebook as Markdown, with the texts that its cells have printed.

    Args:
        notebook: Content of an .ipynb file.
    """
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"]).strip()
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        printed = "".join("".join(output.get("text", ())) for output in cell.get("outputs", ()))
        if printed.strip():
            parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def _navigation(pages: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns the navigation: all pages, each once."""

    def entries(held: str) -> list[Any]:
        if not held.endswith("/"):
            return [held] if held in pages else []
        own = sorted((page for page in pages if page.startswith(held)), key=_index_first)
        return [{FOLDERS[held]: own}] if held in FOLDERS else own

    return [
        {title: [entry for one in held for entry in entries(one)]}
        for title, held in NAVIGATION.items()
    ]


def _index_first(page: str) -> tuple[bool, str]:
    return not page.endswith(("README.md", "index.md")), page.lower()


def _copy_code(to: Path) -> None:
    """Copies the package with those headings of its docstrings that the site's reader of docstrings knows."""
    shutil.copytree(ROOT / "src", to, ignore=shutil.ignore_patterns("__pycache__"))
    for path in to.rglob("*.py"):
        path.write_text(
            re.sub(r"^( +)Example:$", r"\1Examples:", path.read_text("utf-8"), flags=re.MULTILINE),
            "utf-8",
        )


def settings(source: Path, code: Path, out: Path, pages: Mapping[str, str]) -> dict[str, Any]:
    """Returns the settings of mkdocs.

    Args:
        source: Folder with the pages.
        code: Folder with the package.
        out: Folder for the site.
        pages: The pages by their paths in the site.
    """
    python = {
        "paths": [str(code)],
        "options": {
            "docstring_style": "google",
            "show_root_heading": False,
            "show_source": False,
            "members_order": "source",
        },
    }
    return {
        "site_name": "Thresher",
        "site_description": "Cheaper neural-network training by choosing which samples to train on",
        "docs_dir": str(source),
        "site_dir": str(out),
        "strict": True,
        "use_directory_urls": False,
        "theme": {
            "name": "material",
            "font": False,
            "logo": "assets/logo.svg",
            "favicon": "assets/logo.svg",
            "features": [
                "navigation.indexes",
                "navigation.tabs",
                "navigation.top",
                "content.code.copy",
                "search.highlight",
            ],
            "palette": [
                {
                    "scheme": scheme,
                    "media": f"(prefers-color-scheme: {name})",
                    "toggle": {"icon": icon, "name": f"To {other}"},
                }
                for scheme, name, other, icon in (
                    ("default", "light", "dark", "material/weather-night"),
                    ("slate", "dark", "light", "material/weather-sunny"),
                )
            ],
        },
        "extra_css": ["assets/site.css"],
        # Material would load this one script from elsewhere.
        "extra": {"polyfills": ["assets/iframe-worker.js"], "generator": False},
        "plugins": ["search", "offline", {"mkdocstrings": {"handlers": {"python": python}}}],
        "markdown_extensions": [
            "tables",
            "toc",
            "admonition",
            "pymdownx.highlight",
            "pymdownx.superfences",
        ],
        "validation": {"links": {"anchors": "warn", "unrecognized_links": "warn"}},
        "nav": _navigation(pages),
    }


def build(out: Path) -> int:
    """Builds the site into a folder, which it replaces, and returns the number of pages.

    Args:
        out: Folder for the site.

    Raises:
        BrokenLinkError: A page links to something that is not there.
        mkdocs.exceptions.Abort: mkdocs has warned of something.
    """
    from mkdocs.commands.build import build as build_pages
    from mkdocs.config import load_config

    made = site()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "pages"
        for place, text in made.pages.items():
            path = source / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        for place, file in made.files.items():
            (source / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, source / place)
        shutil.copytree(THEME_FILES, source / "assets")
        code, config = Path(folder) / "src", Path(folder) / "mkdocs.yml"
        _copy_code(code)
        config.write_text(
            json.dumps(settings(source, code, out.resolve(), made.pages)), encoding="utf-8"
        )
        build_pages(load_config(str(config)))
    return len(made.pages)


def main(arguments: list[str] | None = None) -> int:
    """Builds the site and prints where it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="Folder for the site.")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    folder = parser.parse_args(arguments).folder
    print(f"{build(folder)} pages: {folder / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
