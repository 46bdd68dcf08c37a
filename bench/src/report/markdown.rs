//! Sheets as tables in Markdown.

use super::sheet::{Row, Sheet, Table};
use std::fmt::Write;

/// All `sheets`, one below the other.
pub(super) fn tables(sheets: &[Sheet]) -> String {
    let texts: Vec<String> = sheets.iter().map(text).collect();
    texts.join("\n")
}

fn text(sheet: &Sheet) -> String {
    let mut text = format!("## {}\n\n{}\n\n{}.\n\n", sheet.title, sheet.setting, sheet.origin_text());
    text.push_str(&table(&sheet.table));
    if !sheet.notes.is_empty() {
        text.push('\n');
    }
    for note in &sheet.notes {
        let _ = writeln!(text, "- {}", line(note));
    }
    text
}

fn table(table: &Table) -> String {
    let mut text = format!("| {} |\n|{}\n", table.head.join(" | "), "---|".repeat(table.head.len()));
    for row in &table.rows {
        let _ = writeln!(text, "| {} |", cells(row).join(" | "));
    }
    text
}

fn cells(row: &Row) -> Vec<String> {
    let mut cells: Vec<String> = row.cells.iter().map(|cell| line(cell).replace('|', "\\|")).collect();
    if let (true, Some(name)) = (row.is_ours, cells.first_mut()) {
        *name = format!("**{name}**");
    }
    cells
}

/// A reason may have come over several lines.
fn line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_stay_rows() {
        let ours = Row { is_ours: true, cells: vec!["a".into(), "1".into()] };
        let odd = Row { is_ours: false, cells: vec!["b | c\nd".into(), "2".into()] };
        let text = table(&Table { head: vec!["name", "GB/s"], rows: vec![ours, odd] });
        assert_eq!(text, "| name | GB/s |\n|---|---|\n| **a** | 1 |\n| b \\| c d | 2 |\n");
    }
}
