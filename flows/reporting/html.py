r"""A report as one HTML page that needs no network, and the rebuilding of HTML that code displayed.

Rebuilt HTML has only tags, attributes and CSS from the lists below. The rest of the input becomes text or is removed.
The result can neither run nor fetch anything, even if a browser would have read the input differently. One pass over
the input is enough. A parser that builds a browser's tree is not an alternative: nh3 takes 2 GiB of memory for some
inputs of 44 kB, and then aborts the process.
"""

import html
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePath
from urllib.parse import quote

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from .document import PageSection, Part, clean_line

# A second barrier after the escaping: the page runs nothing, and loads only images, from data URLs or from files.
FRAME_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
POLICY = f"{FRAME_POLICY} 'self' file:"
FRAME_HEAD = (
    f'<!doctype html><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{FRAME_POLICY}">'
)
PHOTOS = (".png", ".jpg", ".jpeg", ".gif", ".webp")
PICTURES = (*PHOTOS, ".svg")  # As an image in a page, even SVG runs and fetches nothing.
# Files that run nothing when a browser opens them. Other files can run code: .svg, .html, .xhtml, .xml, .mht, .pdf,
# and files whose type the browser guesses from their content.
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
{% elif kind == "Markup" %}
{# The sandbox has no exceptions: no script, form, window or origin of the page. The page's policy applies inside. #}
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
    """Return the parts as one HTML page that needs no network.

    `folder` is the folder of the page. Links to files below it are relative, so that the folder can be moved.
    """
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    environment.filters |= {"clean": clean_line, "frame": lambda text: FRAME_HEAD + rebuild_html(text)}
    page_parts = (item for part in parts for item in (part.parts if isinstance(part, PageSection) else [part]))
    return environment.from_string(TEMPLATE).render(
        title=title,
        parts=((type(part).__name__, part) for part in page_parts),
        policy=Markup(POLICY),
        locate=lambda path: _locate_file(path, folder),
    )


def _locate_file(path: str, folder: str) -> tuple[str, str, str]:
    """Return a file's name, the address for a link to it, and the address for an image. An address may be empty."""
    url, name = "", path
    if folder and path.startswith(f"{folder}/"):
        name = path[len(folder) + 1 :]
        url = f"./{quote(name, errors='replace')}"
    elif os.path.isabs(path):
        with suppress(UnicodeError):  # No file has such a name.
            url = Path(path).as_uri()
    suffix = PurePath(path).suffix.lower()
    return name, url if suffix in LINKED else "", url if suffix in PICTURES else ""


def _list_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TAGS = _list_words(
    "a abbr address article aside b bdi bdo big blockquote br caption center cite code col colgroup dd del details dfn "
    "div dl dt em figcaption figure font footer h1 h2 h3 h4 h5 h6 header hr i img input ins kbd label li main mark "
    "menu meter nav ol p pre progress q rp rt ruby s samp section small span strike strong sub summary sup table tbody "
    "td tfoot th thead time tr tt u ul var wbr"
)
# These are left out with their content: it is code, another language, or invisible.
TAGS_WITH_CONTENT = "iframe|math|noembed|noframes|object|script|select|svg|template|textarea|title|xmp"
# None of these holds an address. An image also keeps a `src` that contains its data.
ATTRIBUTES = _list_words(
    "align bgcolor border cellpadding cellspacing checked class color colspan datetime dir disabled face for frame "
    "headers height hidden high id lang low max min noshade nowrap open optimum reversed role rowspan rules scope size "
    "span start style title type valign value width"
)
IMAGE_DATA = re.compile(r"data:image/(?:png|jpe?g|gif|webp|svg\+xml)[;,]", re.IGNORECASE)
INPUT_TYPES = ("checkbox", "radio")  # Tables and trees use these to fold without a script.
# Functions of CSS for colours, gradients, numbers, transformations and selectors.
CSS_FUNCTIONS = _list_words(
    "calc circle clamp color color-mix conic-gradient counter counters cubic-bezier ellipse fit-content has hsl hsla "
    "hwb inset is lab lch light-dark linear-gradient matrix max min minmax not nth-child nth-last-child "
    "nth-last-of-type nth-of-type oklab oklch polygon radial-gradient repeat repeating-conic-gradient "
    "repeating-linear-gradient repeating-radial-gradient rgb rgba rotate scale scalex scaley skew steps translate "
    "translatex translatey var where"
)
AT_RULES = _list_words("container keyframes layer media scope supports")

_ATTRIBUTE = r"""[^\s/>=]+(?:\s*=\s*(?:"[^"]*(?:"|\Z)|'[^']*(?:'|\Z)|[^\s>"'][^\s>]*)?)?"""
_ATTRIBUTES = rf"(?:[\s/=]|{_ATTRIBUTE})*+(?:>|\Z)"
# An item without an end reaches to the end of the text, so that one pass is enough for any text.
_MARKUP = re.compile(
    rf"""<!--.*?(?:-->|\Z)
    |<(?P<whole>style|{TAGS_WITH_CONTENT})(?=[\s/>]){_ATTRIBUTES}(?P<content>.*?)(?:</(?P=whole)(?=[\s/>])[^>]*(?:>|\Z)|\Z)
    |<(?P<slash>/?)(?P<name>[a-z][^\s/>]*)(?P<attributes>{_ATTRIBUTES})
    |<[!?/][^>]*(?:>|\Z)
    |<""",
    re.IGNORECASE | re.DOTALL | re.VERBOSE,
)
_NAMED_VALUE = re.compile(r"""([^\s/>=]+)(?:\s*=\s*(?:"([^"]*)|'([^']*)|([^\s>"'][^\s>]*))?)?["']?""")
_STRINGS = r"""(?:"(?:\\.|[^"\\\n\r\f])*+{0}|'(?:\\.|[^'\\\n\r\f])*+{1})"""
# A string that does not end in its line is left out. A backslash outside a string could spell a function's name.
_CSS = re.compile(
    rf"""/\*.*?(?:\*/|\Z)
    |(?P<string>{_STRINGS.format('"', "'")})|{_STRINGS.format("", "")}
    |(?P<function>(?<![-\w])[-\w]+)\(
    |@(?P<rule>[-\w]*)
    |[\\<]""",
    re.DOTALL | re.VERBOSE,
)


def rebuild_html(text: str) -> str:
    """Return the HTML with its text, tables, styles, and images that contain their data.

    The result has no scripts, links, forms, frames, inline SVG or addresses.
    """
    return _MARKUP.sub(_rebuild_tag, text)


def _rebuild_tag(match: re.Match[str]) -> str:
    if match["whole"]:
        return f"<style>{_rebuild_css(match['content'])}</style>" if match["whole"].lower() == "style" else ""
    name = (match["name"] or "").lower()
    if name not in TAGS:
        return "&lt;" if match[0] == "<" else ""
    if match["slash"]:
        return f"</{name}>"
    attributes: dict[str, str] = {}
    for key, *values in _NAMED_VALUE.findall(match["attributes"]):
        value = html.unescape("".join(values))
        key = key.lower()
        if key == "style":
            value = _rebuild_css(value)
        if key in ATTRIBUTES or (name == "img" and key == "src" and IMAGE_DATA.match(value)):
            attributes.setdefault(key, value)
    if name == "input" and attributes.get("type", "").lower() not in INPUT_TYPES:
        return ""
    pairs = [f'{key}="{html.escape(value)}"' for key, value in attributes.items()]
    return f"<{' '.join([name, *pairs])}>"


def _rebuild_css(text: str) -> str:
    """Return the CSS without comments, with unknown functions and rules renamed so that browsers ignore them."""
    return _CSS.sub(_rebuild_css_token, text)


def _rebuild_css_token(match: re.Match[str]) -> str:
    if match["string"]:
        return match["string"].replace("<", r"\3c ")  # A string must not end the style element.
    if match["function"]:
        return match[0] if match["function"].lower() in CSS_FUNCTIONS else "removed("
    if match["rule"] is not None:
        return match[0] if match["rule"].lower() in AT_RULES else "@removed"
    return " "
