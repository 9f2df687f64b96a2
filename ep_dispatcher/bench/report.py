"""Two pages from recorded lines: Markdown with its pictures beside it, and one HTML file alone."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path

from ep_dispatcher.bench.interference import ALONE, BESIDE, CONTROL
from ep_dispatcher.bench.page_data import (
    Line,
    Table,
    best_table,
    cost_table,
    host_table,
    interference_table,
    newest,
    phase_table,
    proof_table,
    rate_table,
    refusal_table,
    with_knobs,
)
from ep_dispatcher.bench.plots import Plot, make_plots
from ep_dispatcher.errors import ConfigError

_PRODUCTS = {ALONE, BESIDE, CONTROL}
_WORK = {"ranks", "num_tokens", "hidden", "num_topk", "num_experts", "dtype", "routing", "num_sms"}
_NEEDED = _WORK | {"run", "when", "commit", "command", "machine", "versions", "backend"}

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 100rem; padding: 0 1rem;
  color: #1c2733; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.5rem; border-bottom: 2px solid #0b6e4f; }
h3 { margin: 1.6rem 0 .4rem; font-size: 1rem; } .facts, .note, figcaption { color: #5a6774; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
th, td { padding: .3rem .5rem; text-align: right; border-bottom: 1px solid #e3e7eb; }
td { white-space: nowrap; } th { vertical-align: bottom; }
.words td { white-space: normal; min-width: 9rem; }
th:first-child, td:first-child { text-align: left; font-weight: 600; }
.words td, .words th { text-align: left; } tbody tr:hover { background: #f2f7f5; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(32rem, 1fr)); gap: 1rem; }
figure { margin: 0; } img { width: 100%; }
"""


def write_pages(lines: Sequence[Line], folder: Path) -> list[Path]:
    """Write report.md with its PNGs and report.html; returns the two pages.

    Raises:
        ConfigError: there are no lines, none that names all of its work, or no room for a folder.
    """
    if not lines:
        raise ConfigError("there are no recorded lines to report on")
    named = [with_knobs(line) for line in lines if set(line) >= _NEEDED]
    if not named:
        raise ConfigError(
            f"none of the {len(lines)} lines is of `bench run`, whose lines name "
            f"{', '.join(sorted(_NEEDED))}"
        )
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; give a folder for the pages")
    folder.mkdir(parents=True, exist_ok=True)
    # A later run of a cell without products beside it does not hide those of an earlier one.
    shown = newest([line for line in named if line.get("phase") not in _PRODUCTS])
    products = newest([line for line in named if line.get("phase") in _PRODUCTS])
    plots = make_plots(shown, products)
    for plot in plots:
        (folder / f"{plot.name}.png").write_bytes(plot.png)
    facts, sections = _facts([*shown, *products]), _sections(shown, products)
    pages = {
        "report.md": _markdown(facts, sections, plots),
        "report.html": _html(facts, sections, plots),
    }
    for name, text in pages.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in pages]


_Sections = list[tuple[str, list[Table]]]


def _sections(lines: Sequence[Line], products: Sequence[Line]) -> _Sections:
    """Headed tables in reading order, without empty ones."""
    best = best_table(lines)
    sections = [
        ("Times", [*([best] if best else []), *phase_table(lines)]),
        ("Bytes", [rate_table(lines)]),
        ("Costs", [interference_table(products), cost_table(lines), host_table(lines)]),
        ("What ran, and what did not", [proof_table(lines), refusal_table(lines)]),
    ]
    kept = [(title, [table for table in tables if table.rows]) for title, tables in sections]
    return [(title, tables) for title, tables in kept if tables]


def _facts(lines: Sequence[Line]) -> list[str]:
    """Machine, clocks and rules; then each run with its date, commit, versions and command."""
    clocks = next((line["clocks"] for line in lines if line.get("clocks")), None)
    machines = dict.fromkeys(_machine_words(line["machine"]) for line in lines)
    facts = [f"Machine: {what}." for what in machines]
    if len(machines) > 1:
        facts.insert(0, "These runs are of several machines, so their times do not compare.")
    if clocks:
        facts.append("Clocks: " + ", ".join(f"{k} {v:g}" for k, v in clocks.items()) + ".")
    facts.append(
        "Every time is the median over the rounds of the slowest rank of each round, after the "
        "result was checked against a dense reference; every figure is from a JSON line. A cell "
        "that several runs measured is shown from the last of them."
    )
    first_of_runs = {line["run"]: line for line in reversed(lines)}
    runs = sorted(first_of_runs.values(), key=lambda line: str(line["when"]))
    return [*facts, *map(_run_words, runs)]


def _machine_words(machine: Line) -> str:
    what = f"{machine['gpu_count']} x {machine['gpu']}" if "gpu" in machine else machine["cpu"]
    return f"{what}; ranks share it: {machine['sharing']}"


def _run_words(line: Line) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in line["versions"].items())
    return (
        f"Run {line['run']}, {line['when']}, commit {line['commit'][:12]}; {versions}. "
        f"Command: {line['command']}"
    )


def _markdown(facts: Sequence[str], sections: _Sections, plots: Sequence[Plot]) -> str:
    """The Markdown page."""
    parts = ["# Ablation report", *(f"- {fact}" for fact in facts), ""]
    for plot in plots:
        parts += [f"![{plot.caption}]({plot.name}.png)", "", plot.caption, ""]
    for title, tables in sections:
        parts += [f"## {title}", ""]
        for table in tables:
            parts += [f"### {table.title}", ""]
            parts.append("| " + " | ".join(table.head) + " |")
            parts.append("|" + "---|" * len(table.head))
            parts += ["| " + " | ".join(_cell(c) for c in row) + " |" for row in table.rows]
            parts += ["", table.note, ""] if table.note else [""]
    return "\n".join(parts).rstrip() + "\n"


def _html(facts: Sequence[str], sections: _Sections, plots: Sequence[Plot]) -> str:
    """The HTML page: pictures inside, nothing fetched."""
    parts = ["<h1>Ablation report</h1>", '<ul class="facts">']
    parts += [f"<li>{html.escape(fact)}</li>" for fact in facts]
    parts += ["</ul>", "<h2>At a glance</h2>", '<div class="plots">']
    parts += [_figure(plot) for plot in plots]
    parts.append("</div>")
    for title, tables in sections:
        parts.append(f"<h2>{html.escape(title)}</h2>")
        parts += [_html_table(table) for table in tables]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<title>Ablation report</title>"
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _figure(plot: Plot) -> str:
    data = base64.b64encode(plot.png).decode()
    caption = html.escape(plot.caption)
    return (
        f'<figure><img alt="{caption}" src="data:image/png;base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _html_table(table: Table) -> str:
    words = ' class="words"' if {"why", "notes"} & set(table.head) else ""
    # A name of several words may break, so that all phases fit beside each other.
    head = "".join(f"<th>{html.escape(cell.replace('_', ' '))}</th>" for cell in table.head)
    rows = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in table.rows
    )
    note = f'<div class="note">{html.escape(table.note)}</div>' if table.note else ""
    return (
        f'<h3>{html.escape(table.title)}</h3>{note}<div class="wide"><table{words}><thead>'
        f"<tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>"
    )


def _cell(text: str) -> str:
    """A cell that breaks no Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")
