"""Writes the tables in docs/*.md that follow from the code; `--check` only says whether they are up to date.

A table stands between `<!-- NAME -->` and `<!-- /NAME -->`; what is between them is replaced.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from swiftcruise.runtime.config import settings_table

DOCS = Path(__file__).resolve().parent

#: File, name of the block in it, and what writes the block.
TABLES: list[tuple[str, str, Callable[[], str]]] = [
    ("configuration.md", "settings", settings_table),
]


def fill(text: str, name: str, table: str) -> str:
    """`text` with `table` in place of the block `name`."""
    block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    filled, count = block.subn(lambda match: f"{match[1]}{table}\n{match[2]}", text)
    if count != 1:
        raise SystemExit(f"expected one block <!-- {name} --> ... <!-- /{name} -->, found {count}")
    return filled


def main() -> int:
    """Write the tables, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a table is out of date")
    check = parser.parse_args().check
    stale = False
    for file, name, table in TABLES:
        path = DOCS / file
        old = path.read_text(encoding="utf-8")
        new = fill(old, name, table())
        if new == old:
            continue
        stale = True
        print(f"docs/{file}: {name} {'is out of date; run make docs' if check else 'written'}")
        if not check:
            path.write_text(new, encoding="utf-8")
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main())
