"""What the pages show, taken from recorded lines: tables and series, no drawing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ep_dispatcher.bench.interference import ALONE, BESIDE, CALLS, CONTROL, why_no_figure

Line = dict[str, Any]
PHASES = ("plan", "permute", "dispatch", "combine", "unpermute")
BACKWARD_PHASES = ("combine_backward", "dispatch_backward", "pair")
LAYER_PHASES = ("layer_forward", "layer_backward")
SHOWN_PHASES = ("plan_static", *PHASES, *BACKWARD_PHASES, *LAYER_PHASES)
RATES = ("wire", "D1", "D2", "D3", "D4_send", "D4_receive", "D5_assignments", "D5_pairs")
_SETTING = (
    "ranks",
    "domains",
    "num_tokens",
    "hidden",
    "num_topk",
    "num_experts",
    "dtype",
    "routing",
    "skew",
    "masked_fraction",
    "alignment",
    "chunk_tokens",
    "seed",
    "trace",
    "ffn_hidden",
)


@dataclass(frozen=True)
class Table:
    """A titled table of texts; the first column names the row."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


class Series(NamedTuple):
    """Curves of one plot.

    Attributes:
        words: the setting that all points share.
        points: backend -> [(axis value, value)] by ascending axis value.
        runs: backend -> the run of each of its points.
    """

    words: str
    points: dict[str, list[tuple[float, float]]]
    runs: dict[str, list[str]]


def with_knobs(line: Line) -> Line:
    """A line whose backend is named with the knobs of its own that were set.

    Example: backend "ep_dispatcher/device", combine "push" -> "ep_dispatcher/device, push".
    """
    words = [str(line[name]) for name in ("combine", "duplicates") if name in line]
    return line | {"backend": ", ".join([line["backend"], *words])}


def newest(lines: Sequence[Line]) -> list[Line]:
    """Lines without those of a cell that a later run measured again, backend by backend.

    A cell is a backend with its knobs, a setting and a number of SMs. So a table never puts phases
    of two runs into one row. Backends come in the order of their first lines, forms of one backend
    beside each other, SMs ascending.
    """
    last = {_cell_of(line): line["run"] for line in lines}
    kept = [line for line in lines if line["run"] == last[_cell_of(line)]]
    plain = [name.split(",")[0] for name in backends_of(lines)]
    return sorted(
        kept,
        key=lambda line: (
            plain.index(line["backend"].split(",")[0]),
            line["backend"],
            line["num_sms"],
        ),
    )


def _cell_of(line: Line) -> tuple[object, ...]:
    return (line["backend"], line["num_sms"], *setting_of(line))


def timed(lines: Sequence[Line]) -> list[Line]:
    """Lines with a time."""
    return [line for line in lines if "median_us" in line]


def setting_of(line: Line) -> tuple[object, ...]:
    """What was moved, whatever moved it and with how many SMs."""
    return tuple(line.get(name) for name in _SETTING)


def setting_words(line: Line, axis: str = "") -> str:
    """A setting for people, without the field that a plot runs over."""
    words = [f"{line['ranks']} ranks", f"H={line['hidden']}"]
    if axis != "num_tokens":
        words.insert(1, f"T={line['num_tokens']}")
    words += [f"K={line['num_topk']}", f"E={line['num_experts']}", str(line["dtype"])]
    words.append(
        str(line["routing"]) + (f" {line['skew']:g}" if "skew" in line and axis != "skew" else "")
    )
    if line.get("masked_fraction"):
        words.append(f"{line['masked_fraction']:.0%} masked")
    if line.get("domains", 1) > 1:
        words.append(f"{line['domains']} domains")
    if line.get("ffn_hidden"):
        words.append(f"experts of {line['ffn_hidden']}")
    return ", ".join(words)


def backends_of(lines: Sequence[Line]) -> list[str]:
    """Backends in the order in which they appear."""
    return list(dict.fromkeys(line["backend"] for line in lines))


def phase_table(lines: Sequence[Line]) -> list[Table]:
    """For each setting, fewest ranks first: median and p95 of each phase, by backend and SMs."""
    tables: list[Table] = []
    by_ranks = sorted(lines, key=lambda line: int(line["ranks"]))
    for setting in dict.fromkeys(map(setting_of, by_ranks)):
        mine = [line for line in lines if setting_of(line) == setting]
        found = {line["phase"] for line in timed(mine)}
        phases = [phase for phase in SHOWN_PHASES if phase in found]
        rows = [row for key in _variants(mine) for row in _phase_rows(mine, key, phases)]
        head = ("backend", "SMs", *phases, "round trip", "run")
        note = (
            "Microseconds, median / 95th percentile of the slowest rank of each round. The "
            "backward phases hold the backward of the permutes too. Pair: dispatch, combine and "
            "the backward of both, back to back, all permutes included. "
            "Plan static: the plan where the host waits for nothing. "
            "Round trip: the medians of plan to unpermute, added. Run: `run` of the JSON lines."
        )
        tables.append(Table(setting_words(mine[0]), head, tuple(rows), "" if tables else note))
    return tables


def best_table(lines: Sequence[Line]) -> Table | None:
    """Equal SMs against each backend's best SMs; None where SMs were not swept."""
    rows = []
    budgets = sorted({line["num_sms"] for line in timed(lines)})
    for setting in dict.fromkeys(map(setting_of, timed(lines))):
        mine = [line for line in timed(lines) if setting_of(line) == setting]
        if len({line["num_sms"] for line in mine}) < 2:
            continue
        for backend in backends_of(mine):
            totals = {
                sms: total
                for sms in budgets
                if (total := round_trip_us(mine, (backend, sms))) is not None
            }
            if totals:
                best = min(totals, key=lambda sms: totals[sms])
                equal = [f"{totals[sms]:,.0f}" if sms in totals else "-" for sms in budgets]
                cell = " / ".join(equal)
                words = setting_words(mine[0])
                rows.append((backend, words, cell, str(best), f"{totals[best]:,.0f}"))
    if not rows:
        return None
    sms_words = " / ".join(map(str, budgets))
    head = ("backend", "setting", f"us at equal SMs ({sms_words})", "best SMs", "us there")
    note = "Forward round trip; - where a backend was not run."
    return Table("Equal SMs and each one's best", head, tuple(rows), note)


def rate_table(lines: Sequence[Line]) -> Table:
    """The bandwidth definitions side by side, for dispatch and combine of each setting."""
    rows = []
    planned = {_cell_of(line) for line in timed(lines) if line["phase"] == "plan"}
    for line in timed(lines):
        rates = line.get("bandwidth_GBps")
        if not rates or line["phase"] not in ("dispatch", "combine"):
            continue
        share = line.get("ceiling_fraction")
        ceiling = f"{share:.0%} of {line['ceiling']}" if share is not None else ""
        rows.append(
            (
                line["backend"],
                f"{setting_words(line)}, {line['num_sms']} SMs",
                line["phase"],
                f"{line['wire_bytes'] / 1e6:,.2f}",
                *(_rate_words(rates, name, _cell_of(line) in planned) for name in RATES),
                ceiling,
            )
        )
    head = ("backend", "setting", "phase", "wire MB", *RATES, "of the measured ceiling")
    return Table("Bytes and bandwidths, GB/s a rank", head, tuple(rows), RATES_NOTE)


def _rate_words(rates: dict[str, float], name: str, has_plan: bool) -> str:
    """A rate; "-" for one that charges a plan where none was timed, whatever an old line says."""
    if name not in rates or (name.startswith("D5") and not has_plan):
        return "-"
    return f"{rates[name]:.3g}"


def cost_table(lines: Sequence[Line]) -> Table:
    """Memory, host time, launches and waits of each backend."""
    rows = []
    seen = set()
    for line in timed(lines):
        key = (line["backend"], line["num_sms"], setting_of(line))
        if key in seen:
            continue
        seen.add(key)
        rows.append(
            (
                line["backend"],
                f"{setting_words(line)}, {line['num_sms']} SMs",
                _megabytes(line.get("persistent_bytes")),
                _megabytes(line.get("peak_bytes")),
                f"{line.get('cpu_us', 0):,.0f}",
                str(line.get("launches", "not counted")),
                str(line.get("host_syncs", "not counted")),
                f"{line.get('open_s', 0):.2f}",
                f"{line.get('max_error', 0):.1e}",
            )
        )
    head = (
        "backend",
        "setting",
        "persistent MB",
        "peak MB",
        "CPU us a round",
        "launches",
        "host waits",
        "open s",
        "largest error",
    )
    note = (
        "A round is plan, dispatch, combine and both backwards. CPU: of one process, with all that "
        "its threads spend in waiting for the device. Largest error: of a sum against float64, as "
        "a share of the sum of its terms' magnitudes. Host waits: calls of the CUDA runtime that "
        "wait; a host that polls memory, as most do for counts, is not seen here."
    )
    return Table("Costs beside time", head, tuple(rows), note)


def host_table(lines: Sequence[Line]) -> Table:
    """How long each call keeps the host."""
    known = [line for line in timed(lines) if "host_us" in line and line["phase"] != "pair"]
    phases = [phase for phase in SHOWN_PHASES if phase in {line["phase"] for line in known}]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for line in known:
        key = line["backend"], f"{setting_words(line)}, {line['num_sms']} SMs"
        cells.setdefault(key, {})[line["phase"]] = f"{line['host_us']:,.0f}"
    rows = [(*key, *(mine.get(phase, "") for phase in phases)) for key, mine in cells.items()]
    note = (
        "Microseconds from call to return, mean of the rounds, slowest rank. On a GPU the device "
        "is held for about 2 ms before each call, so a call that takes longer has waited for it, "
        "and the others are what the host needs to queue them."
    )
    return Table("Host time of a call", ("backend", "setting", *phases), tuple(rows), note)


def slow_down(lines: Sequence[Line], variant: tuple[str, int]) -> float | None:
    """Time of products beside communication over their time alone; None where that is unknown."""
    alone, beside = (median_us(lines, variant, phase) for phase in (ALONE, BESIDE))
    known = alone is not None and beside is not None and _why_no_figure(lines, variant) is None
    return beside / alone if known else None  # type: ignore[operator]


def interference_table(lines: Sequence[Line]) -> Table:
    """What communication costs matrix products that run at the same time."""
    rows = []
    for setting in dict.fromkeys(map(setting_of, timed(lines))):
        mine = [line for line in timed(lines) if setting_of(line) == setting]
        for variant in _variants(mine):
            times = [median_us(mine, variant, phase) for phase in (ALONE, BESIDE, CONTROL)]
            if times[1] is None:
                continue
            ratio = slow_down(mine, variant)
            cells = ("" if us is None else f"{us:,.0f}" for us in times)
            where = f"{setting_words(mine[0])}, {variant[1]} SMs"
            verdict = _why_no_figure(mine, variant) if ratio is None else f"{ratio:.3f}"
            calls = _calls_words(mine, variant)
            run = ", ".join(runs_of(mine, [variant]))
            rows.append((variant[0], where, *cells, calls, str(verdict), run))
    columns = ("alone us", "beside us", "beside products us")
    head = ("backend", "setting", *columns, "calls", "slower", "run")
    note = (
        "Four products of [T, H] and [H, H/2] in a row: alone, while dispatch and combine repeat, "
        "and (a control) beside as many more products. Calls: dispatch and combine together that "
        "ended while the products ran. Slower: beside over alone."
    )
    return Table("Matrix products beside communication", head, tuple(rows), note)


def _why_no_figure(lines: Sequence[Line], variant: tuple[str, int]) -> str | None:
    """Why a slow-down cannot be told from these lines; None where it can."""
    alone, control = (median_us(lines, variant, phase) for phase in (ALONE, CONTROL))
    calls = _calls_beside(lines, variant)
    if alone is None or control is None or calls is None:
        return "no figure: these lines do not tell whether communication ran beside the products"
    return why_no_figure(calls, control / alone)


def _calls_beside(lines: Sequence[Line], variant: tuple[str, int]) -> float | None:
    """Communication calls that ended while products ran; the last line counts."""
    found = [
        float(line[CALLS])
        for line in timed(lines)
        if (line["backend"], line["num_sms"]) == variant and CALLS in line
    ]
    return found[-1] if found else None


def _calls_words(lines: Sequence[Line], variant: tuple[str, int]) -> str:
    calls = _calls_beside(lines, variant)
    return "unknown" if calls is None else f"{calls:.1f}"


def proof_table(lines: Sequence[Line]) -> Table:
    """What really ran under each name."""
    rows = {}
    for line in timed(lines):
        identity = line.get("identity")
        if identity:
            versions = ", ".join(f"{k} {v}" for k, v in identity["versions"].items())
            rows[line["backend"]] = (
                line["backend"],
                ", ".join(identity["classes"]),
                ", ".join(identity["files"]),
                versions,
                "; ".join(identity["notes"]),
            )
    head = ("backend", "classes", "files", "versions", "notes")
    return Table("What ran", head, tuple(rows.values()))


def refusal_table(lines: Sequence[Line]) -> Table:
    """Rows without a time, and why."""
    rows = [
        (line["backend"], f"{setting_words(line)}, {line['num_sms']} SMs", line["error"])
        for line in lines
        if "error" in line
    ]
    return Table("Without a time", ("backend", "setting", "why"), tuple(rows))


def series(
    lines: Sequence[Line],
    axis: str,
    value: Callable[[Sequence[Line], tuple[str, int]], float | None],
    *,
    where: Callable[[Line], bool] = lambda line: True,
) -> Series:
    """Points of each backend along one swept field, all other fields being equal.

    The setting with most points is shown, of several the one with most backends; fields that travel
    with the axis (the skew with zipf) are not compared.

    Args:
        lines: recorded.
        axis: a field of the work.
        value: of the lines of one setting and (backend, SMs).
        where: lines to look at.

    Returns:
        Backends with two points or more.
    """
    families: dict[tuple[object, ...], list[Line]] = {}
    for line in timed(lines):
        if axis in line and where(line):
            families.setdefault(_family(line, axis), []).append(line)
    if not families:
        return Series("", {}, {})
    chosen = max(
        families.values(), key=lambda mine: (_values(mine, axis), _values(mine, "backend"))
    )
    found: dict[str, dict[float, tuple[float, str]]] = {}
    for backend, sms in _variants(chosen):
        for point in sorted({line[axis] for line in chosen}):
            here = [line for line in chosen if line[axis] == point]
            measured = value(here, (backend, sms))
            if measured is not None:
                run = runs_of(here, [(backend, sms)])[-1]
                found.setdefault(backend, {})[float(point)] = (measured, run)
    curves = {name: sorted(mine.items()) for name, mine in found.items() if len(mine) > 1}
    return Series(
        setting_words(chosen[0], axis),
        {name: [(x, y) for x, (y, _) in curve] for name, curve in curves.items()},
        {name: [run for _, (_, run) in curve] for name, curve in curves.items()},
    )


def runs_of(lines: Sequence[Line], variants: Sequence[tuple[str, int]]) -> list[str]:
    """Runs that the lines of some (backend, SMs) pairs are of, each once, in order."""
    mine = [line for line in lines if (line["backend"], line["num_sms"]) in variants]
    return list(dict.fromkeys(str(line.get("run", "")) for line in mine))


def _values(lines: Sequence[Line], field: str) -> int:
    """How many values of a field the lines have."""
    return len({line[field] for line in lines})


def median_us(lines: Sequence[Line], variant: tuple[str, int], phase: str) -> float | None:
    """Median of one phase of one variant; the last line counts."""
    found = [
        float(line["median_us"])
        for line in timed(lines)
        if (line["backend"], line["num_sms"]) == variant and line["phase"] == phase
    ]
    return found[-1] if found else None


def round_trip_us(lines: Sequence[Line], variant: tuple[str, int]) -> float | None:
    """Plan, permutes, dispatch and combine together; None without a dispatch and a combine."""
    times = {phase: median_us(lines, variant, phase) for phase in PHASES}
    if times["dispatch"] is None or times["combine"] is None:
        return None
    return sum(us for us in times.values() if us is not None)


def _variants(lines: Sequence[Line]) -> list[tuple[str, int]]:
    """(backend, SMs) pairs in order."""
    return list(dict.fromkeys((line["backend"], line["num_sms"]) for line in lines))


def _phase_rows(
    lines: Sequence[Line], variant: tuple[str, int], phases: Sequence[str]
) -> list[tuple[str, ...]]:
    """The row of one variant; none where it has no time."""
    mine = [line for line in timed(lines) if (line["backend"], line["num_sms"]) == variant]
    by_phase = {line["phase"]: line for line in mine}
    if not by_phase:
        return []
    cells = []
    for phase in phases:
        line = by_phase.get(phase)
        cells.append(f"{line['median_us']:,.0f} / {line['p95_us']:,.0f}" if line else "")
    total = round_trip_us(mine, variant)
    whole = f"{total:,.0f}" if total else ""
    return [(variant[0], str(variant[1]), *cells, whole, str(mine[-1].get("run", "")))]


def _family(line: Line, axis: str) -> tuple[object, ...]:
    """Everything that must be equal along an axis."""
    dropped = {axis, "rounds"} | ({"num_sms"} if axis == "num_sms" else set())
    kept = [name for name in (*_SETTING, "num_sms") if name not in dropped]
    return tuple(line.get(name) for name in kept)


def _megabytes(size: float | None) -> str:
    return "unknown" if size is None else f"{size / 1e6:,.1f}"


RATES_NOTE = (
    "wire: rows that leave a rank, the figure to hold against a link. "
    "D1: (token, domain) pairs, own domain included (DeepEP RDMA). "
    "D2: rows received, own ones included (DeepEP NVL). "
    "D3: (token, rank) pairs with indices and weights, own rank included (DeepEP V2 logical). "
    "D4: sent and received apart, own rank excluded (NCCL EP bench). "
    "D5: assignments, and (token, rank) pairs, the plan's time charged (CollectiveX); - where the "
    "plan is no phase of its own, as Megatron's, which lies in its permute."
)
