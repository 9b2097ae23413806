"""Draws sentences of the project by a seed, so that a reader can judge each as plain at first reading or not.

    python docs/sentences.py --seed 7                                  # 150 sentences, as many of each kind
    python docs/sentences.py --seed 7 --count 60 --kinds documents docs/design.md docs/glossary.md

The same seed on the same tree draws the same sentences. Code, generated tables and headings are left out, as are
fragments of fewer than four words.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import tokenize
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("documents", "docstrings", "comments", "messages")
NOT_OURS = {"build", "dist", "runs", "site", "__pycache__"}  # folders at the root
MIN_WORDS = 4

GENERATED = re.compile(
    r"<!-- (?:(?!<!--).)*<!-- end -->|^(```|~~~).*?^\1 *$|^%.*?$|<!--.*?-->", re.MULTILINE | re.DOTALL
)
DRAWN = re.compile(r"[─-◿→]{2}|──|--[->]|\s\s\s+\S+\s\s\s+")  # a picture or a column of a table, no prose
DIRECTIVE = re.compile(r"(noqa|type:|fmt:|ruff:|pragma|!|--|==)")
END = re.compile(r"[.!?]+[\"'”’)*\]]*(?=\s+[\"'“‘(*\[`{]*[A-Z0-9`{\[])")
ABBREVIATION = re.compile(r"(?:^|[\s(])(?:(?i:e\.g|i\.e|etc|vs|cf|al|resp|approx|no|fig|eq|sec|ch)|[A-Z])\.$")
HELP = re.compile(r"(^|_)(option|argument)$|^(Problem|Option|Argument)$")


Block = list[tuple[int, str]]
"""A paragraph, an item of a list, a cell of a table, a comment or a message: the number and the text of each line."""


class Sentence(NamedTuple):
    kind: str
    path: str
    line: int
    text: str
    context: str  # the block that it stands in


def split(text: str) -> list[tuple[int, str]]:
    """Return the sentences of a text with the place where each begins."""
    hidden = re.sub(r"`[^`]+`", lambda span: "`" + "x" * (len(span[0]) - 2) + "`", text)  # of the same length
    ends = [match.end() for match in END.finditer(hidden) if not ABBREVIATION.search(hidden[: match.end()])]
    pieces = [(start, text[start:end]) for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
    return [(start + len(piece) - len(piece.lstrip()), piece.strip()) for start, piece in pieces if piece.strip()]


def sentences_of(kind: str, path: str, block: Block) -> Iterator[Sentence]:
    text = " ".join(line for _, line in block)
    starts = [0, *accumulate(len(line) + 1 for _, line in block)]
    for start, sentence in split(text):
        text_only = re.sub(r"`[^`]+`|\]\([^)]*\)", " ", sentence)
        num_words = len(re.findall(r"[A-Za-z]{2,}", text_only))
        if num_words >= 2 and num_words + sentence.count("`") // 2 >= MIN_WORDS:
            number = block[bisect_right(starts, start) - 1][0]
            yield Sentence(kind, path, number, sentence, text)


def prose(lines: Sequence[tuple[int, str]]) -> Iterator[Block]:
    """Cut Markdown, or the text of a docstring, into blocks: paragraphs, items of lists, cells of tables."""
    current: Block = []
    for number, line in [*lines, (0, "")]:
        stripped = re.sub(r"^> ?", "", line.strip())
        is_item = re.match(r"([*+-]|\d+\.) ", stripped)
        is_apart = not stripped or stripped.startswith(("#", "|")) or DRAWN.search(stripped)
        if current and (is_item or is_apart):
            yield current
            current = []
        if stripped.startswith("|") and not re.fullmatch(r"[|\s:-]+", stripped):
            yield from ([(number, cell.strip())] for cell in re.split(r"(?<!\\)\|", stripped) if cell.strip())
        elif not is_apart:
            current.append((number, re.sub(r"^([*+-]|\d+\.) +", "", stripped)))


def documents(text: str) -> Iterator[Block]:
    text = GENERATED.sub(lambda match: "\n" * match[0].count("\n"), text)
    return prose(list(enumerate(text.splitlines(), 1)))


def docstrings(text: str) -> Iterator[Block]:
    """Yield every string that is a statement: docstrings, and the descriptions below attributes."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            block = re.sub(r"```.*?```", lambda match: "\n" * match[0].count("\n"), node.value.value, flags=re.DOTALL)
            lines = list(enumerate(block.splitlines(), node.lineno))
            yield from prose(
                [(number, line) for number, line in lines if not line.startswith(" " * (node.col_offset + 4))]
            )


def comments(text: str) -> Iterator[Block]:
    """Yield trailing comments one by one, and whole comments that stand below each other together."""
    current: Block = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line = token.string.lstrip("#: ")
            is_whole = token.line.lstrip().startswith("#")
            if current and not (is_whole and current[-1][0] == token.start[0] - 1):
                yield current
                current = []
            if line and not DIRECTIVE.match(line) and not DRAWN.search(line):
                current.append((token.start[0], line))
            if not is_whole and current:
                yield current
                current = []
    if current:
        yield current


def messages(text: str) -> Iterator[Block]:
    """Yield the strings of errors that are raised, and the help of options and arguments."""
    tree = ast.parse(text)
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and HELP.search(ast.unparse(node.func).split(".")[-1])
    ]
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    for call in {id(call): call for call in [*calls, *raised]}.values():
        for value in [*call.args, *(keyword.value for keyword in call.keywords)]:
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield [(value.lineno, " ".join(value.value.split()))]
            elif isinstance(value, ast.JoinedStr):
                parts = (
                    part.value if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
                    for part in value.values
                )
                yield [(value.lineno, " ".join("".join(parts).split()))]


READERS = {"documents": documents, "docstrings": docstrings, "comments": comments, "messages": messages}


def all_sentences(kind: str, root: Path = ROOT, paths: Sequence[str] = ()) -> list[Sentence]:
    """Return every sentence of a kind, in the order of the files. `paths` are files or folders; none means all."""
    found: list[Sentence] = []
    for path in sorted(root.rglob("*.md" if kind == "documents" else "*.py")):
        name = path.relative_to(root)
        if name.parts[0] in NOT_OURS or any(part.startswith(".") or part == "__pycache__" for part in name.parts):
            continue
        if not paths or any(name.is_relative_to(wanted) for wanted in paths):
            for block in READERS[kind](path.read_text(encoding="utf-8")):
                found += sentences_of(kind, name.as_posix(), block)
    return found


def sample(
    seed: int, count: int, kinds: Sequence[str] = KINDS, root: Path = ROOT, paths: Sequence[str] = ()
) -> list[Sentence]:
    """Return `count` sentences, equally many of each kind; the first kinds have one more where it does not divide."""
    drawn: list[Sentence] = []
    for number, kind in enumerate(kinds):
        sentences = all_sentences(kind, root, paths)
        wanted = count // len(kinds) + (number < count % len(kinds))
        drawn += random.Random(f"{seed} {kind}").sample(sentences, min(wanted, len(sentences)))
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="files or folders, as seen from the root; all if none is named")
    parser.add_argument("--kinds", default=",".join(KINDS), help="some of documents,docstrings,comments,messages")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=150)
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"--kinds: expected some of {', '.join(KINDS)}, got {', '.join(unknown)}")
    for number, sentence in enumerate(sample(options.seed, options.count, kinds, paths=options.paths), 1):
        print(f"{number:3}. {sentence.path}:{sentence.line} ({sentence.kind})\n     {sentence.text}")
        if sentence.context != sentence.text:
            before, _, after = sentence.context.partition(sentence.text)
            print(f"     [… {before[-80:].strip()} ▮ {after[:80].strip()} …]")


if __name__ == "__main__":
    main()
