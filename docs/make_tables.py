"""Writes the table of fields in ``checkpoints.md`` from the rules themselves: ``python docs/make_tables.py``."""

from __future__ import annotations

from pathlib import Path

from lightning_amp_plus.checkpoint.rules import TABLE

PAGE = Path(__file__).with_name("checkpoints.md")
BEGIN, END = "<!-- fields: made by docs/make_tables.py -->", "<!-- end of fields -->"


def fields_table() -> str:
    """The table in Markdown, a row for each rule."""
    rows = ["| field | what is compared | verdict where it differs | can be allowed |", "|-|-|-|-|"]
    rows += [f"| `{c.field}` | {c.compares} | {c.rule} | {'yes' if c.waivable else ''} |" for c in TABLE]
    return "\n".join(rows)


def with_table(page: str) -> str:
    """The page with the table as it is now."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{fields_table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
