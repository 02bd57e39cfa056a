# SPDX-License-Identifier: Apache-2.0
"""The documentation site: `make docs` builds it in out/docs from these pages and the docstrings, without a network."""

import ast
import enum
import inspect
import os
import pathlib
import re
import textwrap

from docutils import nodes
from sphinx.addnodes import toctree
from sphinx.domains.python import PyObject
from sphinx_design.shared import PassthroughTextElement

import kvjax
import kvjax.pools
import kvjax.tiers

DOCS = pathlib.Path(__file__).parent

project = "kvjax"
author = copyright = "the kvjax authors"
version = release = kvjax.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_markdown_builder",
]

# Pages: their cells run at each build, in a folder of their own, and print what they show
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 300
# CI runs the cells of the pages that were changed (`scripts/reached.py`), everybody else all.
if (only := os.environ.get("KVJAX_PAGES")) is not None:
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    nb_execution_excludepatterns = sorted(pages - {page.removeprefix("docs/") for page in only.split()})
    suppress_warnings = ["myst-nb.lexer"]  # of pages that did not run: they have no kernel to name a language
nb_merge_streams = True
nb_mime_priority_overrides = [("markdown", "image/png", 1), ("markdown", "text/plain", 2)]
nb_render_text_lexer = "text"
myst_heading_anchors = 3
highlight_language = "text"  # a block without a language is output, or a drawing
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_selector = "div:not(.output) > div.highlight > pre"

# Docstrings
default_role = "py:obj"  # single backticks: code, and a link where they name something that has a page
add_module_names = False
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_mock_imports = ["tunix"]
autodoc_preserve_defaults = True
autodoc_type_aliases = {name: name for name in ("ArrayLike", "DTypeLike", "jax.typing.DTypeLike")}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Columns", "params_style")]
napoleon_use_ivar = True  # attributes of a dataclass have their names from the class already

# Looks
html_theme = "sphinx_book_theme"
html_title = "kvjax"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navbar_persistent": [],
    "navbar_start": [],
    "navbar_center": [],
    "navbar_end": [],
}


def is_a_verb_as_method(what, obj):
    """Whether it is a method of a cache that has signature and docstring from a verb (`kvjax.checks.face`)."""
    verb = getattr(obj, "__wrapped__", None)
    is_function = verb is not None and "." not in verb.__qualname__  # a decorator of the method wraps another method
    return what == "method" and is_function and obj.__doc__ is verb.__doc__


def shorten(app, what, name, obj, options, lines):
    """Leaves out what another page says: a verb's arguments at a method, and the docstring of a constant's class."""
    del app, name, options
    if is_a_verb_as_method(what, obj):
        homes = (kvjax, kvjax.tiers, kvjax.pools, kvjax.serving)
        home = next(home.__name__ for home in homes if obj.__name__ in home.__all__)
        lines[1:] = ["", f"The arguments are those of `{home}.{obj.__name__}`.", ""]
    elif what in ("data", "attribute") and "\n".join(lines).strip() == inspect.getdoc(type(obj)):
        lines.clear()


def mark_untyped(app, what, name, obj, options, lines):
    """Marks results and properties as without types: napoleon reads one in front of a colon; signatures have them."""
    del app, name, obj, options
    if what in ("attribute", "data", "property") and lines:
        lines[0] = f": {lines[0]}"
    for number, line in enumerate(lines[:-1], 1):
        if line.strip() in ("Returns:", "Yields:"):
            lines[number] = re.sub(r"(?=\S)", ": ", lines[number], count=1)


def language_of(lines):
    """The language of an indented paragraph: a drawing has none."""
    try:
        ast.parse(textwrap.dedent("\n".join(lines)))
    except SyntaxError:
        return "text"
    return "python"


def mark_drawings(app, what, name, obj, options, lines):
    """Makes literal blocks of a docstring's indented paragraphs: code and drawings, as in Markdown."""
    del app, what, name, obj, options
    rest, marked, before = [line.rstrip() for line in lines], [], 0
    while rest:
        indent = len(rest[0]) - len(rest[0].lstrip())
        if indent >= before + 4 and marked and not marked[-1]:
            outside = (number for number, line in enumerate(rest) if line and not line.startswith(" " * (before + 1)))
            end = next(outside, len(rest))
            block, rest = rest[:end], rest[end:]
            marked += [f"{' ' * before}.. code-block:: {language_of(block)}", "", *block, ""]
        else:
            before = indent if rest[0] else before
            marked.append(rest.pop(0))
    lines[:] = marked


def mend_signature(app, what, name, obj, options, args, returns):
    """Leaves out the signature of an enum, writes aliases of types as they are, and a method's class for a state."""
    del app, options
    if isinstance(obj, enum.EnumType):
        return "", None
    aliases = re.compile(r"TypeAliasForwardRef\('([\w.]+)'\)")
    args, returns = (text and aliases.sub(r"\1", text) for text in (args, returns))
    if args:  # a default that is no expression would end the parsing of the others
        args = re.sub(r"<function (?:\w+\.)*(\w+)[^>]*>", r"\1", args.replace("<factory>", "..."))
    if args and str(getattr(obj, "__module__", "")).startswith("kvjax.serving."):  # kvjax.testing has another one
        args = re.sub(r"(?<![\w.])Request\b", "kvjax.serving.Request", args)
    if is_a_verb_as_method(what, obj):
        returns = returns.replace("CacheState", name.split(".")[-2])
    return args, returns


def skip_field_numbers(app, what, name, obj, skip, options):
    """Leaves out the fields of a NamedTuple that nothing describes: Python says of each which number it has."""
    del app, what, name, skip, options
    return True if (obj.__doc__ or "").startswith("Alias for field number") else None


def link_twin(app, pagename, templatename, context, doctree):
    """Names the Markdown twin of a page in its head."""
    del app, templatename
    if doctree is not None:
        twin = pagename.rpartition("/")[2]
        context["metatags"] += f'<link rel="alternate" type="text/markdown" href="{twin}.md">\n'


def first_sentence(doctree):
    """The beginning of a page's first paragraph."""
    paragraph = next(iter(doctree.findall(nodes.paragraph)), None)
    text = "" if paragraph is None else " ".join(paragraph.astext().split())
    return re.split(r"(?<=[.:]) ", text)[0].rstrip(":")


def drop_links_back(app, error):
    """Removes viewcode's links from a source to its description: they name the module that defines, not exports, it."""
    if error or app.builder.name != "html":
        return
    for path in (app.outdir / "_modules").rglob("*.html"):
        path.write_text(re.sub(r'<a class="viewcode-back".*?</a>', "", path.read_text()))


def mend_twin(app, page):
    """Leads the pictures of a Markdown twin to those of the site, and names the language of its cells."""
    path = app.outdir / f"{page}.md"
    images = "../" * page.count("/") + "_images"
    text = re.sub(r"(!\[[^]]*\])\((?:[^)]*/)?([^)/]+)\)", rf"\1({images}/\2)", path.read_text())
    path.write_text(text.replace("```ipython3\n", "```python\n"))


def finish_twins(app, error):
    """Mends the Markdown twins, and writes `llms.txt`, a list of them for programs that read the site."""
    if error or app.builder.name != "markdown":
        return
    for page in app.env.found_docs:
        mend_twin(app, page)
    root = app.env.get_doctree("index")
    lines = ["# kvjax", "", f"> {first_sentence(root)}"]
    for tree in root.findall(toctree):
        lines += ["", f"## {tree['caption']}", ""]
        for _, page in tree["entries"]:
            lines.append(f"- [{app.env.titles[page].astext()}]({page}.md): {first_sentence(app.env.get_doctree(page))}")
    (app.outdir / "llms.txt").write_text("\n".join(lines) + "\n")


def deal(app, env, docnames):
    """Deals pages out like cards: each process reads a run of the list, and pages that compile are neighbours in it."""
    del app, env
    docnames[:] = [name for first in range(4) for name in docnames[first::4]]


def setup(app):
    """Connects the functions above; those that change docstrings come before napoleon, which reads their sections."""
    for node in (nodes.abbreviation, PassthroughTextElement):  # the Markdown twins have their text alone
        app.add_node(node, override=True, markdown=(lambda *_: None, lambda *_: None))
    app.connect("env-before-read-docs", deal)
    app.connect("html-page-context", link_twin)
    app.connect("build-finished", drop_links_back)
    app.connect("build-finished", finish_twins)
    for change in (shorten, mark_untyped, mark_drawings):
        app.connect("autodoc-process-docstring", change, priority=400)
    app.connect("autodoc-process-signature", mend_signature)
    app.connect("autodoc-skip-member", skip_field_numbers)
    next(field for field in PyObject.doc_field_types if field.name == "variable").label = "Attributes"
