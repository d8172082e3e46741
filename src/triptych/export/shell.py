"""Reads the commands of a launch script without running anything.

Understood: comments, continued lines, quotes, variables (`$TP`, `${TP}`, `${TP:-8}`), arrays
(`ARGS=(...)`, `ARGS+=(...)`, `"${ARGS[@]}"`), arithmetic (`$((A * B))`). Conditions are not
evaluated: what stands in any branch is read, in the order of the text. A variable that the script
does not set stays in the words as `$NAME`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_KEYWORDS = {"if", "then", "else", "elif", "fi", "for", "while", "do", "done", "in", "{", "}", "!"}
_PREFIXES = {"export", "local", "declare", "readonly", "set", "exec", "time", "nohup"}
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_TOKEN = re.compile(
    r"""(?P<space>[ \t]+|\\\n)
    |(?P<comment>\#[^\n]*)
    |(?P<single>'[^']*')
    |(?P<double>"(?:\\.|[^"\\])*")
    |(?P<arithmetic>\$\(\((?:[^()]|\([^()]*\))*\)\))
    |(?P<command>\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`)
    |(?P<variable>\$\{[^}]*\}|\$\w+|\$[@*\#?])
    |(?P<end>\n|;+|&&?|\|\|?)
    |(?P<open>\()
    |(?P<close>\))
    |(?P<plain>\\.|[^\s'"$`;&|()\\]+|.)""",
    re.VERBOSE | re.DOTALL,
)
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?P<all>\[[@*]\])?(?::?-(?P<default>[^}]*))?\}|\$(\w+)")
_ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(slots=True)
class _Shell:
    """The variables of a script as far as it has been read."""

    values: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)

    def expand(self, text: str) -> str:
        """The text with variables and arithmetic replaced; what is unknown stays."""
        text = _ARITHMETIC.sub(lambda found: self._computed(found[1], found[0]), text)
        return _VARIABLE.sub(self._value, text)

    def _value(self, found: re.Match[str]) -> str:
        name = found["name"] or found[4]
        if found["all"] or (name in self.arrays and name not in self.values):
            return " ".join(self.arrays.get(name, []))
        if name in self.values:
            return self.values[name]
        default = found["default"]
        return found[0] if default is None else self.expand(default.strip("\"'"))

    def _computed(self, expression: str, otherwise: str) -> str:
        names = re.sub(r"(?<![\w$])([A-Za-z_]\w*)", r"$\1", self.expand(expression))
        try:
            return str(_number(ast.parse(self.expand(names).strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return otherwise

    def assign(self, name: str, adds: bool, value: str) -> None:
        """`NAME=value`, or `NAME+=value`."""
        self.values[name] = (self.values.get(name, "") if adds else "") + value

    def assign_array(self, name: str, adds: bool, words: list[str]) -> None:
        """`NAME=(words)`, or `NAME+=(words)`."""
        self.arrays[name] = (self.arrays.get(name, []) if adds else []) + words


def _number(node: ast.expr) -> int:
    """The value of an arithmetic expression. Raises ValueError for all but whole numbers."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_number(node.left), _number(node.right))
    raise ValueError("not a number")


def commands(text: str) -> list[list[str]]:
    """Every command of a script as its words, variables replaced; assignments are left out."""
    shell = _Shell()
    found = []
    words: list[str] = []
    tokens = _tokens(text)
    for kind, words_or_name in _statements(shell, tokens):
        if kind == "word":
            words += words_or_name
        elif words:
            found.append(words)
            words = []
    return [[*_flat(command)] for command in [*found, words] if command]


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    """Kind and text of each token; `#` inside a word is no comment."""
    place, after_space = 0, True
    while place < len(text):
        found = _TOKEN.match(text, place)
        assert found is not None  # the last alternative takes any character
        kind, token = str(found.lastgroup), found[0]
        if kind == "comment" and not after_space:
            kind, token = "plain", "#"
        place += len(token)
        after_space = kind in ("space", "end", "open", "comment")
        if kind != "comment":
            yield kind, token


def _statements(
    shell: _Shell, tokens: Iterator[tuple[str, str]]
) -> Iterator[tuple[str, list[str]]]:
    """Words of commands, and where each command ends; assignments change the shell."""
    is_start = True
    for kind, piece in _words(tokens):
        if kind == "end":
            yield "end", []
            is_start = True
            continue
        assigned = _ASSIGNMENT.match(piece) if is_start else None
        if kind == "array":
            _assign_array(shell, piece)
        elif assigned:
            shell.assign(assigned[1], bool(assigned[2]), _joined(shell, piece[assigned.end() :]))
        elif is_start and (piece in _KEYWORDS or piece in _PREFIXES):
            continue
        else:
            is_start = False
            yield "word", _expanded(shell, piece)


def _assign_array(shell: _Shell, piece: str) -> None:
    found = _ASSIGNMENT.match(piece)
    if found:
        inside = _words(_tokens(piece[found.end() + 1 : -1]))
        words = [word for kind, raw in inside if kind == "word" for word in _expanded(shell, raw)]
        shell.assign_array(found[1], bool(found[2]), words)


def _words(tokens: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Words as they are written, whole arrays `NAME=(...)`, and ends of commands."""
    word = ""
    for kind, token in tokens:
        if kind == "open" and re.fullmatch(r"[A-Za-z_]\w*\+?=", word):
            yield "array", word + "(" + _until_closed(tokens)
            word = ""
        elif kind in ("space", "end", "open", "close"):
            if word:
                yield "word", word
            word = ""
            if kind == "end":
                yield "end", ""
        else:
            word += token
    if word:
        yield "word", word


def _until_closed(tokens: Iterator[tuple[str, str]]) -> str:
    text, depth = "", 1
    for kind, token in tokens:
        depth += (kind == "open") - (kind == "close")
        text += " " if kind == "end" else token
        if not depth:
            break
    return text


def _pieces(raw: str) -> Iterator[tuple[str, str]]:
    """The parts of a word: `single`, `double` or `bare`, and their text without quotes."""
    for kind, token in _tokens(raw):
        if kind in ("single", "double"):
            text = token[1:-1].replace("\\\n", " ")
            yield kind, text if kind == "single" else re.sub(r'\\(["\\])', r"\1", text)
        else:
            yield "bare", token[1:] if kind == "plain" and token[0] == "\\" else token


def _joined(shell: _Shell, raw: str) -> str:
    """A word as one text, as an assignment takes it."""
    return "".join(text if kind == "single" else shell.expand(text) for kind, text in _pieces(raw))


def _expanded(shell: _Shell, raw: str) -> list[str]:
    """A word as a command gets it: unquoted variables and arrays become several words."""
    splits = any(kind == "bare" and "$" in text for kind, text in _pieces(raw))
    array = re.fullmatch(r'"\$\{(\w+)\[[@*]\]\}"', raw)
    if array:
        return list(shell.arrays.get(array[1], [raw.strip('"')]))
    text = _joined(shell, raw)
    return text.split() if splits and not re.search(r"\$\(\(|\$\(", text) else [text]


def _flat(words: list[str]) -> Iterator[str]:
    """The words; a quoted command line in them (`bash -c "..."`) as words of its own."""
    for word in words:
        if re.search(r"\.py\s+--\w", word) or re.search(r"\s--[a-z]\w*", word):
            yield from word.replace("\\\n", " ").split()
        else:
            yield word
