"""The documentation is run: every Python block of the README and of docs/ works as printed."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from importlib import import_module
from inspect import signature
from itertools import takewhile
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import StrategyRegistry
from scripts import run_script
from sphinx.search.en import SearchEnglish
from structure import MODULES, sizes

import lightning_gradavg
from lightning_gradavg import GradAvgStrategy, Place
from lightning_gradavg.rules import RULES
from lightning_gradavg.verify.report import CAUSES

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("README.md"), *sorted(ROOT.glob("docs/*.md"))]
PUBLIC = {f"lightning_gradavg{name}" for name in ("", ".fabric", ".hooks", ".plan", ".rules", ".verify")}
TOLD = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
# What pyproject.toml puts into the source distribution, beside itself and the license.
SHIPPED = set(re.findall(r'"/([\w.]+)"', (ROOT / "pyproject.toml").read_text("utf-8")))
PYTHON = re.compile(r"^(?:<!-- no-run: ([^\n]+) -->\n)?```python\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks_of(page: Path) -> Iterator[Any]:
    """Yield the Python blocks of a page: the lines before it, its text, and why it is not run, if so."""
    text = page.read_text("utf-8")
    for block in PYTHON.finditer(text):
        lines = text[: block.start("text")].count("\n")
        yield pytest.param(page, lines, block["text"], block[1], id=f"{page.name}:{lines}")


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


@pytest.mark.parametrize(("page", "lines", "text", "no_run"), BLOCKS)
def test_python_blocks_run(page: Path, lines: int, text: str, no_run: str | None, tmp_path: Path) -> None:
    """The block runs to its end in a process and a folder of its own; one that `no-run` precedes compiles."""
    script = tmp_path / "block.py"
    # Empty lines keep the line numbers of the page in a traceback.
    script.write_text("\n" * lines + text, "utf-8")
    if no_run:
        compile(script.read_text("utf-8"), page.name, "exec")
        return
    code, printed = run_script(script)
    assert 0 == code, f"{page.name}:{lines + 1}\n{printed}"


def test_every_python_block_is_found() -> None:
    assert len(BLOCKS) == sum(page.read_text("utf-8").count("```py") for page in PAGES) > 10


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the built site, of which every link and name resolves: a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    script = folder / "build.py"
    options = ["--fail-on-warning", "--keep-going", "--quiet", str(ROOT / "docs"), str(folder / "site")]
    script.write_text(f"from sphinx.cmd.build import main\nraise SystemExit(main({options!r}))\n", "utf-8")
    code, printed = run_script(script)
    assert 0 == code, printed
    return folder / "site"


SEARCHES = {
    "effective batch size": "scaling",
    "total batch": "scaling",
    "loss does not match": "faq",
    "loss is different on multiple GPUs": "faq",
    "sum or average": "averaging",
    "sum or mean": "averaging",
    "gradient accumulation is wrong": "averaging",
    "DeepSpeed": "migrating",
    "Accelerate": "frameworks",
    "Transformers Trainer": "frameworks",
    "FSDP": "sharded",
    "SLURM": "clusters",
}
"""What people type, and the page that has to be among the results; the search wants every word to be on it."""


def test_a_search_finds_its_page(site: Path) -> None:
    """The index of the built site has every word of a search at the page that answers it."""
    index = json.loads(re.sub(r"^Search\.setIndex\(|\)$", "", (site / "searchindex.js").read_text("utf-8")))
    english = SearchEnglish({})

    def pages_with(word: str) -> set[str]:
        found: list[int] = []
        for table in (index["terms"], index["titleterms"]):
            places = table.get(english.stem(word), [])
            found += places if isinstance(places, list) else [places]
        return {index["docnames"][place] for place in found}

    missed = {
        f"{search}: no {word!r} in {page}"
        for search, page in SEARCHES.items()
        for word in search.lower().split()
        if word not in english.stopwords and page not in pages_with(word)
    }
    assert set() == missed


def test_pages_link_to_pages(site: Path) -> None:
    """Links lead to pages of the site and to other projects' types; there are no downloads."""
    first, examples, api, causes = (
        (site / f"{page}.html").read_text("utf-8") for page in ("index", "examples", "api", "causes")
    )
    assert 'href="https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module"' in api
    assert all(f">{cause}<" in causes for cause in CAUSES)
    assert 'href="examples.html"' in first
    assert 'href="changelog.html"' in first
    assert "Why does the same script train a different model" in examples
    assert not (site / "_downloads").exists()


def test_diagrams_are_what_their_script_draws() -> None:
    """`python docs/diagrams.py` writes them as they stand in docs/images; a test of the cost model draws the other."""
    pictures = runpy.run_path(str(ROOT / "docs" / "diagrams.py"))["PICTURES"]

    assert {name: draw() for name, draw in pictures.items()} == {
        path.name: path.read_text("utf-8") for path in (ROOT / "docs" / "images").glob("averaging_*.svg")
    }


def test_the_reference_is_the_public_interface() -> None:
    """docs/api.md describes every name of `from lightning_gradavg import *`."""
    page = (ROOT / "docs" / "api.md").read_text("utf-8")

    assert set(lightning_gradavg.__all__) <= set(re.findall(r"^\.\. auto\w+:: (\w+)$", page, re.MULTILINE))


def cells_of(page: str, head: str) -> list[list[str]]:
    """Return the rows of the table of a page that has this head."""
    lines = (ROOT / "docs" / page).read_text("utf-8").partition(f"{head}\n")[2].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in takewhile(bool, lines)][1:]


def test_the_table_of_rules_is_that_of_the_code() -> None:
    """docs/reduction.md has every rule, its numbers w and z, and its gradient."""
    place = Place(rank=0, world_size=6, node=0, ranks_on_node=2)
    numbers = {"1": 1.0, "n": 5.0, "1/L": 1 / 2, "1/W": 1 / 6}
    head = "| `reduction=` | w | z | gradient | use it where each rank's loss is |"
    rows = {row[0].split('"')[1]: row[1:4] for row in cells_of("reduction.md", head)}

    assert list(RULES) == list(rows)
    for name, (w, z, formula) in rows.items():
        assert (numbers[w], numbers[z]) == tuple(map(float, RULES[name].share(place, 5.0)))
        assert formula.replace("n g", "n * g") == RULES[name].formula


def test_every_claim_has_a_test() -> None:
    """docs/architecture.md names for each claim a test that exists."""
    claims = [row[1].strip("`").split("::") for row in cells_of("architecture.md", "| claim | test |")]

    assert len(claims) >= 10
    assert [] == [claim for claim in claims if f"def {claim[1]}(" not in (ROOT / claim[0]).read_text("utf-8")]


def test_the_stated_size_is_that_of_the_package() -> None:
    """docs/architecture.md states files, lines and branches within a tenth."""
    ((_, *stated),) = cells_of("architecture.md", "| | files | lines | branches per 100 lines of code |")
    found = list(sizes().values())
    branches = 100 * sum(size.branches for size in found) / sum(size.code for size in found)

    assert pytest.approx([len(MODULES), sum(size.lines for size in found), branches], rel=0.1) == [*map(float, stated)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_what_can_be_imported(page: Path) -> None:
    """No page imports a private module, and every name behind `lightning_gradavg.` exists."""
    text = page.read_text("utf-8")
    imported = set(re.findall(r"(?:from|import) (lightning_gradavg[\w.]*)", text))
    assert set() == imported - PUBLIC
    if page.name != "api.md":  # it names the classes of what functions return
        for name in set(re.findall(r"lightning_gradavg\.[\w.]*\w(?![\w/])", text)):
            module = max((module for module in PUBLIC if f"{name}.".startswith(f"{module}.")), key=len)
            attrgetter(name.removeprefix(module).strip(".") or "__name__")(import_module(module))


def test_the_pages_name_what_there_is() -> None:
    """The table of registered names is that of the package; the README's options exist, and it is short."""
    readme, names = ((ROOT / page).read_text("utf-8") for page in ("README.md", "docs/select.md"))

    table = "".join(re.findall(r"^\|.*", names, re.MULTILINE))
    assert {name for name in StrategyRegistry if name.startswith("gradavg")} == set(
        re.findall(r"`(gradavg_?\w*)`", table)
    )
    options = set(re.findall(r"GradAvgStrategy\((\w+)=", readme))
    assert {"equivalent_to", "reduction"} <= options <= set(signature(GradAvgStrategy).parameters)
    assert len(readme.split()) <= 900


@pytest.mark.parametrize("page", [*PAGES, *TOLD], ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    """A link to a file of the repository names one that exists, and that is in the source distribution, too."""
    text = re.sub(r"^( *)(`{3,}|~{3,}).*?^ *\2 *$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\((?!\w+:|#)([^)\s#]+)", text)

    assert [] == [target for target in targets if not (page.parent / target).exists()]
    found = [(page.parent / target).resolve().relative_to(ROOT).parts[0] for target in targets]
    assert set() == {page.relative_to(ROOT).parts[0], *found} - SHIPPED
