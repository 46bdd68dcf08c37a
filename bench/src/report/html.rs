//! Sheets as one page that needs nothing else.

use super::{
    sheet::{Kind, Row, Sheet, Table},
    svg,
};
use std::fmt::Write;

/// All `sheets`, one below the other.
pub(super) fn page(sheets: &[Sheet]) -> String {
    let mut text =
        format!("{HEAD}<style>{STYLE}</style>\n</head>\n<body>\n<h1>tensor-relay: measurements</h1>\n");
    text.push_str(&legend());
    sheets.iter().for_each(|sheet| section(&mut text, sheet));
    text.push_str("</body>\n</html>\n");
    text
}

/// `text` as it is written inside of HTML and SVG, also in attributes.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            other => escaped.push(other),
        }
    }
    escaped
}

fn legend() -> String {
    let kinds = [
        (Kind::Ours, "tensor-relay, which encrypts"),
        (Kind::Encrypted, "others that encrypt"),
        (Kind::Plain, "others that do not"),
    ];
    let items = kinds.map(|(kind, what)| {
        let class = svg::class(kind);
        format!("<svg class=\"key\" viewBox=\"0 0 12 12\"><rect class=\"{class}\" width=\"12\" height=\"12\"/></svg> {what}")
    });
    format!(
        "<p class=\"legend\">{}. A line across a bar is the spread of its runs.</p>\n",
        items.join(" &emsp; ")
    )
}

fn section(text: &mut String, sheet: &Sheet) {
    let _ = writeln!(text, "<section>\n<h2>{}</h2>", escape(&sheet.title));
    let _ = writeln!(text, "<p>{}<br>{}.</p>", escape(&sheet.setting), escape(&sheet.origin_text()));
    sheet.charts.iter().for_each(|chart| text.push_str(&svg::draw(chart)));
    table(text, &sheet.table);
    if !sheet.notes.is_empty() {
        let notes: String = sheet.notes.iter().map(|note| format!("<li>{}</li>\n", escape(note))).collect();
        let _ = writeln!(text, "<ul>\n{notes}</ul>");
    }
    text.push_str("</section>\n");
}

fn table(text: &mut String, table: &Table) {
    let head: String = table.head.iter().map(|cell| format!("<th>{}</th>", escape(cell))).collect();
    let _ = writeln!(text, "<div class=\"table\"><table>\n<tr>{head}</tr>");
    for row in &table.rows {
        let _ = writeln!(text, "{}", line(row));
    }
    text.push_str("</table></div>\n");
}

fn line(row: &Row) -> String {
    let class = if row.is_ours { " class=\"ours\"" } else { "" };
    let cells: String = row.cells.iter().map(|cell| format!("<td>{}</td>", escape(cell))).collect();
    format!("<tr{class}>{cells}</tr>")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_is_shown_becomes_markup() {
        assert_eq!(escape("a<b> & \"c\""), "a&lt;b&gt; &amp; &quot;c&quot;");
        let row = Row { is_ours: true, cells: vec!["<script>".into()] };
        assert_eq!(line(&row), "<tr class=\"ours\"><td>&lt;script&gt;</td></tr>");
    }
}
