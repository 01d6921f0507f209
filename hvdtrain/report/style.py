"""The page's style sheet: light, and dark where the reader's system is."""

# Series of charts: Okabe and Ito's palette, readable apart by people who see fewer colours; lighter for dark pages.
LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
DARK = ("#5cb3ee", "#ff935c", "#35cfa3", "#eaa6cf", "#9ad7fa", "#f7c55e")


def _variables(series: tuple[str, ...], **others: str) -> str:
    named = {f"series-{number}": colour for number, colour in enumerate(series)} | others
    return " ".join(f"--{name.replace('_', '-')}: {value};" for name, value in named.items())


_LIGHT = _variables(
    LIGHT, page="#f6f7f9", card="#ffffff", ink="#1b1f24", muted="#5b6470", line="#dfe3e8", good="#0a7d4f", bad="#b3261e"
)
_DARK = _variables(
    DARK, page="#14171a", card="#1c2125", ink="#e7eaed", muted="#9ba5af", line="#333a41", good="#4cc38a", bad="#ff8a80"
)

STYLE = (
    f":root {{ color-scheme: light dark; {_LIGHT} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}\n"
    """* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main, header, footer { max-width: 1240px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 28px; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 4px; }
h2 { font-size: 1.15rem; margin: 32px 0 10px; }
h3 { font-size: 1rem; margin: 20px 0 8px; }
p { margin: 8px 0; }
.note, footer { color: var(--muted); font-size: .85rem; }
footer { padding-top: 24px; padding-bottom: 28px; }
code { font: .9em ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 360px), 1fr)); gap: 14px;
  align-items: start; margin: 12px 0; }
figure, .scroll, pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
figure { margin: 0; padding: 12px 12px 8px; }
figcaption { font-weight: 600; font-size: .9rem; margin-bottom: 4px; }
svg { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; margin: 12px 0; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; }
th, td { text-align: left; vertical-align: top; padding: 6px 12px; border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--muted); }
td { white-space: nowrap; }
.long { white-space: normal; min-width: 18em; }
.n { text-align: right; font-variant-numeric: tabular-nums; }
tbody tr:last-child td { border-bottom: 0; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 8px 0; font-size: .9rem; }
.key { display: inline-flex; align-items: center; gap: 7px; overflow-wrap: anywhere; vertical-align: bottom; }
.key i { flex: none; width: 18px; height: 0; border-top: 3px solid; }
.good { color: var(--good); font-weight: 600; }
.bad { color: var(--bad); font-weight: 600; }
pre { border-left: 4px solid var(--bad); padding: 10px 12px; overflow-x: auto; font-size: .82rem; }
@media (max-width: 480px) { main, header, footer { padding-left: 12px; padding-right: 12px; } th, td { padding: 5px; } }
@media print { body { background: #fff; } figure, tr { break-inside: avoid; } }
"""
)
