"""A report as one page: tables as the text has them, charts beside, and nothing from elsewhere.

All texts are set as text in a tree, and the page's policy lets nothing run but what is written here.
PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import json
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

from idemguard.report import alarms, plain
from idemguard.report.gather import DAY
from idemguard.report.markup import Column, Times, chart, foreign, listed, note, table, tag, text_of
from idemguard.report.tables import (
    DIGITS,
    MOST_ROWS,
    bill,
    doubled,
    doubled_share,
    hidden,
    in_all,
    newest,
    nothing,
    scoped,
)
from idemguard.report.words import SIGNS, cell, harmless, many, money, share, short, spent
from idemguard.windows import HOUR, SPAN

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from fractions import Fraction
    from xml.etree.ElementTree import Element

    from idemguard.findings import Drop, Growth, Loop, Missed
    from idemguard.report.gather import Report, Row
    from idemguard.report.markup import Cells, Inside
    from idemguard.report.worst import Worst

PAID = ("charged", "wasted", "saved")
UNPAID = ("total_tokens", "wasted_tokens", "saved_tokens")
DRAWN = 12  # bars of a chart
LONG = 300  # characters of a command that scrolls


def page(found: Report) -> str:
    """All of a report, as one HTML file.

    Args:
        found: what it is about.

    Returns:
        The file's text. It holds the report's JSON too, which its charts are drawn from.

    """
    folder = files("idemguard.report") / "page"

    def read(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    style, script = read("style.css"), read("page.js")
    library = read("chart.js").partition("\n//# sourceMappingURL=")[0]
    policy = (
        "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"style-src {_hash(style)}; script-src {_hash(library)} {_hash(script)}; "
        "require-trusted-types-for 'script'"
    )
    title = tag("title", f"idemguard: {harmless(found.namespace)}")
    return Template(read("page.html")).substitute(
        policy=policy,
        title=text_of(title),
        style=style,
        body="\n".join(map(text_of, _body(found))),
        data=_data(found),
        library=library,
        script=script,
    )


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _data(found: Report) -> str:
    """The JSON, in which nothing ends its element or begins another."""
    text = json.dumps(plain.report(found), separators=(",", ":"))  # in ASCII alone
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


# --- the page --------------------------------------------------------------------------------------


def _body(found: Report) -> list[Element]:
    times = Times(found.until)
    about = [tag("h1", "idemguard: ", foreign(found.namespace)), _window(found, times)]
    sums = [_empty(found)] if found.empty else _sums(found, times)
    main = tag("main", _alerts(found, times), *sums, *_findings(found, times))
    looked = (
        "Worst tasks, drops, loops, missed duplicates, growing input and workers are told by the "
        f"newest {many(found.looked_at, 'execution')} whose lines are kept. "
    )
    footer = note(
        looked if found.looked_at else "",
        f"Times are {times.zone}. This page loads nothing and sends nothing; its source holds the "
        "report's JSON.",
    )
    return [tag("header", *about), main, tag("footer", footer)]


def _sums(found: Report, times: Times) -> list[Element | None]:
    return [
        _figures(found),
        _gaps(found),
        _over_time(found, times),
        _cost("task_types", "Cost by task type", "task type", found.task_types),
        _cost("agents", "Cost by agent", "agent", found.agents),
        _worst(found, times),
    ]


def _window(found: Report, times: Times) -> Element:
    inside: list[Inside] = []
    if found.task_type is not None:
        inside += ["Task type ", foreign(found.task_type), ". "]
    if found.agent is not None:
        inside += ["Agent ", foreign(found.agent or "(none)"), ". "]
    if found.since is None:
        inside += ["All until ", times.tag(found.until)]
    else:
        inside += [times.tag(found.since), " to ", times.tag(found.until)]
        inside.append(", sums by whole windows of five minutes or an hour")
    return tag("p", *inside, f", {times.zone}", class_="quiet")


def _section(name: str, title: str, *inside: Inside) -> Element:
    heading = f"{name}-title"
    return tag("section", tag("h2", title, id=heading), *inside, aria_labelledby=heading)


def _rest(more: int) -> Element | None:
    return note(f"and {more:,} more (--format json has all)") if more > 0 else None


def _alerts(found: Report, times: Times) -> Element:
    if isinstance(found.alerts, alarms.Untold):
        late = "Whether anything alerted then can no longer be told"
        return tag("p", f"{late}: windows of five minutes are kept for a day.", class_="quiet")
    if not found.alerts:
        last = "No alert in the last three windows of five minutes"
        return tag("p", f"{last}; {_looked_for(found)}.", class_="quiet")
    lines: list[Element] = []
    for alert in found.alerts:
        when = times.tag(alert.start, "%Y-%m-%d %H:%M"), " to ", times.tag(alert.end, "%H:%M")
        told = alarms.sentence(alert, _in_words, when)
        name = harmless(alert.task_type)
        whole = None if name == alarms.named(alert.task_type) else name
        line = tag("span", tag("strong", alert.kind), tag("span", ": ", *told, title=whole))
        command = alarms.command(alert, found.namespace, store=found.store)
        scrolls = None if len(command) < LONG else "0"
        lines.append(tag("li", line, tag("code", command, tabindex=scrolls)))
    heading = f"{many(len(lines), 'alert')} in the last three windows of five minutes"
    return tag(
        "section",
        tag("h2", heading, id="alerts-title"),
        tag("ul", *lines, class_="alerts"),
        aria_labelledby="alerts-title",
    )


def _looked_for(found: Report) -> str:
    checked = found.checked
    if checked.limits.on and not checked.calls and not checked.executions:
        return "nothing was called or executed in them"
    return alarms.looked_for(
        checked, lambda kind: f"{kind} over {alarms.limit(kind, checked.limits.of[kind].over)}"
    )


def _in_words(task_type: str) -> Element:
    return tag("bdi", alarms.named(task_type))


def _empty(found: Report) -> Element:
    told = [foreign(text) if at % 2 else text for at, text in enumerate(nothing(found))]
    return tag(
        "div",
        tag("p", *told),
        note("What guarded tasks do is shown here as soon as one is called; ",
             tag("code", "idemguard report --namespace NAME"), " shows another namespace."),
        class_="empty",
    )  # fmt: skip


def _limit(found: Report) -> Fraction | None:
    kind = "duplication"
    return found.limits.of[kind].over if kind in found.limits.on else None


def _paid(rows: Iterable[Row]) -> bool:
    return any(row[name] for row in rows for name in PAID)


def _figures(found: Report) -> Element:
    totals, limit = found.totals, _limit(found)
    unknown = 0 < totals["executions"] <= totals["without_usage"]
    lost = unknown and totals["duplicates"]  # what duplicates took is not told either
    of_limit = "" if limit is None else f"; limit {alarms.limit('duplication', limit)}"
    if _paid([totals]):
        big = [*in_all(totals), money(totals["saved"], totals["currency"])]
        tokens = [f"{short(totals[name])} tokens" for name in UNPAID]
    else:
        big = [f"{short(totals[name])} tokens" for name in UNPAID]
        tokens = ["no prices are known"] * 3
    part = ""
    if totals["wasted"] and totals["charged"]:
        part = f"; {share(float(totals['wasted'] / totals['charged']))} of charged"
    rate = totals["duplication_rate"]
    told = (
        ("Charged", "unknown" if unknown else big[0], tokens[0]),
        ("Saved", big[2], f"{tokens[2]}; {many(totals['reused'], 'reused call')}"),
        ("Wasted", "unknown" if lost else big[1], tokens[1] + part),
        (
            "Duplication rate", share(rate),
            f"{totals['duplicates']:,} of {many(totals['executions'], 'execution')}{of_limit}",
        ),
        (
            "Doubled share", doubled_share(totals),
            ("not known of a part; " if totals["doubled_share"] is None else "") + doubled(totals),
        ),
    )  # fmt: skip
    return tag(
        "dl",
        *(
            tag(
                "div",
                tag("dt", name),
                tag("dd", value, class_="value"),
                tag("dd", more, class_="note"),
                class_="bad" if name == "Duplication rate" and _over(rate, limit) else None,
            )
            for name, value, more in told
        ),
        class_="figures",
    )


def _over(rate: float, limit: Fraction | None) -> bool:
    return limit is not None and rate > limit


def _gaps(found: Report) -> Element | None:
    totals = found.totals
    ends = ("failed", "declined", "fallback", "refused", "unguarded")
    ended = ", ".join(f"{totals[name]:,} {name}" for name in ends if totals[name])
    told = [
        f"Of {many(totals['calls'], 'call')}: {ended}." if ended else "",
        f"Lost, with their effect unknown: {many(totals['lost'], 'execution')}."
        if totals["lost"] else "",
        f"The cost of {many(totals['unpriced'], 'execution')} is unknown and not in it: no price "
        "for its model." if totals["unpriced"] else "",
        f"{many(totals['without_usage'], 'execution')} told no usage: their tokens are unknown and "
        "not in it (record_usage)." if totals["without_usage"] else "",
    ]  # fmt: skip
    lines = [tag("li", text) for text in told if text]
    if found.missed_duplicates:
        lines.insert(0, tag("li", tag("strong", hidden(found.missed_duplicates))))
    return tag("ul", *lines, class_="gaps") if lines else None


def _over_time(found: Report, times: Times) -> Element | None:
    rows, limit = found.over_time, _limit(found)
    if not rows:
        return None
    title, key = "Duplication rate over time", [("rate", "Duplication rate")]
    about = "no limit is checked"
    if limit is not None:
        about = f"limit {alarms.limit('duplication', limit)}"
        key.append(("limit", about.capitalize()))
    key += [("executions", "Executions"), ("duplicates", "of them duplicates")]
    rates = [row["duplication_rate"] for row in rows]
    step = {SPAN: "window", HOUR: "hour", DAY: "day"}[rows[0]["end"] - rows[0]["start"]]
    drawing = chart(
        "time",
        f"Duplication rate over time: {many(len(rows), step)}, from {share(min(rates))} to "
        f"{share(max(rates))}, {about}. The table that follows has all figures.",
        key,
        data_chart="over_time",
        data_offset=str(times.minutes),
    )
    columns = [
        Column("from", "text"), Column("until", "text"), Column("executions"),
        Column("duplicates"), Column("duplication rate", "share"),
    ]  # fmt: skip
    listing = table(
        "over_time",
        title,
        f"Executions and duplicates of each {step}, oldest first",
        columns,
        [
            (
                times.tag(row["start"], "%Y-%m-%d %H:%M"),
                times.tag(row["end"], "%Y-%m-%d %H:%M" if step == "day" else "%H:%M"),
                f"{row['executions']:,}",
                f"{row['duplicates']:,}",
                _rate(row["duplication_rate"], limit),
            )
            for row in rows
        ],
    )
    details = tag("details", tag("summary", f"The figures of each {step}"), listing)
    return _section("over_time", title, drawing, details)


def _rate(rate: float, limit: Fraction | None) -> Inside:
    return tag("strong", share(rate)) if _over(rate, limit) else share(rate)


def _cost(of: str, title: str, name: str, rows: Sequence[Row]) -> Element | None:
    key = name.replace(" ", "_")
    if not rows or (key == "agent" and all(row["agent"] is None for row in rows)):
        return None
    paid = _paid(rows)
    fields = PAID if paid else UNPAID
    heads = ("charged", "wasted", "saved") if paid else ("tokens", "wasted tokens", "saved tokens")
    columns = [
        Column(name, "text"),
        *(Column(head, field=field) for head, field in zip(heads, fields, strict=True)),
        *([Column("tokens")] if paid else []), Column("executions"),
        Column("duplication rate", "share"), Column("doubled share", "share"),
    ]  # fmt: skip
    cells: list[Cells] = [
        (
            foreign("(no agent)" if row[key] is None else row[key]),
            *_spent(row, fields),
            *([cell(row["total_tokens"])] if paid else []),
            cell(row["executions"]),
            share(row["duplication_rate"]),
            doubled_share(row),
        )
        for row in rows[:MOST_ROWS]
    ]
    most = "charged" if paid else "executed"
    listing = table(of, title, f"Most {most} first", columns, cells)
    more = _rest(len(rows) - MOST_ROWS)
    drawn = rows[:DRAWN]
    if not any(row[field] for row in drawn for field in fields):
        nothing = note("No tokens and no prices are known here, so that there is nothing to draw.")
        return _section(of, title, nothing, listing, more)
    sums = "charged, wasted and saved" if paid else "tokens, wasted and saved tokens"
    drawing = chart(
        "cost",
        f"{title}: {sums} of {many(len(drawn), name)}. The table that follows has all figures.",
        [
            ("charged", "Charged" if paid else "Tokens"),
            ("wasted", "of it wasted"),
            ("saved", "Saved"),
        ],
        data_chart="cost",
        data_of=of,
        data_fields=" ".join(fields),
        data_sign=_sign(rows[0]["currency"]) if paid else None,
    )
    if len(rows) > len(drawn):
        drawing.append(note(f"The first {len(drawn)} of {len(rows):,}."))
    return _section(of, title, tag("div", drawing, tag("div", listing, more), class_="pair"))


def _sign(currency: str) -> str:
    return SIGNS.get(currency, f"{harmless(currency)} ")


def _spent(row: Row, fields: Sequence[str]) -> list[str]:
    if fields == PAID:
        return [*bill(row, row["currency"]), cell(row["saved"], row["currency"])]
    return [cell(row[name]) for name in fields]


# --- findings --------------------------------------------------------------------------------------


def _task(*, scopes: bool) -> list[Column]:
    """The columns that say which task it is."""
    scope = [Column("scope", "text")] if scopes else []
    return [Column("task type", "text"), *scope, Column("fingerprint", "code")]


def _which(one: Worst | Drop | Loop, *, scopes: bool) -> list[Inside]:
    scope: list[Inside] = [foreign(one.scope or "-")] if scopes else []
    return [foreign(one.task_type), *scope, tag("code", harmless(one.fingerprint[:DIGITS]))]


def _worst(found: Report, times: Times) -> Element | None:
    rows = found.worst_tasks
    if not rows:
        return None
    paid = any(one.charged or one.wasted for one in rows)
    scopes = scoped(rows)
    currency, title = found.totals["currency"], "Worst tasks"
    listing = table(
        "worst_tasks",
        title,
        "Those whose duplicates wasted most, the worst first",
        [
            *_task(scopes=scopes), *([Column("wasted"), Column("charged")] if paid else []),
            Column("wasted tokens"), Column("duplicates"), Column("executions"),
            Column("duplicates by", "text"), Column("last duplicate"),
        ],
        [
            (
                *_which(one, scopes=scopes),
                *(_bill(one, currency) if paid else ()),
                cell(one.wasted_tokens),
                cell(one.duplicates),
                cell(one.executions),
                listed(one.workers),
                times.tag(one.last, "%m-%d %H:%M:%S"),
            )
            for one in rows
        ],
    )  # fmt: skip
    more = note("What happened to one: ", tag("code", "idemguard show FINGERPRINT"))
    return _section("worst_tasks", title, listing, more)


def _bill(one: Worst, currency: str) -> tuple[str, str]:
    return (
        spent(one.wasted, one.unpriced_duplicates, currency),
        spent(one.charged, one.unpriced, currency),
    )


def _findings(found: Report, times: Times) -> list[Element | None]:
    drops, loops = (
        _handed_back(name, rows, times)
        for name, rows in (("drops", newest(found.drops)), ("loops", newest(found.loops)))
    )
    missed, growth = _missed(found.missed_duplicates), _growth(found.growth)
    return [drops, loops, missed, growth, _workers(found)]


_BACK = {
    "drops": (
        "Handed back by everybody, done by nobody; the newest first",
        "give these tasks to a worker that takes them, or widen what one counts as its own.",
    ),
    "loops": (
        "Handed back again and again; the newest first",
        "send each task type to the worker that owns it, and never back to who declined it.",
    ),
}


def _handed_back(of: str, rows: Sequence[Drop | Loop], times: Times) -> Element | None:
    if not rows:
        return None
    title, (about, advice) = of.capitalize(), _BACK[of]
    scopes = scoped(rows)
    columns = [*_task(scopes=scopes), Column("by", "text"), Column("times"), Column("last")]
    cells: list[Cells] = [
        (
            *_which(one, scopes=scopes),
            listed(one.workers),
            f"{one.times:,}",
            times.tag(one.last, "%m-%d %H:%M:%S"),
        )
        for one in rows[:MOST_ROWS]
    ]
    listing, more = table(of, title, about, columns, cells), _rest(len(rows) - MOST_ROWS)
    return _section(of, title, listing, more, note(f"What to do: {advice}"))


def _missed(rows: Sequence[Missed]) -> Element | None:
    if not rows:
        return None
    columns = [
        Column("task type", "text"), Column("suspected fields", "text"), Column("looked at"),
        Column("repeat an earlier one"), Column("tokens"), Column("charged"),
    ]  # fmt: skip
    cells: list[Cells] = [
        (
            foreign(one.task_type),
            _suspects(one),
            f"{one.looked_at:,}",
            f"{one.executions:,}",
            cell(one.tokens),
            "?" if one.charged is None else cell(one.charged),
        )
        for one in rows[:MOST_ROWS]
    ]
    title, about = "Missed duplicates", "Equal to an earlier one but for a field or two"
    return _section(
        "missed_duplicates",
        title,
        table("missed_duplicates", title, about, columns, cells),
        _rest(len(rows) - MOST_ROWS),
        note(
            "What to do: if the work is the same without a field, name it in ",
            tag("code", "volatile=(…)"), "; if it tells two tasks apart, nothing.",
        ),
    )  # fmt: skip


def _suspects(found: Missed) -> Element:
    inside: list[Inside] = []
    for one in found.suspects:
        inside += [", " if inside else "", tag("code", foreign(one.field))]
        inside.append(f" (differs in {one.differs:,} of {many(one.pairs, 'pair')})")
    return tag("span", *inside)


def _growth(rows: Sequence[Growth]) -> Element | None:
    if not rows:
        return None
    columns = [
        Column("task type", "text"), Column("executions"), Column("input tokens"),
        Column("reports per execution"), Column("more with each"), Column("a cap at half saves"),
        Column("a summary every"), Column("saves"),
    ]  # fmt: skip
    cells: list[Cells] = [
        (
            foreign(one.task_type),
            cell(one.executions),
            cell(one.tokens),
            f"{one.steps:.1f}",
            f"{one.per_step:,.0f}",
            cell(one.capped),
            f"{one.every:,} steps",
            cell(one.summarised),
        )
        for one in rows
    ]
    title = "Growing input"
    listing = table("growth", title, "History that is sent along with every step", columns, cells)
    return _section("growth", title, listing)


def _workers(found: Report) -> Element | None:
    rows, currency = found.workers, found.totals["currency"]
    if not rows:
        return None
    paid = any(row["charged"] for row in rows)
    counts = ("executions", "duplicates", "failed", "lost")
    columns = [
        Column("worker", "text"), Column("executions"), *map(Column, counts[1:]),
        Column("tokens"), *([Column("charged"), Column("wasted")] if paid else []),
    ]  # fmt: skip
    cells: list[Cells] = [
        (
            foreign(row["worker"]),
            *(cell(row[name]) for name in counts),
            cell(row["total_tokens"]),
            *(bill(row, currency) if paid else ()),
        )
        for row in rows[:MOST_ROWS]
    ]
    title, more = "Workers", _rest(len(rows) - MOST_ROWS)
    about = f"Of the newest {many(found.looked_at, 'execution')}, most executions first"
    return _section("workers", title, table("workers", title, about, columns, cells), more)
