"""What the site takes from the code: a page a method, the settings, notebooks, and the front page.

Called by mkdocs (`hooks:` in mkdocs.yml). Nothing here is written into the repository.
"""

import contextlib
import dataclasses
import html
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docstring_parser
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from fedbnn.cli.train import parse  # noqa: E402  (this repository, not one that is installed)
from fedbnn.methods import METHODS, Method, Preset  # noqa: E402

NOTEBOOKS = ("first_run", "own_parts", "compare_and_plot")
EQUATION = re.compile(r"^\$\$(.+?)\$\$$", re.MULTILINE | re.DOTALL)
BADGE = re.compile(r"\[(!\[[^]]*\]\([^)]*\))\]\((?!https?:|[\w/]+\.md)[^)]+\)")
OUTSIDE = re.compile(r"(?<!!)\[[^][]*\]\((?:\.\./)?((?:results/|[A-Z])[^)]+)\)")
PICTURE = "results/figures/quickstart.png"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put what is written here into the navigation, and every page that nobody put there."""
    tabs = {title: pages for tab in config.nav or [] for title, pages in tab.items()}
    tabs["Methods"] += [f"methods/{name}.md" for name in pages_of_methods()]
    tabs["Notebooks"] += [f"notebooks/{name}.md" for name in NOTEBOOKS]
    named = {page for pages in tabs.values() for page in pages}
    tabs["Reference"] += sorted({file.name for file in (ROOT / "docs").glob("*.md")} - named)
    config.nav = [{title: pages} for title, pages in tabs.items()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are written here."""
    made = {"index.md": front_page((ROOT / "README.md").read_text(encoding="utf-8"))}
    made |= {f"methods/{name}.md": page_of(name) for name in pages_of_methods()}
    made |= {f"notebooks/{name}.md": notebook(name) for name in NOTEBOOKS}
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    picture = str(ROOT / PICTURE)
    files.append(File.generated(config, "pictures/quickstart.png", abs_src_path=picture))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in what is generated, name files beside docs/ instead of linking them.

    Equations become MathML, which browsers read without a script.
    """
    for name, write in {"methods": list_of_methods, "settings": settings}.items():
        markdown = markdown.replace(f"<!-- generated: {name} -->", write())
    markdown = OUTSIDE.sub(r"`\1`", markdown)
    return EQUATION.sub(lambda found: convert(found[1].strip(), display="block"), markdown)


def front_page(readme: str) -> str:
    """README.md, with the links of a page in docs/."""
    text = readme.replace(PICTURE, "pictures/quickstart.png").replace("](docs/", "](")
    return BADGE.sub(r"\1", text.replace(".ipynb)", ".md)"))


def pages_of_methods() -> dict[str, list[str]]:
    """The names of each method class by the first of them, which the page has."""
    pages: dict[type[Method], list[str]] = {}
    for name, preset in METHODS.items():
        pages.setdefault(preset.method, []).append(name)
    return {names[0]: names for names in pages.values()}


def list_of_methods() -> str:
    """A table of the pages with their equations."""
    rows = ["| method | in one line | equation |", "|---|---|---|"]
    for name, (first, *_) in pages_of_methods().items():
        method = METHODS[first].method
        cells = f"[`{name}`](methods/{name}.md)", summary(method), code(method.formula)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def code(text: str) -> str:
    """Text as code in a cell of a table, where a bar would begin the next cell."""
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"


def page_of(name: str) -> str:
    """A method's equation, its settings, its presets, and what its file says about it."""
    names = pages_of_methods()[name]
    method = METHODS[name].method
    parts = [f"# {name}", summary(method), f"```text\n{method.formula}\n```"]
    parts += ["## How it works", module_text(method)]
    parts += ["## Settings", "\n".join(table_of_settings(method))]
    if len(names) > 1:
        parts += ["## Presets", "\n".join(table_of_presets(names))]
    where = Path(sys.modules[method.__module__].__file__ or "").relative_to(ROOT)
    parts.append(f"It is `{where}`; it predicts with the head `{METHODS[name].head}`.")
    command = f"python train.py --config conf/quickstart.yaml --method {name}"
    return "\n\n".join([*parts, f"```bash\n{command}\n```", ""])


def summary(method: type[Method]) -> str:
    """The first sentence of its docstring."""
    return docstring_parser.parse(method.__doc__ or "").short_description or ""


def module_text(method: type[Method]) -> str:
    """The docstring of its file: indented blocks are its equations."""
    return (sys.modules[method.__module__].__doc__ or "").strip()


def table_of_settings(method: type[Method]) -> Iterator[str]:
    """Name, default and meaning of every setting; its own words win over those it inherits."""
    said: dict[str, str] = {}
    for kind in reversed(method.__mro__):
        found = docstring_parser.parse(kind.__doc__ or "").params
        said |= {one.arg_name: " ".join((one.description or "").split()) for one in found}
    yield from ("| setting | default | meaning |", "|---|---|---|")
    for field in dataclasses.fields(method):
        meaning = said.get(field.name, "").replace("|", "&#124;")
        yield f"| `method.{field.name}` | `{shown(field.default)}` | {meaning} |"


def table_of_presets(names: list[str]) -> Iterator[str]:
    """What each name sets, and its head."""
    yield from ("| name | settings | head |", "|---|---|---|")
    for name in names:
        preset: Preset = METHODS[name]
        own = ", ".join(f"`{key}: {shown(value)}`" for key, value in preset.defaults.items())
        yield f"| `{name}` | {own or 'as above'} | `{preset.head}` |"


def shown(value: object) -> str:
    """A value as YAML has it."""
    return value if isinstance(value, str) else json.dumps(value)


def settings() -> str:
    """What `--help` prints."""
    printed, words = io.StringIO(), ["--config", str(ROOT / "conf/quickstart.yaml"), "--help"]
    width = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "96"
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        parse(words)
    os.environ.pop("COLUMNS")
    if width is not None:
        os.environ["COLUMNS"] = width
    return f"```text\n{printed.getvalue().strip()}\n```"


def notebook(name: str) -> str:
    """A notebook as a page: its text, and its code in blocks."""
    cells = json.loads((ROOT / f"docs/notebooks/{name}.ipynb").read_text())["cells"]
    write: dict[str, Callable[[str], str]] = {
        "markdown": str,
        "code": "```python\n{}\n```".format,
    }
    texts = [write[cell["cell_type"]]("".join(cell["source"])) for cell in cells]
    return "\n\n".join([*texts, f"This page is the notebook [{name}.ipynb]({name}.ipynb).", ""])
