"""The site: built without a warning, and without network where we may cut it off."""

import dataclasses
import html
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from fedbnn.methods import METHODS
from tests.docs.blocks import ROOT

pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """What a page links to, what it loads, and the anchors in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = {name: value or "" for name, value in attrs}
        self.anchors |= {said[name] for name in ("id", "name") if name in said}
        if tag == "a" and "href" in said:
            self.links.append(said["href"])
        elif tag != "a" and said.get("rel") != "canonical":
            self.loaded += [said[name] for name in ("src", "href") if name in said]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """The pages that `make docs` builds, by file."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    alone = ["unshare", "-rn"] if subprocess.run(["unshare", "-rn", "true"]).returncode == 0 else []
    built = subprocess.run([*alone, *command], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    pages = [path for path in folder.rglob("*.html") if path.name != "404.html"]
    return {path: Page(path.read_text(encoding="utf-8")) for path in pages}


def test_every_link_leads_somewhere(site: dict[Path, Page]) -> None:
    for path, page in site.items():
        for link in page.links:
            place, anchor = urldefrag(unquote(link))
            if not place.startswith(("http", "mailto:")):
                target = (path.parent / place).resolve() if place else path
                assert target.exists(), f"{path.name}: {link}"
                known = site[target].anchors if target in site else {anchor}
                assert not anchor or anchor in known, f"{path.name}: {link}"


def test_nothing_is_loaded_from_elsewhere(site: dict[Path, Page]) -> None:
    for path, page in site.items():
        for source in page.loaded:
            assert not re.match(r"(https?:)?//", source), f"{path.name}: {source}"
            if not source.startswith("data:"):
                assert (path.parent / urldefrag(source)[0]).resolve().exists(), source


def test_every_method_has_a_page_with_its_equation_and_settings(site: dict[Path, Page]) -> None:
    texts = {path.stem: path.read_text() for path in site if path.parent.name == "methods"}
    home = {preset.method: name for name, preset in reversed(METHODS.items())}
    assert texts.keys() == set(home.values())
    for name, preset in METHODS.items():
        plain = html.unescape(re.sub(r"<[^>]+>", "", texts[home[preset.method]]))
        assert preset.method.formula in plain
        fields = {field.name for field in dataclasses.fields(preset.method)}
        assert all(f"method.{key}" in plain for key in fields)
        assert name in plain


def test_the_reference_has_what_the_package_gives_away(site: dict[Path, Page]) -> None:
    [page] = [text for path, text in site.items() if path.name == "api.html"]
    assert {"fedbnn.api.run", "fedbnn.api.compare", "fedbnn.export.load"} <= page.anchors
    assert {"fedbnn.api.Run.table", "fedbnn.export.Model.predict"} <= page.anchors
