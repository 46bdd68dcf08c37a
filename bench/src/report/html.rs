//! Results as one self-contained HTML page.

use super::{
    ResultFile,
    svg::{self, escape},
};
use crate::table::{Kind, Table};
use std::fmt::Write;

/// A page with a section for each of `results`.
pub(super) fn page(results: &[ResultFile]) -> String {
    let mut text =
        format!("{HEAD}<style>{STYLE}</style>\n</head>\n<body>\n<h1>tensor-relay: measurements</h1>\n");
    text.push_str(&legend());
    results.iter().for_each(|result| write_section(&mut text, result));
    text.push_str("</body>\n</html>\n");
    text
}

fn legend() -> String {
    let kinds = [
        (Kind::Ours, "tensor-relay, encrypted"),
        (Kind::Encrypted, "others, encrypted"),
        (Kind::Plain, "others, unencrypted"),
    ];
    let items = kinds.map(|(kind, what)| {
        let class = svg::class(kind);
        format!("<svg class=\"key\" viewBox=\"0 0 12 12\"><rect class=\"{class}\" width=\"12\" height=\"12\"/></svg> {what}")
    });
    format!(
        "<p class=\"legend\">{}. A line across a bar is the range of its samples.</p>\n",
        items.join(" &emsp; ")
    )
}

fn write_section(text: &mut String, result: &ResultFile) {
    let _ = writeln!(text, "<section>\n<h2>{}</h2>", escape(&result.title));
    let _ = writeln!(text, "<p>{}<br>{}.</p>", escape(&result.about), escape(&result.origin.to_string()));
    svg::charts(&result.tables)
        .iter()
        .for_each(|chart| text.push_str(&svg::draw(chart)));
    result.tables.iter().for_each(|table| write_table(text, table));
    if !result.notes.is_empty() {
        let notes: String = result.notes.iter().map(|note| format!("<li>{}</li>\n", escape(note))).collect();
        let _ = writeln!(text, "<ul>\n{notes}</ul>");
    }
    text.push_str("</section>\n");
}

fn write_table(text: &mut String, table: &Table) {
    let line = |row: &[String], tag: &str| {
        row.iter()
            .map(|cell| format!("<{tag}>{}</{tag}>", escape(cell)))
            .collect::<String>()
    };
    let cells = table.cells();
    let Some((head, rows)) = cells.split_first() else { return };
    let _ = writeln!(text, "<h3>{}</h3>\n<div class=\"table\"><table>", escape(&table.name));
    let _ = writeln!(text, "<tr>{}</tr>", line(head, "th"));
    for (row, cells) in table.rows.iter().zip(rows) {
        let _ = writeln!(text, "<tr class=\"{}\">{}</tr>", svg::class(row.kind), line(cells, "td"));
    }
    text.push_str("</table></div>\n");
}

const HEAD: &str = "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
    <meta name=\"viewport\" content=\"width=device-width\">\n<title>tensor-relay: measurements</title>\n";

const STYLE: &str = "
:root { color-scheme: light dark; --ours: #d9480f; --encrypted: #1971c2; --plain: #868e96; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
section { margin: 3rem 0; }
svg { width: 100%; max-width: 47rem; display: block; margin: 1rem 0; font-size: 13px; }
svg.key { width: 0.8em; display: inline; margin: 0; }
svg text { fill: currentColor; }
svg .title { font-weight: 600; }
rect.ours { fill: var(--ours); } rect.encrypted { fill: var(--encrypted); } rect.plain { fill: var(--plain); }
path.spread { stroke: currentColor; stroke-width: 1.5; fill: none; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { text-align: left; padding: 0.25rem 0.75rem 0.25rem 0; border-bottom: 1px solid #8884; }
tr.ours { font-weight: 600; }
";
