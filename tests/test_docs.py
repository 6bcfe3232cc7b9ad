"""The documentation is run: every Python block of the README and of docs/ works as printed."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from itertools import takewhile
from multiprocessing import get_context
from operator import attrgetter
from pathlib import Path

import pytest
from lightning.pytorch.strategies import StrategyRegistry
from ranks import ensure_forkserver
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
FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}) *(?P<language>[\w+-]*)[^\n]*$")
NO_RUN = re.compile(r"^\s*<!-- *no-run: *(?P<reason>.*?) *-->\s*$")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line of its first line of text, and why it is not run, if so."""

    language: str
    text: str
    line: int
    no_run: str | None = None


def blocks_of(page: str) -> list[Block]:
    """Return the fenced blocks of a Markdown page.

    A line `<!-- no-run: reason -->` above a block, with nothing but empty lines between, keeps it from being run.
    """
    blocks: list[Block] = []
    lines = page.splitlines()
    number, no_run = 0, None
    while number < len(lines):
        opening = FENCE.match(lines[number])
        if opening is None:
            marker = NO_RUN.match(lines[number])
            if marker is not None:
                no_run = marker["reason"]
            elif lines[number].strip():
                no_run = None
            number += 1
            continue
        closing = re.compile(rf" *{opening['fence'][0]}{{{len(opening['fence'])},}} *$")
        end = number + 1
        while end < len(lines) and not closing.match(lines[end]):
            end += 1
        if end == len(lines):
            raise ValueError(f"the block that opens on line {number + 1} is never closed")
        text = "".join(line.removeprefix(opening["indent"]) + "\n" for line in lines[number + 1 : end])
        blocks.append(Block(opening["language"].lower(), text, number + 2, no_run))
        number, no_run = end + 1, None
    return blocks


PYTHON_BLOCKS = [
    pytest.param(page, block, id=f"{page.relative_to(ROOT)}:{block.line}")
    for page in PAGES
    for block in blocks_of(page.read_text("utf-8"))
    if block.language in {"python", "py"}
]


@pytest.mark.parametrize(("page", "block"), PYTHON_BLOCKS)
def test_python_blocks_run(page: Path, block: Block, tmp_path: Path) -> None:
    """The block runs to its end in a process and a folder of its own; one marked as not run at least compiles.

    The process is forked from one that has imported what is heavy.
    """
    if block.no_run is not None:
        assert block.no_run, f"{page.name}:{block.line}: say why the block is not run, <!-- no-run: reason -->"
        compile(block.text, f"{page.name}:{block.line}", "exec")
        return
    script = tmp_path / "block.py"
    # Empty lines keep the line numbers of the page in a traceback.
    script.write_text("\n" * (block.line - 1) + block.text, "utf-8")

    run(script, f"{page.relative_to(ROOT)}:{block.line}")


def run(script: Path, name: str) -> None:
    """Run a script to its end in a process of its own, and fail with what it printed if it fails."""
    ensure_forkserver()
    output = script.with_name("output.txt")
    process = get_context("forkserver").Process(target=run_as_main, args=(script, output))
    process.start()
    process.join(110)
    process.kill()
    process.join()

    assert process.exitcode == 0, f"{name}\n{output.read_text('utf-8')}"


def run_as_main(script: Path, output: Path) -> None:
    """Run a script as if Python had been started with it, in its folder; write there what it prints."""
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(script.parent)
    os.environ.update({"MPLBACKEND": "agg", "PYTHONPATH": str(ROOT)})
    sys.argv[:], sys.path[0] = [str(script)], str(script.parent)
    runpy.run_path(str(script), run_name="__main__")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the built site, of which every link and name resolves: a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    script = folder / "build.py"
    options = ["--fail-on-warning", "--keep-going", "--quiet", str(ROOT / "docs"), str(folder / "site")]
    script.write_text(f"from sphinx.cmd.build import main\nraise SystemExit(main({options!r}))\n", "utf-8")
    run(script, "sphinx-build")
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
    assert "Why does the same script train another model" in examples
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

    assert {name for name in StrategyRegistry if name.startswith("gradavg")} == set(
        re.findall(r"`(gradavg_?\w*)`", names)
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


def test_blocks_are_read_as_written() -> None:
    """Language, text, line, indentation, longer fences and the reason not to run are all kept."""
    page = "\n".join(
        [
            *("Text", "```python", "a = 1", "```"),
            *("<!-- no-run: needs a GPU -->", "", "```python", "b", "```", "", "```console", "$ make demo", "```"),
            *("<!-- no-run: not next to a block -->", "Text"),
            *("1. Item", "   ```py", "   if c:", "       d", "   ```"),
            *("````md", "```python", "```", "````"),
        ]
    )

    assert [
        Block("python", "a = 1\n", 3),
        Block("python", "b\n", 8, "needs a GPU"),
        Block("console", "$ make demo\n", 12),
        Block("py", "if c:\n    d\n", 18),
        Block("md", "```python\n```\n", 22),
    ] == blocks_of(page)


def test_a_block_that_is_never_closed_is_an_error() -> None:
    """An open fence would swallow the rest of the page, and every test of it."""
    with pytest.raises(ValueError, match="opens on line 2 is never closed"):
        blocks_of("Text\n```python\na = 1\n")
