"""A report as one HTML document that needs no network."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePath
from urllib.parse import quote

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from .display_html import rebuild_html
from .document import PageSection, Part, clean_line

# Whatever got past the escaping could not load or run anything but pictures that lie beside the page.
FRAME_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
POLICY = f"{FRAME_POLICY} 'self' file:"
FRAME_HEAD = (
    f'<!doctype html><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{FRAME_POLICY}">'
)
PHOTOS = (".png", ".jpg", ".jpeg", ".gif", ".webp")
PICTURES = (*PHOTOS, ".svg")  # An image in a page runs and fetches nothing, not even SVG.
# Files that run nothing when a browser opens them. A page of its own can: .svg, .html, .xhtml, .xml, .mht, .pdf, and
# those of a type that the browser guesses from their content.
LINKED = (*PHOTOS, ".txt", ".csv", ".json")
TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{{ policy }}">
<meta name="viewport" content="width=device-width">
<title>{{ title | clean }}</title>
<style>
:root { color-scheme: light dark; --ink: #1c2430; --paper: #fff; --edge: #dfe4ea; --head: #f4f6f8; --best: #e4f5e6; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dde3ea; --paper: #161b22; --edge: #39434f; --head: #212830; --best: #1d3b26; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto; }
th, td { text-align: left; padding: .25rem .8rem; border-bottom: 1px solid var(--edge); vertical-align: top; }
th { background: var(--head); } tr.best td { background: var(--best); font-weight: 600; }
iframe { width: 100%; height: 20rem; border: 1px solid var(--edge); background: #fff; resize: vertical; }
pre { background: var(--head); padding: .8rem; overflow-x: auto; } img { max-width: 100%; height: auto; }
</style>
</head>
<body>
{% for kind, part in parts %}
{% if kind == "Heading" %}
<h{{ part.level }}>{{ part.text | clean }}</h{{ part.level }}>
{% elif kind == "Text" %}
<p>{{ part.text | clean }}</p>
{% elif kind == "Table" %}
<table>
<thead><tr>{% for cell in part.header %}<th>{{ cell | clean }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in part.rows %}
<tr{% if loop.index0 == part.best %} class=best{% endif %}>
{%- for cell in row %}<td>{{ cell | clean }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
{% elif kind == "Picture" %}
<p><img src="{{ part.data_url }}" alt="{{ part.alt | clean }}"></p>
{% elif kind == "Image" %}
<p><img src="{{ part.data_url }}" alt="{{ part.alt | clean }}"></p>
{% elif kind == "Markup" %}
{# Sandboxed without exceptions: no script, form, window or origin of the page's. The page's policy holds inside. #}
<iframe sandbox loading="lazy" title="{{ part.alt | clean }}" srcdoc="{{ part.html | frame }}"></iframe>
{% elif kind == "Verbatim" %}
<pre>{{ part.excerpt }}</pre>
{% elif kind == "Files" %}
<ul>
{% for path in part.paths %}
{% set name, link, picture = locate(path) %}
<li>{% if link %}<a href="{{ link }}">{{ name | clean }}</a>{% else %}{{ name | clean }}{% endif %}
{% if picture %}
<br><img loading="lazy" src="{{ picture }}" alt="{{ name | clean }}">
{% endif %}
</li>
{% endfor %}
</ul>
{% endif %}
{% endfor %}
</body>
</html>
"""


def render_html(parts: Iterable[Part], title: str, folder: str = "") -> str:
    """The parts as one HTML document, for a file in `folder`: to files below that it has links that move with it."""
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    environment.filters |= {"clean": clean_line, "frame": lambda text: FRAME_HEAD + rebuild_html(text)}
    all_parts = (item for part in parts for item in (part.parts if isinstance(part, PageSection) else [part]))

    def locate(path: str) -> tuple[str, str, str]:
        return _locate_file(path, folder)

    named_parts = ((type(part).__name__, part) for part in all_parts)
    return environment.from_string(TEMPLATE).render(
        title=title, parts=named_parts, policy=Markup(POLICY), locate=locate
    )


def _locate_file(path: str, folder: str) -> tuple[str, str, str]:
    """Return a file's name, the address for a link to it, and the one for an image; an address is empty for none."""
    url, name = "", path
    if folder and path.startswith(f"{folder}/"):
        name = path[len(folder) + 1 :]
        url = f"./{quote(name, errors='replace')}"
    elif os.path.isabs(path):
        with suppress(UnicodeError):  # of a name that no file has
            url = Path(path).as_uri()
    suffix = PurePath(path).suffix.lower()
    return name, url if suffix in LINKED else "", url if suffix in PICTURES else ""
