//! Tables on stdout.

use crate::subscribe::print_line;

/// Prints `title` and `rows`, with two spaces between columns.
pub(crate) fn print<const N: usize>(title: [&str; N], rows: &[[String; N]]) {
    let title = title.map(String::from);
    let all = || std::iter::once(&title).chain(rows);
    let widths: [usize; N] =
        std::array::from_fn(|column| all().map(|row| row[column].chars().count()).max().unwrap_or(0));
    for row in all() {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
        print_line(cells.collect::<Vec<_>>().join("  ").trim_end());
    }
}
