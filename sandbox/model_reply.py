"""The reader of a model's replies: it finds the thoughts, the blocks of Python, and the turns that the model made up.

The table in docs/code.md has the rules. The time is linear in a reply's length, because replies are untrusted.
"""

from __future__ import annotations

import ast
import bisect
import itertools
import re
import warnings
from typing import TYPE_CHECKING, NamedTuple

from .requests.code_text import parse_module, remove_indent

if TYPE_CHECKING:
    from collections.abc import Sequence

# DeepSeek, Qwen, Claude, Seed, LongCat, EXAONE, Gemini and Reka write such names in tags. Mistral, Kimi, Cohere,
# OpenThinker and gpt-oss have other tags.
NAME = r"(?:[a-z]{1,10}[:_])?(?:think|thinking|thoughts?|reasoning)"
OPENING_TAG = (
    rf"< ?{NAME}(?:\s[^<>]*)?(?<!/)>|\[THINK(?:ING)?\]|◁think▷|<\|START_THINKING\|>|<\|begin_of_thought\|>"
    r"|(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>"
)
CLOSING_TAG = (
    rf"< ?/ ?{NAME}\s*>|\[/THINK(?:ING)?\]|◁/think▷|<\|END_THINKING\|>|<\|end_of_thought\|>"
    r"|<\|channel\|>final<\|message\|>"
)
TAG = re.compile(
    rf"(?P<quote>['\"]|(?<!``)`)(?:(?:{OPENING_TAG})[^\n]*?|(?:{CLOSING_TAG}))(?P=quote)"  # The text is about the tag.
    rf"|(?P<opening>{OPENING_TAG})|(?P<closing>{CLOSING_TAG})",
    re.IGNORECASE,
)
OPENING_FENCE = re.compile(
    r"^(?P<before>[^\n`]*?)(?P<mark>`{3,}+|~{3,}+)[ \t]*(?P<tag>[^\s`~]*)(?P<rest>[^\n]*)$", re.MULTILINE
)
CLOSING_FENCE = re.compile(r"^[^\n#]*?(?<![`~])(?P<mark>`{3,}+|~{3,}+)[ \t\r]*+(?:\n|\Z|(?=<[^\n`]*$))", re.MULTILINE)
LINE_START = re.compile(r"^[ \t]*+", re.MULTILINE)
LIST_MARKS = " \t>-*+.)0123456789"  # characters that may precede any opening fence in its line
BLANK_LINES = re.compile(r"(?:[ \t\r]*\n)*")
MAX_CLOSINGS = 10  # closing fences that are tried for a block
MAX_SPANS = 20  # thoughts after which tags in code are no longer data
MAX_TAGS = 20  # tags for which the text behind a thought is parsed
QUOTES = ('"""', "'''")
PYTHON_TAG = re.compile(r"(?:i?python|py|repl|tool_code)[\d.]*(?![\w+-])", re.IGNORECASE)
OUTPUT_TAG = re.compile(
    r"(\w+[_-])?(out|outputs?|results?)|observation|(plain)?te?xt|plain|stdout|stderr|console|pycon|log|", re.IGNORECASE
)
# A line that begins an output or another speaker's turn, or a token of a chat's format.
LABEL = re.compile(
    r"""^(?:[^\w\n]|_)*+(
      (?:(?:the|this|it|that|here|is|are|my|your|code|program|execution|console|terminal|repl|tool|function|actual|
            expected|python|sandbox|shell|interpreter|cell|printed|step|\d{1,3})(?:'s)?[ _-])*
      (?:outputs?|out|results?|observations?|stdout|stderr|response|prints?|printed|returns?|returned|gives
         |ausgabe|ergebnis|sortie|r[eé]sultats?|salida|resultados?|saída|risultat[oi]|вывод|результат
         |\w{0,3}(?:输出|结果|出力|結果|출력|결과))
      (?:[ ](?:of|from|in|for)\b[^\n:]{0,60})?
      | user|human|system|assistant|environment|tool
    )(?:[ \t]*(?:[\[(][^\n\])]{0,20}[\])]|\#?\d{1,3}))?
      (?:[*_`]+|[ \t]*[:\uff1a>\])|]|[ \t\r]*$|[ ][=\u2013-][ ](?=['"\d]))
    | ^\W*(?:(?:the[ ])?(?:output|result)[ ](?:is|was|shows|reads)|(?:it|this)[ ]print(?:s|ed)):?
      [ ](?!`[a-z_]\w*`)(?=[`'"\[({\d-])
    | ^\W*(?:>>>|[-=]>|[→⇒])[ ](?=['"\[({\d-])
    | ^(?:Turns[ ]left:|FINAL:|\(The[ ]code[ ]printed|Traceback[ ]\(most)
    | <\|\w{1,40}\|>|<(?:start|end)_of_turn>|\[/?INST\]""",
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)
MARKUP = " \t\r\n*_`:>])|<#"
SHOWN_CHARACTERS = 80  # characters of an output that the model made up
NOT_RUN = (
    "The code after {made_up!r} in the reply was not run: the model wrote that itself, before its code had printed "
    "anything. End a reply after its code, and read the real output first."
)
ONLY_THOUGHTS = "the reply has only thoughts, which are not run: ask for the code outside of them, or raise max_tokens"


class Block(NamedTuple):
    """A fenced block of a text: the places of its fences, of its content and of the text behind it."""

    begin: int
    start: int
    end: int
    after: int
    tag: str = ""

    @property
    def is_python(self) -> bool:
        """Return whether the fence names Python."""
        return PYTHON_TAG.match(self.tag) is not None

    @property
    def is_output(self) -> bool:
        """Return whether the fence names an output, or nothing."""
        return OUTPUT_TAG.fullmatch(self.tag) is not None


class Reply(NamedTuple):
    """A reply's code."""

    blocks: list[tuple[int, str]]  # the places of the blocks to run, and their code without a common indent
    text: str  # the rest of the reply
    made_up: str  # the line with which the model made up an output before further blocks, or ""
    left_out: int  # the place of the first of these blocks, which are not run

    @property
    def reason(self) -> str:
        """Return why further blocks are not run, or ""."""
        return NOT_RUN.format(made_up=self.made_up) if self.made_up else ""


def parse_python(code: str) -> ast.Module | None:
    """Return the syntax tree of code, or None if this Python cannot parse it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return parse_module(code)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def split_thoughts(text: str) -> tuple[str, str]:
    """Return a reply without its thoughts, and the thoughts. A reply without thoughts is returned unchanged."""
    spans = _find_thoughts(text)
    thoughts = "\n\n".join(TAG.sub("", text[begin:end]).strip() for begin, end in spans)
    return (_cut(text, spans).strip() if spans else text), thoughts


def read_program(code: str) -> str:
    """Return the program in the text of a person or a model, without a byte order mark. Its lines keep their numbers.

    Text that Python can parse is the program, without a common indent, and so is a reply without blocks of code.
    """
    code = code.removeprefix("\ufeff")
    has_marks = "```" in code or "~~~" in code or TAG.search(code) is not None
    if not has_marks or parse_python(remove_indent(code)) is not None:
        return remove_indent(code)
    text = _cut(code, _find_thoughts(code), keep_lines=True)
    reply = read_reply(text)
    parts = reply.blocks
    if not text.strip():
        parts = [(len(text), f"raise RuntimeError({ONLY_THOUGHTS!r})")]
    elif reply.made_up:
        parts = [*parts, (reply.left_out, f"raise RuntimeError({reply.reason!r})")]
    program = ""
    for place, part in parts:
        program += "\n" * (text.count("\n", 0, place) - program.count("\n")) + part
    return program or remove_indent(text)


def _cut(text: str, spans: Sequence[tuple[int, int]], *, keep_lines: bool = False) -> str:
    """Return a text without these parts of it, or with only their line feeds."""
    parts: list[str] = []
    place = 0
    for begin, end in spans:
        parts += (text[place:begin], "\n" * text.count("\n", begin, end) if keep_lines else "")
        place = end
    return "".join(parts) + text[place:]


def _find_thoughts(text: str) -> list[tuple[int, int]]:
    """Return the beginning and the end of each thought in a reply.

    A closing tag without an opening one ends a thought that began with the reply. Without a closing tag, a thought ends
    with the reply. Tags in a block of another language, and in strings and comments of Python, are data.
    """
    tags = list(TAG.finditer(text))
    if not tags or parse_python(remove_indent(text)) is not None:
        return []
    last_closing = max((tag.start() for tag in tags if tag["closing"]), default=-1)
    fences, block = _Fences(text), Block(-1, -1, -1, -1)
    spans: list[tuple[int, int]] = []
    depth = begin = place = 0
    nowhere = len(text) + 1
    line_starts = {line.end() for line in LINE_START.finditer(text)}
    for number, tag in enumerate(tags):
        is_first = tag.start() in line_starts
        if tag["quote"] or tag.start() < place:
            continue
        if depth:
            depth += is_first if tag["opening"] else -1
            if not depth:
                spans.append((begin, tag.end()))
                place = tag.end()
            continue
        if spans and number < MAX_TAGS and parse_python(remove_indent(text[spans[-1][1] :])) is not None:
            break
        while block.begin < place or block.after <= tag.start():
            place = max(place, block.after) if block.begin >= place else place
            block = fences.find_block(place) or Block(nowhere, nowhere, nowhere, nowhere)
        is_inside = block.start <= tag.start() < block.end and len(spans) < MAX_SPANS
        if is_inside and (bool(tag["opening"]) > block.is_python or parse_python(fences.read_code(block)) is not None):
            place = block.after
        elif tag["closing"]:
            spans, place = [(0, tag.end())], tag.end()
        elif is_first or tag.start() < last_closing:
            begin, depth = tag.start(), 1
    return [*spans, (begin, len(text))] if depth else spans


def read_reply(text: str) -> Reply:
    """Return the code of a reply without thoughts."""
    fences = _Fences(text)
    blocks = fences.list_blocks()
    code = _choose_code(fences, blocks)
    made_up, left_out = "", len(text)
    for before, block in itertools.pairwise(code):
        others = [text[other.start : other.end] for other in blocks if before < other < block and other.is_output]
        if made_up := _find_made_up(text[before.after : block.begin], others):
            left_out = block.begin
            break
    run = [block for block in code if block.begin < left_out]
    rest = _cut(text, [(block.begin, block.after) for block in run]).strip()
    return Reply([(block.start, fences.read_code(block)) for block in run], rest, made_up, left_out)


def read_value(text: str) -> str:
    """Return the text of a value in a reply without thoughts: the content of the only fenced block, or the reply."""
    fences = _Fences(text)
    blocks = fences.list_blocks()
    return (fences.read_code(blocks[0]) if len(blocks) == 1 else text).strip()


def _choose_code(fences: _Fences, blocks: list[Block]) -> list[Block]:
    """Return the blocks that name Python, and those that name no language and do something.

    Without a block that names Python, the first one without a language that can be parsed counts too, or else all.
    """
    has_python = any(block.is_python for block in blocks)
    code: list[Block] = []
    for block in blocks:
        tree = None if block.tag else parse_python(fences.read_code(block))
        if block.is_python or (tree is not None and (_does_something(tree) or not (has_python or code))):
            code.append(block)
    return code or [block for block in blocks if not block.tag]


def _does_something(tree: ast.Module) -> bool:
    """Return whether code has a call or a statement other than an expression. An output has neither."""
    nodes = ast.walk(tree)
    return any(isinstance(node, (ast.Call, ast.stmt)) and not isinstance(node, ast.Expr) for node in nodes)


def _find_made_up(between: str, outputs: list[str]) -> str:
    """Return the first line of an output or a turn that a model made up between two blocks of code, or ""."""
    label = LABEL.search(between)
    if label is not None and between[label.end() :].strip(MARKUP):
        outputs = [between[label.start() :]]
    return outputs[0].strip().partition("\n")[0][:SHOWN_CHARACTERS] if outputs else ""


class _Fences:
    """The fenced blocks of a text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._closings = list(CLOSING_FENCE.finditer(text))
        # The code ends here if its closing fence is missing or incomplete.
        self._last = len(text.rstrip().rstrip("`~"))

    def list_blocks(self) -> list[Block]:
        """Return the blocks that have a content, but none in an open triple-quoted string: the text may be code."""
        blocks: list[Block] = []
        place = 0
        while block := self.find_block(place):
            if any(self._text.count(quotes, place, block.begin) % 2 for quotes in QUOTES):
                break
            blocks.append(block)
            place = block.after
        return [block for block in blocks if self._text[block.start : block.end].strip()]

    def find_block(self, place: int) -> Block | None:
        """Return the first block that begins at the place or later. A fence directly around another is ignored."""
        text = self._text
        opening = OPENING_FENCE.search(text, place)
        while opening is not None:
            start = min(opening.end() + 1, len(text))
            inner = OPENING_FENCE.match(text, BLANK_LINES.match(text, start).end())  # type: ignore[reportOptionalMemberAccess]
            if not _is_opening(opening):
                opening = OPENING_FENCE.search(text, opening.end())
            elif inner is not None and inner["tag"] and self._is_wrapper(opening, inner):
                opening = inner
            else:
                tag = opening["tag"].strip("{.}")
                end, after = self._find_end(
                    start, opening["mark"], is_code=not tag or PYTHON_TAG.match(tag) is not None
                )
                return Block(opening.start("mark"), start, end, after, tag)
        return None

    def read_code(self, block: Block) -> str:
        """Return a block's content without the indent that its lines share."""
        return remove_indent(self._text[block.start : block.end])

    def _is_wrapper(self, outer: re.Match[str], inner: re.Match[str]) -> bool:
        """Return whether a fence directly around another one has no block itself.

        A longer fence before further blocks has one: an example.
        """
        if inner["before"].strip(LIST_MARKS) or not _is_opening(inner):  # The inner fence may be in a string.
            return False
        is_longer = outer["mark"].startswith(inner["mark"]) and outer["mark"] != inner["mark"]
        _, after = self._find_end(outer.end() + 1, outer["mark"], is_code=False)
        return not is_longer or OPENING_FENCE.search(self._text, after) is None

    def _find_end(self, start: int, mark: str, *, is_code: bool) -> tuple[int, int]:
        """Return the end of the content that begins at `start`, and the place behind the closing fence.

        Of code, the first end counts at which Python can parse it, because a string may have a fence.
        """
        text = self._text
        first = bisect.bisect_left(self._closings, start, key=lambda closing: closing.start("mark"))
        closings = [
            (closing.start("mark"), closing.end())
            for closing in self._closings[first : first + MAX_CLOSINGS]
            if closing["mark"].startswith(mark)
        ]
        for end, after in closings:
            if not is_code or parse_python(remove_indent(text[start:end])) is not None:
                return end, after
        for end, after in closings:  # The code is wrong, or of a newer Python.
            if not any(text.count(quotes, start, end) % 2 for quotes in QUOTES):
                return end, after
        return max(start, self._last), len(text)


def _is_opening(line: re.Match[str]) -> bool:
    """Return whether a line with a fence opens a block. Words may precede backticks at the end of the line."""
    is_last = line["mark"][0] == "`" and not line["rest"].strip()
    return "`" not in line["rest"] and (is_last or not line["before"].strip(LIST_MARKS))
