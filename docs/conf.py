"""The documentation as a site: `python -m sphinx -c docs . build/site`, then open `build/site/docs/index.html`.

The source folder is the repository, so that pages link to each other as on any code host. Nothing is fetched.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

project = "dataproto"
html_title = project
root_doc = "docs/index"
include_patterns = ["docs/**", "benchmarks/RESULTS.md", "CHANGELOG.md"]
extensions = [
    "sphinx.ext.autodoc",
    "docstrings",
    "option_tables",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_nb",
]

# Docstrings: Google's sections, single backticks as links where there is a target, types in the signature.
default_role = "py:obj"
autodoc_default_options = {
    "members": True,
    "inherited-members": "Module, Exception, BaseException, tuple, dict",  # but those of these classes
    "no-value": True,
}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
napoleon_use_rtype = False
napoleon_use_ivar = True
suppress_warnings = ["ref.python"]  # a word in backticks that names attributes of several classes

myst_heading_anchors = 3
nb_execution_mode = "off"  # a test runs the notebook; its outputs are committed

html_theme = "furo"
html_static_path = ["static"]  # beside this file
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = html_show_sphinx = False


def setup(app):
    app.connect("source-read", show_program)
    app.connect("html-page-context", share_tree, priority=400)  # before the theme asks for the tree


def show_program(app, page, source):
    """Adds a program at the end of the page that describes it."""
    if page == "docs/custom_recipe":
        source[0] += "\n## The program\n\n```{literalinclude} custom_recipe.py\n:language: python\n```\n"


TREES = {}


def share_tree(app, page, template, context, doctree):
    """Makes the tree of pages once for all source files of a depth: for each it took a third of the time of the site."""
    plain = context["toctree"]

    def tree(**options):
        key = (page.count("/"), *sorted(options.items()))
        if key not in TREES:
            TREES[key] = plain(**options)
        return TREES[key]

    if page.startswith("_modules/"):
        context["toctree"] = tree
