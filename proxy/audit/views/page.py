"""One page of HTML about a log: verdict, coverage by hour, counts, keys, findings.

Self-contained: no script, no font, no address. All that comes from the log is escaped.
"""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Any

from proxy.audit.views.meanings import MEANINGS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proxy.audit.findings import Result
    from proxy.audit.views.stats import Stats

_DAYS_SHOWN = 400
_ROWS_SHOWN = 200

Texts = dict[str, Any]

TEXTS: dict[str, Texts] = {
    "en": {
        "title": "Audit report",
        "verdict": "Verdict",
        "chains": "Chains",
        "coverage": "Records by hour (UTC)",
        "silent": "hours without a record",
        "classes": "Requests by class",
        "outcomes": "Requests by outcome",
        "statuses": "Requests by status",
        "tokens": "Tokens, as reported",
        "rejected": "Refused before authentication",
        "lost": "Records lost and declared",
        "alarms": "Alarms",
        "keys": "Keys of MACs (seed, algorithm, epoch)",
        "findings": "Findings",
        "none": "none",
        "mac_yes": "every record's MAC was checked",
        "mac_no": "MACs were not checked: no chain seeds were given",
        "columns": (
            "chain",
            "records",
            "end",
            "signed to",
            "witnessed to",
            "public keys",
            "origin",
        ),
        "finding_columns": ("class", "meaning", "seq", "origin", "file", "byte", "note"),
        "made": "made",
        "unfinished": "Requests begun, without a record of their end",
        "notice_columns": ("seq", "trace id", "origin"),
    },
    "zh": {
        "title": "审计报告",
        "verdict": "结论",
        "chains": "审计链",
        "coverage": "每小时记录数（UTC）",
        "silent": "个小时没有任何记录",
        "classes": "按服务等级统计的请求",
        "outcomes": "按结果统计的请求",
        "statuses": "按状态码统计的请求",
        "tokens": "令牌数（以上游报告为准）",
        "rejected": "认证之前被拒绝",
        "lost": "丢失并已声明的记录",
        "alarms": "告警",
        "keys": "MAC 密钥（种子、算法、纪元）",
        "findings": "发现的问题",
        "none": "无",
        "mac_yes": "已校验每条记录的 MAC",
        "mac_no": "未校验 MAC：没有提供链种子",
        "columns": ("链", "记录数", "结束状态", "签名至", "见证至", "公钥", "来源"),
        "finding_columns": ("类别", "含义", "序号", "来源", "文件", "字节", "说明"),
        "made": "生成于",
        "unfinished": "已开始、但没有结束记录的请求",
        "notice_columns": ("序号", "追踪编号", "来源"),
    },
}

# Browsers print no backgrounds unless asked: an hour without a record has a mark as well.
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:.5rem 0 1.5rem}
td,th{border:1px solid #ccc;padding:.15rem .5rem;text-align:left}
.hours td,.hours th{padding:.1rem;text-align:center;font-size:11px}.hours td{width:1.6rem}
th{word-break:keep-all}.hours th{white-space:nowrap}
.ok{color:#060}.bad{color:#a00}.none{background:#f4d4d4}.none::after{content:"×"}
td{overflow-wrap:anywhere}.hours td{overflow-wrap:normal}
.findings td:nth-child(1),.findings td:nth-child(3),.findings td:nth-child(6),
.chains td:nth-child(-n+6),.notices td:nth-child(-n+2){white-space:nowrap}h2{font-size:1.15rem}
.counts{display:grid;grid-template-columns:repeat(auto-fill,minmax(15rem,1fr));gap:0 1.5rem}
@page{margin:12mm}
@media print{body{font-size:10pt;max-width:none;margin:0;padding:0}.none{print-color-adjust:exact}
tr,section{break-inside:avoid}h2{break-after:avoid}.hours td,.hours th{width:auto;font-size:7pt}}
"""


def page(result: Result, stats: Stats, lang: str, now_s: int) -> str:
    """Return the page; `lang` is en or zh."""
    text = TEXTS[lang]
    good = result.exit_code == 0
    shade = "ok" if good else "bad"
    first = result.first
    where = f" — seq {first.seq}, {escape(first.origin)}" if first is not None else ""
    made = datetime.fromtimestamp(now_s, tz=UTC).isoformat()
    parts = [
        f'<!doctype html><html lang="{lang}"><meta charset="utf-8"><title>{text["title"]}</title>',
        f"<style>{_STYLE}</style><h1>{text['title']}</h1>",
        f"<p>{_time(stats.first_ns)} - {_time(stats.last_ns)}; {text['made']} {made}</p>",
        f'<h2>{text["verdict"]}: <span class="{shade}">{escape(result.verdict)}</span>{where}</h2>',
        f"<p>{MEANINGS[lang][result.verdict]}</p>",
        f"<p>{text['mac_yes'] if result.mac_checked else text['mac_no']}</p>",
        f"<h2>{text['findings']}</h2>",
        _findings(result, text, MEANINGS[lang]),
        f"<h2>{text['unfinished']}</h2>",
        _unfinished(result, text),
        f"<h2>{text['chains']}</h2>",
        _table(
            text["columns"],
            (
                (
                    *(c.dir, c.records, c.end, _seq(c.signed_to), _seq(c.witnessed_to)),
                    *(c.signers, c.origin),
                )
                for c in result.chains[-_ROWS_SHOWN:]
            ),
            "chains",
        ),
        f"<h2>{text['coverage']}</h2>",
        f"<p>{len(stats.silent_hours())} {text['silent']}</p>",
        _hours(stats),
    ]
    blocks = [
        (text[name], _counts(getattr(stats, name).most_common(), text))
        for name in ("classes", "outcomes", "statuses", "tokens", "rejected", "alarms")
    ]
    blocks.append((text["lost"], f"<p>{stats.lost}</p>"))
    blocks.append((text["keys"], _counts(stats.key_ids.most_common(), text)))
    sections = [f"<section><h2>{title}</h2>{block}</section>" for title, block in blocks]
    parts.append(f'<div class="counts">{"".join(sections)}</div>')
    return "\n".join(parts) + "\n"


def _findings(result: Result, text: Texts, meanings: dict[str, str]) -> str:
    rows = result.public()["findings"][:_ROWS_SHOWN]
    if not rows:
        return f"<p>{text['none']}</p>"
    names = ("seq", "origin", "file", "offset", "note")
    cells = ((row["class"], meanings[row["class"]], *(row[name] for name in names)) for row in rows)
    return _table(text["finding_columns"], cells, "findings")


def _unfinished(result: Result, text: Texts) -> str:
    count = sum(chain.unfinished for chain in result.chains)
    if not count:
        return f"<p>{text['none']}</p>"
    rows = ((row.seq, row.trace_id, row.origin) for row in result.notices[:_ROWS_SHOWN])
    return f"<p>{count}</p>{_table(text['notice_columns'], rows, 'notices')}"


def _counts(rows: list[tuple[str, int]], text: Texts) -> str:
    return _table((), rows[:_ROWS_SHOWN]) if rows else f"<p>{text['none']}</p>"


def _table(columns: Iterable[object], rows: Iterable[Iterable[object]], name: str = "") -> str:
    head = "".join(f"<th>{escape(str(name))}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    named = f' class="{name}"' if name else ""
    return f"<table{named}>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def _hours(stats: Stats) -> str:
    if not stats.hours:
        return ""
    low, high = min(stats.hours), max(stats.hours)
    rows = []
    for day in range(low // 24, min(high // 24, low // 24 + _DAYS_SHOWN) + 1):
        date = datetime.fromtimestamp(day * 86400, tz=UTC).date().isoformat()
        cells = []
        for hour in range(day * 24, day * 24 + 24):
            count = stats.hours.get(hour, 0)
            empty = low <= hour <= high and not count
            cells.append(f"<td{' class=none' if empty else ''}>{count or ''}</td>")
        rows.append(f"<tr><th>{date}</th>{''.join(cells)}</tr>")
    head = "".join(f"<th>{hour:02d}</th>" for hour in range(24))
    return f'<table class="hours"><tr><th></th>{head}</tr>{"".join(rows)}</table>'


def _time(wall_ns: int) -> str:
    if not wall_ns or wall_ns > 253_402_300_799 * 10**9:
        return "?"
    return datetime.fromtimestamp(wall_ns // 10**9, tz=UTC).isoformat()


def _seq(seq: int) -> str:
    return "-" if seq < 0 else str(seq)
