"""The documentation is run: every Python block of the README and of docs/ works as printed."""

from __future__ import annotations

import re
import runpy
from importlib import import_module
from inspect import signature
from itertools import takewhile
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.strategies import StrategyRegistry
from ranks import NEEDS_SHARDS_ON_CPU, run_script
from sphinx.search.en import SearchEnglish
from structure import JOURNEYS, travel

import lightning_gradavg
from lightning_gradavg import GradAvgStrategy
from lightning_gradavg._support.place import Place
from lightning_gradavg.rules import RULES, share_of
from lightning_gradavg.verify.causes import CAUSES

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("README.md"), *sorted(ROOT.glob("docs/*.md"))]
PUBLIC = {f"lightning_gradavg{name}" for name in ("", ".fabric", ".hooks", ".plan", ".rules", ".verify")}
TOLD = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
# What pyproject.toml puts into the source distribution, beside itself and the license.
SHIPPED = set(re.findall(r'"/([\w.]+)"', (ROOT / "pyproject.toml").read_text("utf-8")))
PYTHON = re.compile(r"^(?:<!-- no-run: ([^\n]+) -->\n)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def lines_before(block: re.Match[str]) -> int:
    return block.string.count("\n", 0, block.start(2))


def find_blocks() -> list[Any]:
    """Return a parameter of pytest for each Python block of all pages."""
    parameters = []
    for page in PAGES:
        for block in PYTHON.finditer(page.read_text("utf-8")):
            parameters.append(pytest.param(block, id=f"{page.name}:{lines_before(block)}", marks=marks_of(block)))
    return parameters


# A block with one of these words needs a release that is newer than the oldest ones supported.
NEWER = {
    "fully_shard": NEEDS_SHARDS_ON_CPU,
}


def marks_of(block: re.Match[str]) -> list[pytest.MarkDecorator]:
    """Return the marks that skip a block on older releases."""
    no_run, text = block.groups()
    if no_run:
        return []
    return [mark for word, mark in NEWER.items() if word in text]


BLOCKS = find_blocks()


@pytest.mark.parametrize("block", BLOCKS)
def test_python_blocks_run(block: re.Match[str], tmp_path: Path) -> None:
    """The block runs to its end in a process and a folder of its own; one that `no-run` precedes compiles."""
    no_run, text = block.groups()
    if no_run:
        compile(text, "block.py", "exec")
        return
    script = tmp_path / "block.py"
    # Empty lines keep the line numbers of the page in a traceback.
    script.write_text("\n" * lines_before(block) + text, "utf-8")
    code, printed = run_script(script)
    assert 0 == code, printed


@pytest.mark.full
def test_the_fabric_snippet_has_the_same_weights_on_more_devices(tmp_path: Path) -> None:
    """As its comment says: the snippet prints the same line on 1 device and on 2."""
    (snippet,) = [
        block[2]
        for block in PYTHON.finditer((ROOT / "docs/frameworks.md").read_text("utf-8"))
        if "import Fabric" in block[2]
    ]
    printed_weights = []
    for devices in (1, 2):
        script = tmp_path / f"on_{devices}.py"
        script.write_text(snippet.replace("devices=1,", f"devices={devices},"), "utf-8")
        code, printed = run_script(script)
        assert 0 == code, printed
        printed_weights.append(re.findall(r"^tensor\(.*", printed, re.MULTILINE))
    assert printed_weights[0] == printed_weights[1] != []


def test_every_python_block_is_found() -> None:
    assert len(BLOCKS) == sum(page.read_text("utf-8").count("```py") for page in PAGES) > 10


SEARCHES = {
    "effective batch size": "scaling",
    "loss is different on multiple GPUs": "faq",
    "sum or average": "averaging",
    "gradient accumulation is wrong": "averaging",
    "per token or per sequence loss": "reduction",
    "GRPO loss per prompt": "reduction",
    "DAPO token mean": "reduction",
    "DPO pairs": "reduction",
    "auxiliary loss mixture of experts": "reduction",
    "MoE balance loss": "reduction",
    "L2 penalty": "reduction",
    "EMA": "equivalence",
    "SWA WeightAveraging": "equivalence",
    "GAN two optimizers toggle_model": "equivalence",
    "code book": "equivalence",
    "queue MoCo": "equivalence",
    "DINO centre": "equivalence",
    "short last window": "equivalence",
    "StatefulDataLoader": "reproducible",
    "litData resume": "reproducible",
    "WebDataset resume": "reproducible",
    "elastic": "reproducible",
    "change number of GPUs mid-epoch": "reproducible",
    "torchdata StatefulDataLoader": "migrating",
    "WebDataset": "migrating",
    "litData": "migrating",
    "elastic training": "migrating",
    "rounding or a bug": "faq",
    "bfloat16 difference": "faq",
    "NCCL gloo different results": "faq",
    "resume mid-epoch reshuffles": "faq",
    "batch norm on shards": "faq",
    "rank without validation batch": "faq",
    "mean of batch sizes": "evaluation",
    "many ranks latency": "growth",
    "1,024 ranks overhead": "growth",
    "slow network cost": "growth",
    "average loss over tokens across gpus": "faq",
    "average loss over tokens FSDP2": "sharded",
    "resume with fewer gpus": "reproducible",
    "reproducible results multi gpu": "reproducible",
    "dropout augmentation shuffling": "randomness",
    "dropout different on each gpu": "randomness",
    "same masks on any number of processes": "randomness",
    "sanity check order": "randomness",
    "mixup": "randomness",
    "DataModule batch size": "datamodule",
    "LightningDataModule resume": "datamodule",
    "which fix keeps the curve of one gpu": "faq",
    "misspelt weight": "faq",
    "invalid strategy name": "faq",
    "pytorch_lightning import": "faq",
    "learning rate finder lr_find": "scaling",
    "LearningRateMonitor shows": "scaling",
    "Muon momentum resume": "scaling",
    "Optuna pruning trial.report": "faults",
    "DPO chosen rejected": "reduction",
    "buffers that count samples": "equivalence",
    "short last batch": "equivalence",
    "how much slower than DDP": "performance",
    "contrastive loss negatives from all gpus": "contrastive",
    "hang at the end of an epoch": "uneven",
    "keep the same batch size": "scaling",
    "replace DataParallel": "equivalence",
}
"""What people type, and a page that has to be among the results."""

THREADS = {
    # The first three are titles of the threads that this project began with, the others of public issues and posts.
    "Is average the correct way for the gradient in DistributedDataParallel with multi nodes?": "averaging",
    "Does DistributedDataParallel calculate the average gradient across each GPU or each node?": "averaging",
    "How to correctly average gradients across GPUs in PyTorch's distributed training?": "averaging",
    # Lightning-AI/pytorch-lightning issues 6789, 7233, 16827 and 20249
    "DDP with 2 GPUs doesn't give same results as 1 GPU with the same effective batch size": "equivalence",
    "DDP - Worse performance with 2 GPUs compared to 1.": "which_run",
    "Validation has an impact on training": "randomness",
    "Shuffle order is the same across runs when using strategy='ddp'": "randomness",
    # discuss.pytorch.org 160455 and 47152
    "Big accuracy gap with DDP": "faq",
    "Training performance degrades with DistributedDataParallel": "faq",
    # huggingface/accelerate issue 2010
    "How to set different seed for DDP data sampler for every epoch": "randomness",
    # Questions that were typed before the pages were read.
    "loss is different when i use more gpus": "faq",
    "variable length sequences gradient accumulation wrong loss": "averaging",
    "validation loss not the same on 2 gpus": "evaluation",
    "padding tokens change loss multi gpu": "equivalence",
    "sum gradients instead of averaging lightning": "averaging",
    "keep total batch size fixed when adding gpus": "scaling",
    "last batch smaller than number of gpus": "uneven",
    "same dropout mask on every gpu": "randomness",
    "replace DataParallel with ddp same results": "equivalence",
    "train on 8 gpus continue on 1": "reproducible",
    "one rank gets nan loss": "faults",
    "linear scaling rule learning rate number of gpus": "scaling",
    "simclr negatives from other gpus": "contrastive",
    "batchnorm statistics across gpus": "equivalence",
    "iterable dataset unequal batches hang": "uneven",
    "optuna pruning multi gpu": "faults",
    "learning rate finder ddp": "scaling",
}
"""What people wrote who have not read the pages, and a page that has to be among the results."""


def indexed(text: str) -> set[str]:
    """Return the words of a text as the site's search indexes them."""
    english = SearchEnglish({})
    return {english.stem(word) for word in english.split(text.lower()) if word not in english.stopwords}


@pytest.mark.parametrize(("search", "page"), [*SEARCHES.items(), *THREADS.items()])
def test_a_search_finds_its_page(search: str, page: str) -> None:
    """The page has every word of the search: the site's search lists pages that have all of them."""
    assert set() == indexed(search) - indexed((ROOT / "docs" / f"{page}.md").read_text("utf-8"))


def test_the_pictures_are_drawn_by_their_script() -> None:
    """Its boxes are as wide as their text, and no picture is wider than a phone."""
    pictures = runpy.run_path(str(ROOT / "docs/diagrams.py"))["PICTURES"]
    assert len(pictures) == 6
    for file, draw in pictures.items():
        drawn = draw()
        assert drawn == (ROOT / "docs/images" / file).read_text("utf-8"), file
        assert 'width="380"' in drawn


@pytest.mark.parametrize("cause", ["mean of means", "counts", "sum loss", "batch norm", "padding", "short window"])
def test_the_recipes_are_those_of_verify(cause: str) -> None:
    """The FAQ's first column has what verify advises, but for the data, of which the second column has it."""
    rows = cells_of(
        "faq.md", "| verify's [cause](causes.md) | keeps `batch_size` per process | keeps the curve of one GPU |"
    )
    (row,) = [cells for cells in rows if cause in cells[0].split(", ")]
    words = re.findall(r"`([^`]*)`", row[1] or row[2])
    advice = f"{CAUSES[cause].advice} {CAUSES[cause].code}"
    assert words
    assert any(word.removesuffix("()").removeprefix("GradAvgStrategy(").rstrip(")") in advice for word in words), advice


@pytest.mark.full
def test_the_site_is_built(tmp_path: Path) -> None:
    """Every link and name of the site resolves: a warning is an error. Causes, examples and types have their links."""
    options = ["--fail-on-warning", "--keep-going", "--quiet", str(ROOT / "docs"), str(tmp_path / "site")]
    script = tmp_path / "build.py"
    script.write_text(f"from sphinx.cmd.build import main\nraise SystemExit(main({options!r}))\n", "utf-8")
    code, printed = run_script(script)
    assert 0 == code, printed
    first, examples, api, causes = (
        (tmp_path / "site" / f"{page}.html").read_text("utf-8") for page in ("index", "examples", "api", "causes")
    )
    assert 'href="https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module"' in api
    assert all(f">{cause}<" in causes for cause in CAUSES)
    assert "equivalent_to=&quot;single_device&quot;" in causes  # straight quotes, as readers copy it
    assert 'href="examples.html"' in first
    assert "Why does the same script train a different model" in examples


def test_one_version() -> None:
    """The citation, the newest released heading of the changelog and the package name one version and one day."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    headings = re.findall(r"^## \[(\d\S*)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert lightning_gradavg.__version__ == str(citation["version"])
    assert headings[0] == (str(citation["version"]), str(citation["date-released"]))
    assert f'license = "{citation["license"]}"' in (ROOT / "pyproject.toml").read_text("utf-8").splitlines()
    assert "CITATION.cff" in SHIPPED
    assert [] == [name for name in SHIPPED if not (ROOT / name).exists()]


def test_the_reference_is_the_public_interface() -> None:
    page = (ROOT / "docs" / "api.md").read_text("utf-8")

    assert set(lightning_gradavg.__all__) <= set(re.findall(r"^\.\. auto\w+:: (\w+)$", page, re.MULTILINE))


def cells_of(page: str, head: str) -> list[list[str]]:
    """Return the cells of each row of a table of a page, by its first line; without the line of dashes."""
    _, _, text = (ROOT / "docs" / page).read_text("utf-8").partition(f"{head}\n")
    _, *lines = takewhile(bool, text.splitlines())
    rows = []
    for line in lines:
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_the_table_of_rules_is_that_of_the_code() -> None:
    """docs/reduction.md has every rule, its numbers w and z, and its gradient."""
    place = Place(rank=0, world_size=6, node=0, ranks_on_node=2)
    numbers = {"1": 1.0, "n": 5.0, "1/L": 1 / 2, "1/W": 1 / 6}
    head = "| `reduction=` | w | z | gradient | use it where each rank's loss is |"
    rows = {row[0].split('"')[1]: row[1:4] for row in cells_of("reduction.md", head)}

    assert list(RULES) == list(rows)
    for name, (w, z, formula) in rows.items():
        assert (numbers[w], numbers[z]) == tuple(share_of(RULES[name], place, 5.0))
        assert formula.replace("n g", "n * g") == RULES[name].formula


def test_every_claim_has_a_test() -> None:
    claims = [row[1].strip("`").split("::") for row in cells_of("architecture.md", "| claim | test |")]

    assert len(claims) >= 10
    assert [] == [claim for claim in claims if f"def {claim[1]}(" not in (ROOT / claim[0]).read_text("utf-8")]


def test_the_ledger_has_every_file_and_a_user_for_every_mechanism() -> None:
    """Its last column names the files; a path that ends with a slash stands for all files below it."""
    package = ROOT / "lightning_gradavg"
    mechanisms = cells_of("architecture.md", "| mechanism | who needs it | without it | where |")
    shared = cells_of("architecture.md", "| what | where |")
    listed = {path for row in [*mechanisms, *shared] for path in re.findall(r"`([^`]+)`", row[-1])}
    files = set()
    for file in package.rglob("*.py"):
        path = file.relative_to(package).as_posix()
        folders = [f"{parent.as_posix()}/" for parent in file.relative_to(package).parents]
        # The other files of a folder say what `__init__.py` collects.
        if listed.isdisjoint(folders) and (file.name != "__init__.py" or path in listed):
            files.add(path)

    hint = (
        "the tables below 'The ledger' in docs/architecture.md: who needs what this file does? Give it a row, or take"
    )
    assert set() == files - listed, f"add these files to {hint} it out"
    gone = {path for path in listed if not (package / path).exists()}
    assert set() == gone, "take these paths out of the tables below 'The ledger' in docs/architecture.md"

    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    reports = dict(re.findall(r"^\[([^\]]+)\]: (https://\S+)$", page, re.MULTILINE))
    users = {row[0]: re.findall(r"\[([^\]]+)\]", row[1]) for row in mechanisms}
    assert [] == [what for what, labels in users.items() if not labels], "each mechanism needs a report of a user"
    assert set(reports) == {label for labels in users.values() for label in labels}, (
        "the reports at the end of the page"
    )
    for label, link in reports.items():
        name, _, number = label.partition("#")
        assert not number or re.search(rf"/[\w.-]*{name.lower()}/issues/{number}$", link.lower()), label


@pytest.mark.parametrize("name", JOURNEYS)
def test_journeys_go_no_further_than_documented(world, name) -> None:
    """On both ranks a journey passes no more files than docs/architecture.md says, and goes hardly further.

    Which calls gloo's threads take over differs from run to run.
    """
    ((_, files, calls),) = [row for row in cells_of("architecture.md", "| journey | files | calls |") if row[0] == name]
    for calls_of_rank in world(2).run(travel, name):
        assert 0 < len({call.target for call in calls_of_rank}) <= int(files)
        assert len(calls_of_rank) <= 1.1 * int(calls)


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
    assert len(readme.split()) <= 800


@pytest.mark.parametrize("page", [*PAGES, *TOLD], ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    """A link to a file of the repository names one that exists, and that is in the source distribution, too."""
    text = re.sub(r"^( *)(`{3,}|~{3,}).*?^ *\2 *$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\((?!\w+:|#)([^)\s#]+)", text)

    assert [] == [target for target in targets if not (page.parent / target).exists()]
    found = [(page.parent / target).resolve().relative_to(ROOT).parts[0] for target in targets]
    assert set() == {page.relative_to(ROOT).parts[0], *found} - SHIPPED
