"""The site: `make docs` builds it from these pages and the docstrings, without network."""

import sys
from pathlib import Path

import maxmoe

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER / "extensions"))

project = "maxmoe"
author = "the authors of maxmoe"
copyright = author  # noqa: A001, the name that Sphinx asks for
version = release = maxmoe.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_nb",
    "sphinx_copybutton",
    "sphinx_design",
    "mathml",
    "docstrings",
    "messages",
]
exclude_patterns = ["extensions"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb", ".rst": "restructuredtext"}

# Markdown
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks are stored with their outputs; the tests execute them


# References: everything must lead somewhere, but for names of other libraries.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"TypeAlias|(torch|typing|contextlib|collections|datetime|pathlib|numpy)\..*"),
    (r"py:.*", r"Figure|(transformers|matplotlib|lightning)\..*|maxmoe\.expert_load\.history\.(SummaryWriter|Run)"),
    # Base classes without names of their own, type variables.
    (r"py:.*", r"maxmoe\.(_torch\w*\..*|nn\.\w+\.(InProcess|FeedForwardLayer|[CD]))"),
    (r"py:.*", r"maxmoe\.(parallel\.dispatch\.strategy\.S|config\.components\.C)"),
    # Sphinx cuts a signature with the default <factory> at each comma.
    (r"py:class", r"tuple\[str"),
]

# Docstrings
default_role = "py:obj"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_preprocess_types = False

# HTML
html_theme = "furo"
html_title = f"maxmoe {release}"
html_math_renderer = "mathml"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1b6ca8", "color-brand-content": "#1b6ca8"},
    "dark_css_variables": {"color-brand-primary": "#8fbce6", "color-brand-content": "#8fbce6"},
}
copybutton_exclude = ".linenos, .gp, .go"
