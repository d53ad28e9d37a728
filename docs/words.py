"""Counts constructions that a native engineer would not write, and shares of docstrings: `python -m docs.words`."""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("node", "swarm", "protocol", "lab", "proto")
PEERS = ("httpcore", "hivemind", "anyio")
LIMIT = 3.0  # hits in 1,000 words; the peers have 1 to 4
DOCUMENTS = ("README.md", "CONTRIBUTING.md", *sorted(f"docs/{each.name}" for each in (ROOT / "docs").glob("*.md")))
SKIPPED = {"generated", "_vendor", "third_party", "proto"}  # folders of peers, and generated code

# Each pattern is matched after the removal of `code`; a space matches any white space. Capitals count.
PATTERNS = (
    r"\bOf (?!course)",  # "Of those that wait: ..."
    r"\b(Who|Whom|Whose|Whoever|Whatever)\b(?![^.]*\?)",  # a clause in place of a noun
    r"\bWhat\b(?![^.]*\?)",  # "What is left of ..."
    r"\bAs (many|much|long as it|it|they|few)\b",  # "As many as are left"
    r"\bSo (?!that\b|far\b)(\w+)",  # "So it waits"
    r"\bTimes\b (?!are|is)",  # "Times that ..."
    r"\b(None|none) (of|where|when there|for one|for what|but|at)\b(?! the\b)",  # "None where there is none"
    r"\b(of (whom|which)|no more(?! \w)|besides?)\b",  # "replicas of which one ...", "and no more"
    r"\bthat of (?!the two\b)",  # "that of the leader"
    r"\b(so|as) (many|much|few|large|little) (?!as\b|that\b|\w+ as\b)\w+",  # "so many tokens"
    r"\b([Nn]obody|[Ss]omebody|whoever|[Ww]homever|whatever|whichever)\b",  # a person in place of a peer
    r"\b[Ww]ho (is|are|was|has|have|does|do|says|takes|gets|sends|comes|goes|holds|may|can|asks|wants)\b(?![^.]*\?)",
    r"\bwhat (?!to|kind|would happen)\w+(?![^.]*\?)",  # a noun clause: "what it sent"
    r"\b(says|say|said|tells|told|knows) (what|who|where|why|whether|so|it|of|nothing)\b",  # a record does not speak
    r"\b(is|are|was|were|be|been) (told|said|asked for|let)\b",  # passive of speech
    r"\b(stands?|stood) (on|by|in|at|where|there|to|with|still|all)\b",  # "stands there"
    r"\b(goes|go|went|gone) (round|on|home|away|to nothing|without)\b",  # movements of data
    r"\b(comes?|came) (home|back|to nothing|again|of|too late|in time|after|before|next|first|last)\b",
    r"\b(sets? out|under way|on (its|the|their) way|on their ways|hands? on|handed on)\b",  # in flight, passes
    r"\b(is|are|was|were|be) (taken|held) (for|as|to be)\b",  # counts as
    r"\bof (its|their|one's|his|our|your) own\b",  # "a thread of its own"
    r"\b(of ours|of theirs|of it|of them all|of those that|of these)\b(?= ?[.,;:]|\Z)",  # genitive alone
    r"\b([Ll]ikewise|alike|anew|afresh|hardly|[Aa]gain and again|now and then|all the same|but for|save for)\b",
    r"\b(astray|strand(s|ed)?|bef[ae]ll(s|en)?|behold\w*|thereof|therein|thence|henceforth)\b",  # old words
    r"\b(news|ladder|seals?|lanes?|departures?|from home|out and back|way (out|back)|(its|their|a peer's) word)\b",
    r"\b(conveners?|stand-ins?|rungs?|vouch\w*|twins?)\b",  # the "instead of" column of the rules of style
    r"(?<![Ii]n[- ])\bflights?\b(?! recorder)",  # a microbatch in flight
    r"\b(as (it is|they are)(?= ?[.,;:])|(is|was|be) (not )?there|there are none|there is none|"
    r"is none|are none|was none)\b",  # presence by "there"
    r"\b(makes?|made|saying|says?|come|comes|came|to) nothing\b",  # "comes to nothing"
    r"\b(not|nothing|none|nor) any more\b|\bany more\b",  # no longer
    r"\b(are|is|was|were) to (be|know|learn|have|read|get)\b",  # must, should
    r"\b(lies|lie) (in|at|on|before|beside|there|with|where)\b",  # a file is in a folder
    r"\bwhere (it|they|that|this) (is|are|was|were|lies|stands)\b",  # its position
    r"\b(by (itself|themselves)|without (one|it|them)|done with)\b",
    r"\bfrom (?!now)\S+ on\b",  # "from stage 1 on"
    r"\bat most[.:]",  # "Texts that wait at most."
    r"\b(for want of|in want of|without company|in company|by way of|in its stead|in their stead)\b",
    r"(\A|[.:;] )\s*(The same (of|for|as|where|in|if|with|at|to)|Nor|Else|Until then|(All|One|Those) that)\b",
    r"\b(takes?|took|taken) (in|note) ",  # "takes note of"
    r"\bif there (is|are|was|were) (one|any|some|none)(?= ?[.,;:]|\Z)",  # "if there is one"
    r"\ball that (is|was|are|has|have|it|they|a)\b",  # everything
    r"\b(where (there|nothing|none|nobody)|when (nothing|none|nobody))\b",  # "where there is none"
    r"\b(one|ones) that (is|are|was|were|has|have|does|did|no|it)\b",  # "one that was lost"
    r"\bwhich [^.,;:]{1,40} (stands|lies|goes|comes)\b",
)
ODD = re.compile("|".join(pattern.replace(" ", r"\s+") for pattern in PATTERNS))
CODE = re.compile(r"``[^`]*``|`[^`]*`|\]\([^)\s]*\)|https?://\S+|<[^>\n]*>|:\w+:(?=`)")
DIRECTIVE = re.compile(r"#\s*(!|noqa|type:|pragma|fmt:|ruff)")
WORD = re.compile(r"[A-Za-z][A-Za-z']*")

Text = tuple[int, str]
"""First line and content of one docstring, comment, message or paragraph."""


def python_texts(source: str) -> Iterator[Text]:
    """Yields docstrings, strings under fields, strings of four words and more, and comments."""
    inner: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "`x`" for part in node.values]
            inner.update(id(part) for part in ast.walk(node) if part is not node)
            yield from long_enough(node.lineno, "".join(map(str, parts)))
        elif (doc := docstring(node)) is not None:
            inner.add(id(doc))
            yield doc.lineno, str(doc.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield from long_enough(node.lineno, node.value)
    yield from comments(source)


def docstring(node: ast.AST) -> ast.Constant | None:
    """Returns the string if the node is a docstring or a string under a field."""
    found = node.value if isinstance(node, ast.Expr) else None
    return found if isinstance(found, ast.Constant) and isinstance(found.value, str) else None


def long_enough(line: int, text: str) -> Iterator[Text]:
    if len(re.findall(r"\s\w+", text)) >= 3 and "{" not in text:
        yield line, text


def comments(source: str) -> Iterator[Text]:
    """Yields comments behind code, and joined lines of others."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = [token for token in tokens if token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string)]
    texts = [(token.line.lstrip().startswith("#"), token.start[0], token.string.lstrip("#: ")) for token in found]
    yield from ((line, text) for whole, line, text in texts if not whole)
    yield from joined((line, text) for whole, line, text in texts if whole)


def joined(lines: Iterable[Text]) -> Iterator[Text]:
    """Joins comments on consecutive lines, whose sentences run on."""
    start, block = 0, list[str]()
    for line, text in lines:
        if block and line == start + len(block):
            block.append(text)
            continue
        if block:
            yield start, "\n".join(block)
        start, block = line, [text]
    if block:
        yield start, "\n".join(block)


def proto_texts(source: str) -> Iterator[Text]:
    numbered = enumerate(source.splitlines(), 1)
    yield from joined((number, line.partition("//")[2].strip()) for number, line in numbered if "//" in line)


def markdown_texts(source: str) -> Iterator[Text]:
    """Yields paragraphs, list items and table cells, without blocks of code."""
    prose = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), source, flags=re.M | re.S)
    for match in re.finditer(r"(?:(?!\n\s*\n|\n\s*[-*|#]|\|).)+", prose, re.S):
        yield prose.count("\n", 0, match.start()) + 1, match[0]


READERS = {".py": python_texts, ".proto": proto_texts, ".md": markdown_texts}


def files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = (file for file in sorted(path.rglob("*")) if file.suffix in READERS and file.is_file())
    return [file for file in found if not SKIPPED & set(file.relative_to(path).parts[:-1])]


def hits(path: Path) -> tuple[int, list[Text]]:
    """Returns the number of words in a file, and its odd constructions."""
    words, found = 0, []
    for line, text in READERS[path.suffix](path.read_text(encoding="utf-8", errors="replace")):
        plain = CODE.sub("`", text)
        words += len(WORD.findall(plain))
        for match in ODD.finditer(plain):
            around = plain[max(0, match.start() - 30) : match.end() + 40]
            found.append((line + plain.count("\n", 0, match.start()), f"[{match[0]}] {' '.join(around.split())}"))
    return words, found


def count(path: Path) -> tuple[int, int]:
    counts = [hits(file) for file in files(path)]
    return sum(words for words, _ in counts), sum(len(found) for _, found in counts)


def share(path: Path) -> str:
    """Describes how many of a package's lines are docstrings (with strings under fields) and comments."""
    total: Counter[str] = Counter()
    for file in files(path):
        if file.suffix != ".py":
            continue
        source = file.read_text()
        total["lines"] += source.count("\n")
        total["comments"] += sum(line.lstrip().startswith("#") or "  # " in line for line in source.splitlines())
        for node in ast.walk(ast.parse(source)):
            if (doc := docstring(node)) is not None:
                total["docstrings"] += (doc.end_lineno or doc.lineno) - doc.lineno + 1
    lines = max(1, total["lines"])
    shares = (100 * total[kind] / lines for kind in ("docstrings", "comments"))
    return "docstrings {:5.1f} %, comments {:4.1f} %".format(*shares) + f" of {lines} lines"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.words", description=__doc__)
    parser.add_argument("paths", nargs="*", metavar="PATH", help="packages or files (default: all of ours)")
    parser.add_argument("--find", action="store_true", help="print each hit as file:line:text")
    parser.add_argument("--share", action="store_true", help="print shares of docstrings and comments in lines")
    parser.add_argument("--peers", action="store_true", help="count in installed peers as well")
    asked = parser.parse_args()
    paths = [Path(path).resolve() for path in asked.paths] or [ROOT / name for name in (*PACKAGES, *DOCUMENTS)]
    specs = [find_spec(name) for name in PEERS] if asked.peers else []
    peers = [Path(place) for spec in specs if spec for place in spec.submodule_search_locations or ()]
    out, failed = sys.stdout.write, False
    for path in [*paths, *peers]:
        name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) and path not in peers else path.name
        if asked.find:
            for file in files(path):
                place = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
                out("".join(f"{place}:{line}: {text}\n" for line, text in sorted(hits(file)[1])))
        elif asked.share:
            if any(file.suffix == ".py" for file in files(path)):
                out(f"{name:<26}{share(path)}\n")
        else:
            words, odd = count(path)
            rate = 1000 * odd / max(1, words)
            above = rate > LIMIT and path not in peers
            out(f"{name:<26}{words:8} words{odd:6} odd{rate:7.1f} in 1,000{'  above the limit' if above else ''}\n")
            failed = failed or above
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
