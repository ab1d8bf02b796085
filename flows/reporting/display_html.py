r"""HTML that code has displayed, written anew out of lists of what neither runs nor fetches anything.

Every tag, attribute and piece of CSS in the result is from the lists below; the rest of the input is text, or left
out. So the result is safe however a browser would have read the input. Reading it takes one pass. A parser that builds
the tree as browsers do is no alternative: nh3 takes 2 GiB of memory for some inputs of 44 kB, and then aborts the
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
# Their content goes with them: it is code or another language, or no browser shows it.
TAGS_WITH_CONTENT = "iframe|math|noembed|noframes|object|script|select|svg|template|textarea|title|xmp"
# None of them holds an address. `src` is apart: an image has it if its data is in it.
ATTRIBUTES = _list_words(
    "align bgcolor border cellpadding cellspacing checked class color colspan datetime dir disabled face for frame "
    "headers height hidden high id lang low max min noshade nowrap open optimum reversed role rowspan rules scope size "
    "span start style title type valign value width"
)
IMAGE_DATA = re.compile(r"data:image/(?:png|jpe?g|gif|webp|svg\+xml)[;,]", re.IGNORECASE)
INPUT_TYPES = ("checkbox", "radio")  # with which tables and trees fold, without a script
# Of CSS: those for colours, gradients, numbers, transformations and selectors.
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
# What has no end is taken up to the end of the text, so that one pass is enough whatever the text.
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
# A string ends in its line, or is left out. A backslash elsewhere could spell the name of a function.
_CSS = re.compile(
    rf"""/\*.*?(?:\*/|\Z)
    |(?P<string>{_STRINGS.format('"', "'")})|{_STRINGS.format("", "")}
    |(?P<function>(?<![-\w])[-\w]+)\(
    |@(?P<rule>[-\w]*)
    |[\\<]""",
    re.DOTALL | re.VERBOSE,
)


def rebuild_html(text: str) -> str:
    """Return the HTML that is left of this one: text, tables, styles, and images whose data is in it.

    It has no scripts, links, forms, frames and inline SVG, and no address of anything.
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
    """Return the CSS without comments, with unknown functions and rules renamed so that browsers pass over them."""
    return _CSS.sub(_rebuild_css_token, text)


def _rebuild_css_token(match: re.Match[str]) -> str:
    if match["string"]:
        return match["string"].replace("<", r"\3c ")  # nothing in a sheet ends it
    if match["function"]:
        return match[0] if match["function"].lower() in CSS_FUNCTIONS else "removed("
    if match["rule"] is not None:
        return match[0] if match["rule"].lower() in AT_RULES else "@removed"
    return " "
