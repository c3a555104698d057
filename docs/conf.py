"""Sphinx configuration: Markdown pages, the furo theme, API pages from docstrings."""

import devplace

project = "devplace"
author = "the devplace authors"
copyright = f"2026, {author}"
version = release = devplace.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"devplace {version}"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Complexity", "Source"]
