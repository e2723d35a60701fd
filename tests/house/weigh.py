"""Count the lines of code: without blanks, comments and docstrings.

python tests/house/weigh.py src
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

IDLE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def weight(source: str) -> int:
    """Return how many lines of a module hold code."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {n for token in tokens if token.type not in IDLE for n in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and ast.get_docstring(node) is not None:
            lines -= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    return len(lines)


if __name__ == "__main__":
    weights = [weight(path.read_text(encoding="utf-8")) for path in Path(sys.argv[1]).rglob("*.py")]
    sys.stdout.write(f"{sum(weights):,} lines of code in {len(weights)} files\n")
