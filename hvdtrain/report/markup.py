"""HTML in small: escaping, tables, cards."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import NewType

# Text that is HTML already.
Markup = NewType("Markup", str)


def escape(text: object) -> Markup:
    """Any text as HTML."""
    return Markup(html.escape(str(text)))


def join(parts: Sequence[Markup], between: str = "") -> Markup:
    """Several as one."""
    return Markup(between.join(parts))


def section(title: str, body: Markup) -> Markup:
    """A part of the page with a heading; nothing where there is no body."""
    return Markup(f"<section><h2>{escape(title)}</h2>{body}</section>") if body else Markup("")


def cards(parts: Sequence[Markup]) -> Markup:
    """Pictures side by side, as many as fit."""
    return Markup(f'<div class="cards">{"".join(parts)}</div>') if parts else Markup("")


def card(title: str, body: Markup, note: str = "") -> Markup:
    """One picture with its title, and a line below it."""
    below = f"<p class=note>{escape(note)}</p>" if note else ""
    return Markup(f"<figure><figcaption>{escape(title)}</figcaption>{body}{below}</figure>")


def note(text: str) -> Markup:
    """A paragraph in small print; Markdown's `code` and **bold** are understood."""
    return Markup(f"<p class=note>{_inline(text)}</p>")


def table(head: Sequence[str], rows: Sequence[Sequence[Markup]]) -> Markup:
    """A table that scrolls sideways where the window is narrow. Columns of numbers are set to the right."""
    numeric = [bool(rows) and all(_is_number(row[column]) for row in rows) for column in range(len(head))]

    def line(cells: Sequence[str], tag: str) -> str:
        made = [f"<{tag}{_class(cell, numeric[i])}>{cell}</{tag}>" for i, cell in enumerate(cells)]
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return Markup(
        f'<div class="scroll"><table><thead>{line([escape(name) for name in head], "th")}</thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def markdown(text: str) -> Markup:
    """The Markdown that our benchmarks write (headings, pipe tables, paragraphs) as HTML."""
    parts: list[Markup] = []
    for block in re.split(r"\n\s*\n", text.strip()):
        lines = block.splitlines()
        if lines[0].startswith("|") and len(lines) > 1:
            cells = [[_inline(cell.strip()) for cell in line.strip().strip("|").split("|")] for line in lines]
            parts.append(table([html.unescape(name) for name in cells[0]], cells[2:]))
        elif lines[0].startswith("#"):
            parts.append(Markup(f"<h3>{_inline(lines[0].lstrip('# '))}</h3>"))
        else:
            parts.append(Markup(f"<p>{_inline(' '.join(lines))}</p>"))
    return join(parts)


def _inline(text: str) -> Markup:
    marked = re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))
    return Markup(re.sub(r"\*\*([^*]*)\*\*", r"<strong>\1</strong>", marked))


def _class(cell: str, is_numeric: bool) -> str:
    if is_numeric:
        return " class=n"
    # May be broken into lines.
    return " class=long" if len(re.sub(r"<[^>]*>", "", cell)) > 32 else ""


def _is_number(cell: str) -> bool:
    plain = re.sub(r"<[^>]*>", "", cell).replace(",", "").strip().rstrip("%")
    return plain in ("", "-") or re.fullmatch(r"[-+]?\d+(\.\d*)?(e[-+]?\d+)?( ?(s|ms|MB))?", plain) is not None
