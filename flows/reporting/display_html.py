"""The rebuilding of HTML that code displayed, for a frame in a report's page.

Rebuilt HTML has only tags and attributes from the lists below. The rest of the input becomes text or is removed. The
result can neither run anything nor name an address, even if a browser would have read the input differently. Only its
CSS can name one, and the frame's policy keeps CSS from fetching. One pass over the input is enough. A parser that
builds a browser's tree is not an alternative: nh3 takes 2 GiB of memory for some inputs of 44 kB, and then aborts the
process.
"""

import html
import re


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


def rebuild_html(text: str) -> str:
    """Return the HTML with its text, tables, styles, and images that contain their data.

    The result has no scripts, links, forms, frames, inline SVG or addresses.
    """
    return _MARKUP.sub(_rebuild_tag, text)


def _rebuild_tag(match: re.Match[str]) -> str:
    """Return a tag with the attributes that are allowed, or an empty text for other markup."""
    if match[0] == "<":
        return "&lt;"
    if match["whole"]:  # an element with its content
        return f"<style>{match['content']}</style>" if match["whole"].lower() == "style" else ""
    name = (match["name"] or "").lower()
    if name not in TAGS:
        return ""
    if match["slash"]:
        return f"</{name}>"
    attributes = _read_attributes(name, match["attributes"])
    if name == "input" and attributes.get("type", "").lower() not in INPUT_TYPES:
        return ""
    pairs = [f'{key}="{html.escape(value)}"' for key, value in attributes.items()]
    return f"<{' '.join([name, *pairs])}>"


def _read_attributes(tag: str, text: str) -> dict[str, str]:
    """Return the allowed attributes of a tag. Of two with one name the first counts, as in a browser."""
    attributes: dict[str, str] = {}
    for key, *values in _NAMED_VALUE.findall(text):
        value = html.unescape("".join(values))
        key = key.lower()
        has_image = tag == "img" and key == "src" and IMAGE_DATA.match(value)
        if key in ATTRIBUTES or has_image:
            attributes.setdefault(key, value)
    return attributes
