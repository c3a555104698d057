"""Sphinx configuration: Markdown pages, the furo theme, API pages from docstrings.

The site has a folder for each version; the page beside them lists them, the newest first. A
version's pages are added to a site by building into it: `make docs SITE=folder`.
"""

import re
from pathlib import Path

import devplace

project = "devplace"
author = "the devplace authors"
copyright = f"2026, {author}"
version = release = devplace.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
templates_path = ["_templates"]
html_theme = "furo"
html_title = f"devplace {version}"
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "versions.html",
        "sidebar/scroll-end.html",
    ]
}

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Complexity", "Source"]


def setup(app):
    """Have the list of versions written once the pages are there."""
    app.connect("build-finished", list_versions)


def list_versions(app, exception):
    """Write the site's first page: every folder beside this one with pages of a version."""
    if exception is not None or app.builder.name != "html":
        return
    site = Path(app.outdir).parent
    found = {page.parent.name for page in site.glob("*/objects.inv")} | {version}
    numbers = sorted(found, key=lambda name: [int(n) for n in re.findall("[0-9]+", name)])
    links = "\n".join(f'<li><a href="{n}/index.html">{n}</a></li>' for n in reversed(numbers))
    newest = f"{numbers[-1]}/index.html"
    (site / "index.html").write_text(
        f'<!doctype html>\n<meta charset="utf-8">\n<title>devplace: versions</title>\n'
        f'<p>Documentation of devplace: <a href="{newest}">newest version</a></p>\n'
        f"<ul>\n{links}\n</ul>\n"
    )
