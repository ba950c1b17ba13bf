"""A table as rich text for the terminal, as Markdown, as LaTeX (booktabs) and as CSV."""

import csv
import io
from collections.abc import Sequence

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from fedbnn.report.values import Table

SAID = {"–": "--", "−": "$-$", "±": r"$\pm$", "\\": r"\textbackslash{}"}
SAID |= {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX = str.maketrans({letter: rf"\{letter}" for letter in "_%&#${}"} | SAID)


def terminal(table: Table) -> RichTable:
    """For a terminal of any width: nothing is cut off, and the best have a star besides colour."""
    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    drawn.title, drawn.title_justify = Text(table.title, "bold"), "left"
    drawn.caption, drawn.caption_justify = Text("\n".join(table.notes), "dim"), "left"
    drawn.add_column(table.heads[0], overflow="fold")
    for head in table.heads[1:]:
        drawn.add_column(head.replace(" ", "\n"), justify="right", overflow="fold")
    for row in table.rows:
        last_task = row is table.rows[-1] and row.name == "average"
        style = "dim" if row.quiet else "bold" if last_task else ""
        texts = [(cell.text("±"), cell.best) for cell in row.cells]
        cells = [Text(f"*{one}", "bold green") if best else Text(one) for one, best in texts]
        drawn.add_row(Text(row.name), *cells, style=style)
    return drawn


def markdown(table: Table) -> str:
    """A pipe table under its title; the best in bold."""
    lines = [table.heads, ("---", *("---:" for _ in table.heads[1:]))]
    for row in table.rows:
        texts = (f"**{cell.text()}**" if cell.best else cell.text() for cell in row.cells)
        lines.append((row.name, *texts))
    safe = [[part.replace("|", r"\|") for part in line] for line in lines]
    body = "\n".join(f"| {' | '.join(line)} |" for line in safe)
    notes = "".join(f"\n{note}.  " for note in table.notes)
    return f"**{table.title}**\n\n{body}\n{notes}\n"


def latex(table: Table) -> str:
    """A booktabs table; needs `\\usepackage{booktabs}`."""
    caption = _latex(". ".join([table.title, *table.notes]))
    cells = [[_latex(cell.text(), cell.best) for cell in row.cells] for row in table.rows]
    lines = [[_latex(row.name), *own] for row, own in zip(table.rows, cells, strict=True)]
    every = [list(map(_latex, table.heads)), *lines]
    head, *body = (" & ".join(line) + " \\\\\n" for line in every)
    columns = "l" + "r" * (len(table.heads) - 1)
    ruled = f"\\toprule\n{head}\\midrule\n{''.join(body)}\\bottomrule\n"
    tabular = f"\\begin{{tabular}}{{{columns}}}\n{ruled}\\end{{tabular}}"
    return f"\\begin{{table}}\n\\centering\n\\caption{{{caption}.}}\n{tabular}\n\\end{{table}}\n"


def _latex(text: str, best: bool = False) -> str:
    safe = text.translate(LATEX)
    return rf"\textbf{{{safe}}}" if best else safe


def comma_separated(tables: Sequence[Table]) -> str:
    """All numbers, unrounded, one to a line: table, row, column, value, spread."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(("table", "row", "column", "value", "spread"))
    for table in tables:
        for row in table.rows:
            for head, cell in zip(table.heads[1:], row.cells, strict=True):
                writer.writerow((table.title, row.name, head, cell.value, cell.spread))
    return written.getvalue()
