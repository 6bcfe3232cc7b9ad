"""Settings of the documentation site: `make docs` builds it, `tests/test_docs.py` holds it to no warning."""

import contextlib
import io
import os
import re
import shlex
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

import lightning_gradavg
from lightning_gradavg.cli import main

project = "lightning-gradavg"
author = "The authors of lightning-gradavg"
version = release = lightning_gradavg.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"{project} {version}"
html_copy_source = False

myst_heading_anchors = 3

default_role = "code"  # docstrings are read in editors, too, and mark code by single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "fully-qualified"  # the short form leaves a `~` before names within a union
autodoc_typehints_description_target = "documented"
napoleon_use_ivar = True  # `Attributes:` as a list of fields, without an entry of its own for each
add_module_names = False

nitpicky = True
# No inventory of another project is fetched: the site builds without a network.
nitpick_ignore_regex = [("py:.*", r"(?!lightning_gradavg).*"), ("py:.*", r"lightning_gradavg\.(?!\w+$).*")]


class Command(Directive):
    """`{command} plan --help` shows the command line `gradavg plan --help` and what it prints."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return a literal block."""
        os.environ["COLUMNS"] = "100"
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
            main(shlex.split(self.arguments[0]))
        text = f"$ gradavg {self.arguments[0]}\n{printed.getvalue()}"
        return [nodes.literal_block(text, text, language="text")]


def link_pages(app: Any, what: str, name: str, subject: Any, options: Any, lines: list[str]) -> None:
    """Turn `docs/page.md` in a docstring into a link."""
    lines[:] = [re.sub(r"`{0,2}docs/(\w+)\.md`{0,2}", r":doc:`\1`", line) for line in lines]


def offer_files(app: Any, page: str, source: list[str]) -> None:
    """Turn links to Markdown files that are no pages, as `../CHANGELOG.md`, into downloads."""
    source[0] = re.sub(r"\[`?([^]`]+)`?]\((\.\./[^)#\s]+\.md)(#[^)]*)?\)", r"{download}`\1 <\2>`", source[0])


def setup(app: Any) -> None:
    """Connect to Sphinx."""
    app.add_directive("command", Command)
    app.connect("source-read", offer_files)
    app.connect("autodoc-process-docstring", link_pages)
