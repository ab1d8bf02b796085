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
    """A fenced block of a text.

    Attributes:
        begin: Offset of the opening fence.
        start: Offset of the content.
        end: Offset of the content's end.
        after: Offset of the text behind the closing fence.
        tag: Language that the opening fence names; empty if it names none.
    """

    begin: int
    start: int
    end: int
    after: int
    tag: str = ""

    @property
    def is_python(self) -> bool:
        """Return True if the fence names Python."""
        return PYTHON_TAG.match(self.tag) is not None

    @property
    def is_output(self) -> bool:
        """Return True if the fence names an output, or nothing."""
        return OUTPUT_TAG.fullmatch(self.tag) is not None


class Reply(NamedTuple):
    """The code of a reply.

    Attributes:
        blocks: Offset and code of each block to run. The code has no common indent.
        text: The reply without these blocks.
        made_up: Line with which the model made up an output before further blocks, which are not run; or "".
        left_out: Offset of the first of these blocks; the reply's length if there are none.
    """

    blocks: list[tuple[int, str]]
    text: str
    made_up: str
    left_out: int

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
    if not spans:
        return text, ""
    thoughts = [TAG.sub("", text[begin:end]).strip() for begin, end in spans]
    return _remove_spans(text, spans).strip(), "\n\n".join(thoughts)


def read_program(code: str) -> str:
    """Return the program in the text of a person or a model, without a byte order mark. Its lines keep their numbers.

    Text that Python can parse is the program, without a common indent, and so is a reply without blocks of code.
    """
    code = code.removeprefix("\ufeff")
    may_be_reply = "```" in code or "~~~" in code or TAG.search(code) is not None
    if not may_be_reply or parse_python(remove_indent(code)) is not None:
        return remove_indent(code)
    text = _remove_spans(code, _find_thoughts(code), keep_lines=True)
    if not text.strip():
        return "\n" * text.count("\n") + f"raise RuntimeError({ONLY_THOUGHTS!r})"
    reply = read_reply(text)
    parts = reply.blocks
    if reply.made_up:
        parts = [*parts, (reply.left_out, f"raise RuntimeError({reply.reason!r})")]
    program = ""
    for offset, part in parts:
        program += "\n" * (text.count("\n", 0, offset) - program.count("\n")) + part
    return program or remove_indent(text)


def _remove_spans(text: str, spans: Sequence[tuple[int, int]], *, keep_lines: bool = False) -> str:
    """Return the text without the spans, which are pairs of begin and end. `keep_lines` keeps their line feeds."""
    parts: list[str] = []
    previous_end = 0
    for begin, end in spans:
        parts.append(text[previous_end:begin])
        if keep_lines:
            parts.append("\n" * text.count("\n", begin, end))
        previous_end = end
    parts.append(text[previous_end:])
    return "".join(parts)


def _find_thoughts(text: str) -> list[tuple[int, int]]:
    """Return the beginning and the end of each thought in a reply.

    A closing tag without an opening one ends a thought that began with the reply. Without a closing tag, a thought ends
    with the reply. Tags in a block of another language, and in strings and comments of Python, are data.
    """
    tags = list(TAG.finditer(text))
    if not tags or parse_python(remove_indent(text)) is not None:
        return []
    last_closing = max((tag.start() for tag in tags if tag["closing"]), default=-1)
    line_starts = {line.end() for line in LINE_START.finditer(text)}
    fences = _Fences(text)
    block: Block | None = None  # the first block that ends behind the tag
    spans: list[tuple[int, int]] = []
    begin = 0  # offset of the thought around the tag
    depth = 0  # number of thoughts around the tag
    known_until = 0  # Tags before this offset are decided.
    for number, tag in enumerate(tags):
        if tag["quote"] or tag.start() < known_until:
            continue
        is_first = tag.start() in line_starts
        if depth:
            if tag["closing"]:
                depth -= 1
            elif is_first:
                depth += 1
            if depth == 0:
                spans.append((begin, tag.end()))
                known_until = tag.end()
            continue
        if spans and number < MAX_TAGS and parse_python(remove_indent(text[spans[-1][1] :])) is not None:
            break  # The text behind the last thought is code.
        block = fences.find_block_around(tag.start(), known_until, block)
        is_inside = block.start <= tag.start() < block.end and len(spans) < MAX_SPANS
        if is_inside and _is_data(tag, block, fences):
            known_until = block.after
        elif tag["closing"]:
            spans = [(0, tag.end())]
            known_until = tag.end()
        elif is_first or tag.start() < last_closing:
            begin = tag.start()
            depth = 1
    if depth:
        spans.append((begin, len(text)))
    return spans


def _is_data(tag: re.Match[str], block: Block, fences: _Fences) -> bool:
    """Return True if a tag in a block is data: an opening tag in another language, or any tag in valid Python."""
    is_opening_elsewhere = tag["opening"] is not None and not block.is_python
    return is_opening_elsewhere or parse_python(fences.read_code(block)) is not None


def read_reply(text: str) -> Reply:
    """Return the code of a reply whose thoughts were removed."""
    fences = _Fences(text)
    blocks = fences.list_blocks()
    code_blocks = _choose_code(fences, blocks)
    made_up = ""
    cut_at = len(text)
    for before, block in itertools.pairwise(code_blocks):
        outputs = [text[other.start : other.end] for other in blocks if before < other < block and other.is_output]
        made_up = _find_made_up(text[before.after : block.begin], outputs)
        if made_up:
            cut_at = block.begin
            break
    code_blocks = [block for block in code_blocks if block.begin < cut_at]
    rest = _remove_spans(text, [(block.begin, block.after) for block in code_blocks]).strip()
    return Reply([(block.start, fences.read_code(block)) for block in code_blocks], rest, made_up, cut_at)


def read_value(text: str) -> str:
    """Return the text of a value in a reply without thoughts: the content of the only fenced block, or the reply."""
    fences = _Fences(text)
    blocks = fences.list_blocks()
    if len(blocks) == 1:
        text = fences.read_code(blocks[0])
    return text.strip()


def _choose_code(fences: _Fences, blocks: list[Block]) -> list[Block]:
    """Return the blocks that name Python, and those that name no language and do something.

    Without a block that names Python, the first one without a language that can be parsed counts too, or else all.
    """
    has_python = any(block.is_python for block in blocks)
    code_blocks: list[Block] = []
    for block in blocks:
        if block.is_python:
            code_blocks.append(block)
        elif not block.tag:
            tree = parse_python(fences.read_code(block))
            is_first = not has_python and not code_blocks
            if tree is not None and (is_first or _does_something(tree)):
                code_blocks.append(block)
    return code_blocks or [block for block in blocks if not block.tag]


def _does_something(tree: ast.Module) -> bool:
    """Return True if code has a call or a statement other than an expression. An output has neither."""
    nodes = ast.walk(tree)
    return any(isinstance(node, (ast.Call, ast.stmt)) and not isinstance(node, ast.Expr) for node in nodes)


def _find_made_up(between: str, outputs: list[str]) -> str:
    """Return the first line of an output or a turn that a model made up between two blocks of code, or "".

    Args:
        between: The text between the blocks.
        outputs: The fenced outputs in this text.
    """
    label = LABEL.search(between)
    if label is not None and between[label.end() :].strip(MARKUP):  # Text follows a label such as "Output:".
        outputs = [between[label.start() :]]
    if not outputs:
        return ""
    return outputs[0].strip().partition("\n")[0][:SHOWN_CHARACTERS]


class _Fences:
    """The fenced blocks of a text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._closings = list(CLOSING_FENCE.finditer(text))
        # The code ends here if its closing fence is missing or incomplete.
        self._last_end = len(text.rstrip().rstrip("`~"))

    def list_blocks(self) -> list[Block]:
        """Return the blocks that have a content. Stop at an open triple-quoted string, because the text may be code."""
        blocks: list[Block] = []
        offset = 0
        while block := self.find_block(offset):
            if self._is_in_string(offset, block.begin):
                break
            blocks.append(block)
            offset = block.after
        return [block for block in blocks if self._text[block.start : block.end].strip()]

    def find_block_around(self, offset: int, first: int, block: Block | None) -> Block:
        """Return the first block that ends behind an offset, or an empty one behind the text.

        Args:
            offset: The offset.
            first: Offset from which blocks count.
            block: The result of an earlier call, so that the text is searched once.
        """
        while block is None or block.begin < first or block.after <= offset:
            if block is not None and block.begin >= first:
                first = max(first, block.after)
            behind = len(self._text) + 1
            block = self.find_block(first) or Block(behind, behind, behind, behind)
        return block

    def find_block(self, offset: int) -> Block | None:
        """Return the first block that begins at the offset or later, without a fence that only wraps another."""
        text = self._text
        opening = OPENING_FENCE.search(text, offset)
        while opening is not None:
            if not _is_opening(opening):
                opening = OPENING_FENCE.search(text, opening.end())
                continue
            start = min(opening.end() + 1, len(text))
            first_line = BLANK_LINES.match(text, start)
            assert first_line is not None  # The pattern matches any text.
            inner = OPENING_FENCE.match(text, first_line.end())
            if inner is not None and inner["tag"] and self._is_wrapper(opening, inner):
                opening = inner
            else:
                tag = opening["tag"].strip("{.}")  # Pandoc writes {.python}.
                may_be_python = not tag or PYTHON_TAG.match(tag) is not None
                end, after = self._find_end(start, opening["mark"], is_code=may_be_python)
                return Block(opening.start("mark"), start, end, after, tag)
        return None

    def read_code(self, block: Block) -> str:
        """Return a block's content without the indent that its lines share."""
        return remove_indent(self._text[block.start : block.end])

    def _is_wrapper(self, outer: re.Match[str], inner: re.Match[str]) -> bool:
        """Return True if a fence directly around another one only wraps it, and has no block itself.

        A longer fence before further blocks has a block: an example of a fence.
        """
        if inner["before"].strip(LIST_MARKS) or not _is_opening(inner):  # The inner fence may be in a string.
            return False
        is_longer = outer["mark"].startswith(inner["mark"]) and outer["mark"] != inner["mark"]
        _, after = self._find_end(outer.end() + 1, outer["mark"], is_code=False)
        return not is_longer or OPENING_FENCE.search(self._text, after) is None

    def _is_in_string(self, begin: int, end: int) -> bool:
        """Return True if a triple-quoted string that opens after `begin` is still open at `end`."""
        return any(self._text.count(quotes, begin, end) % 2 for quotes in QUOTES)

    def _find_end(self, start: int, mark: str, *, is_code: bool) -> tuple[int, int]:
        """Return the end of the content that begins at `start`, and the offset behind the closing fence.

        Code ends at the first closing fence where Python can parse it, because earlier fences may be in a string.
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
            if not self._is_in_string(start, end):
                return end, after
        return max(start, self._last_end), len(text)


def _is_opening(line: re.Match[str]) -> bool:
    """Return True if a line with a fence opens a block."""
    if "`" in line["rest"]:
        return False
    has_words_before = bool(line["before"].strip(LIST_MARKS))
    ends_with_backticks = line["mark"][0] == "`" and not line["rest"].strip()
    return ends_with_backticks or not has_words_before
