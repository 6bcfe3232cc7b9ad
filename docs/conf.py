"""Settings of the documentation site: `make docs` builds it, and `tests/test_docs.py` allows no warning."""

import contextlib
import io
import os
import re
import shlex
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.ext.intersphinx import InventoryAdapter

import lightning_gradavg
from lightning_gradavg.cli import main
from lightning_gradavg.verify.causes import CAUSES

ROOT = Path(__file__).resolve().parent.parent

project = "lightning-gradavg"
author = "The authors of lightning-gradavg"
version = release = lightning_gradavg.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
html_theme = "furo"
smartquotes = False  # advice of causes has code in plain text, which readers copy
html_title = f"{project} {version}"
html_copy_source = False
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]
copybutton_prompt_text = "$ "  # copies the commands of a console block, without their output
copybutton_exclude = ".linenos, .gp, .go"

myst_heading_anchors = 3

default_role = "code"  # docstrings are read in editors, too, and mark code with single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "fully-qualified"  # the short form leaves a `~` before names within a union
autodoc_typehints_description_target = "documented"
napoleon_use_ivar = True  # lists `Attributes:` as fields, without one entry for each
add_module_names = False

nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!lightning_gradavg).*"), ("py:.*", r"lightning_gradavg\.(?!\w+$).*")]
# The few names that signatures mention, committed so that the site builds without a network.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", "inventories/python.inv"),
    "torch": ("https://docs.pytorch.org/docs/stable", "inventories/torch.inv"),
    "lightning": ("https://lightning.ai/docs/pytorch/stable", "inventories/lightning.inv"),
}

PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/README.md": "examples.md",
}
"""The pages of files outside docs/, which such a page includes by the line `<!-- fill: FILE -->`."""

SHOWN = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".sbatch": "bash"}
"""Languages of the examples that the site lists."""

EXAMPLES = [
    path.relative_to(ROOT)
    for pattern in ("*.*", "[!d_]*/*.*")  # without the demo, which is a project of its own
    for path in sorted((ROOT / "examples").glob(pattern))
    if path.suffix in SHOWN and path.name != "__init__.py"
]

LINK = re.compile(r"\[(?P<text>[^]]+)]\((?!\w+:|#)(?P<file>[^)#\s]+)(?P<anchor>#[^)]*)?\)")


class Command(Directive):
    """`{command} plan --help` shows the command line `gradavg plan --help` and what it prints."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return a literal block."""
        os.environ["COLUMNS"] = "100"  # as wide as a block of the page
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
            main(shlex.split(self.arguments[0]))
        text = f"$ gradavg {self.arguments[0]}\n{printed.getvalue()}"
        return [nodes.literal_block(text, text, language="text")]


def site_link(file: str) -> str | None:
    """Return the link to a file of the repository within the site, or None if the site does not have it."""
    if file in PAGES:
        return PAGES[file]
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    return next((f"#{path}" for path in EXAMPLES if file in (str(path), str(path.parent))), None)


def fill_and_link(app: Any, page: str, source: list[str]) -> None:
    """Add to a page what is kept elsewhere, and turn links between files into links between pages."""
    text, folder = source[0], ROOT / "docs"
    if included := re.search(r"^<!-- fill: (\S+) -->$", text, re.MULTILINE):
        folder = (ROOT / included[1]).parent
        text = text.replace(included[0], (ROOT / included[1]).read_text("utf-8"))
    if page == "examples":
        text += "".join(
            f"\n({path})=\n## {path.relative_to('examples')}\n\n"
            f"```{{literalinclude}} ../{path}\n:language: {SHOWN[path.suffix]}\n```\n"
            for path in EXAMPLES
        )
    if page == "causes":
        text += "".join(
            f"\n## {name}\n\n**{cause.plain[:1].upper()}{cause.plain[1:]}.** {cause.text}\n\n*Do*: {cause.advice}.\n"
            for name, cause in CAUSES.items()
        )

    def linked(match: re.Match[str]) -> str:
        target = site_link(os.path.relpath(folder / match["file"], ROOT))
        return f"[{match['text']}]({target}{match['anchor'] or ''})" if target else match["text"]

    source[0] = LINK.sub(linked, text)


def link_pages(app: Any, what: str, name: str, subject: Any, options: Any, lines: list[str]) -> None:
    """Turn `docs/page.md` in a docstring into a link."""
    lines[:] = [re.sub(r"`{0,2}docs/(\w+)\.md`{0,2}", r":doc:`\1`", line) for line in lines]


def use_public_name(app: Any, env: Any, node: Any, content: Any) -> None:
    """Let `torch.nn.modules.module.Module` be `torch.nn.Module`, the name that torch documents."""
    *path, name = node.get("reftarget", "").split(".")
    documented = InventoryAdapter(env).main_inventory.get("py:class", {})
    public = [".".join([*path[:end], name]) for end in range(1, len(path) + 1)]
    node["reftarget"] = next((each for each in public if each in documented), node.get("reftarget"))


def setup(app: Any) -> None:
    """Connect to Sphinx."""
    app.add_directive("command", Command)
    app.connect("missing-reference", use_public_name, priority=400)  # before intersphinx looks it up
    app.connect("source-read", fill_and_link)
    app.connect("autodoc-process-docstring", link_pages)
