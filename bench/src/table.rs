//! Tables of measurements: a row for each setting, with medians, ranges and ratios. Commands print them and write them
//! to result files.

use crate::{
    cells::Cells,
    stats::{PairedRatio, Summary},
};
use indexmap::IndexSet;
use serde::Serialize;
use std::fmt;

/// A named table of measurements.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Table {
    pub(crate) name: String,
    pub(crate) rows: Vec<Row>,
}

/// The samples of one setting.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct Row {
    pub(crate) setting: Cells<String>,
    /// The number of samples.
    pub(crate) samples: usize,
    /// The summary of each of `values`.
    pub(crate) measured: Cells<Summary>,
    /// The values of each number, in the order of measuring, for programs that compute other statistics.
    values: Cells<Vec<f64>>,
    /// The ratios of numbers of this row to those of another row, measured in pairs.
    pub(crate) ratios: Cells<PairedRatio>,
}

impl Table {
    /// A table of `rows`.
    pub(crate) fn new(name: &str, rows: impl IntoIterator<Item = Row>) -> Self {
        Self { name: name.into(), rows: rows.into_iter().collect() }
    }

    /// Adds a sample to the row of its setting; a new setting is appended as a row.
    pub(crate) fn add(&mut self, setting: &Cells<String>, measured: &Cells<f64>) {
        let at = self.rows.iter().position(|row| row.setting == *setting).unwrap_or_else(|| {
            self.rows.push(Row::of(setting.clone(), []));
            self.rows.len() - 1
        });
        self.rows[at].add(measured);
    }

    /// The formatted cells, the header row first. All rows have the same columns, and no cell is empty.
    fn cells(&self) -> Vec<Vec<String>> {
        let settings = names(self.rows.iter().map(|row| &row.setting));
        let measured = names(self.rows.iter().map(|row| &row.measured));
        let ratios = names(self.rows.iter().map(|row| &row.ratios));
        let headers = settings.iter().chain(&measured).map(|name| header(name));
        let headers = headers.chain(ratios.iter().map(|name| format!("ratio of {}", header(name))));
        let cells = |row: &Row| {
            let settings = settings.iter().map(|name| text(row.setting.get(name)));
            let measured = measured.iter().map(|name| text(row.measured.get(name)));
            let ratios = ratios.iter().map(|name| text(row.ratios.get(name)));
            settings
                .chain(measured)
                .chain(ratios)
                .chain([row.samples.to_string()])
                .collect()
        };
        let headers = headers.chain(["samples".to_owned()]).collect();
        std::iter::once(headers).chain(self.rows.iter().map(cells)).collect()
    }
}

/// All names, each once, in the order of their first occurrence.
fn names<'a, T: 'a>(cells: impl Iterator<Item = &'a Cells<T>>) -> IndexSet<&'a str> {
    cells.flat_map(|cells| cells.0.keys()).map(String::as_str).collect()
}

fn text(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "–".into(), |value| value.to_string())
}

/// The column header for the setting or number called `name`, whose last words are the unit.
fn header(name: &str) -> String {
    let units = [
        ("gb_per_s", "GB/s"),
        ("cpu_s_per_gib", "CPU s/GiB"),
        ("us", ", µs"),
        ("ms", ", ms"),
        ("mib", ", MiB"),
    ];
    for (suffix, unit) in units {
        if let Some(what) = name.strip_suffix(suffix)
            && (what.is_empty() || what.ends_with('_'))
        {
            let space = if unit.starts_with(',') { "" } else { " " };
            return format!("{}{space}{unit}", what.replace('_', " ").trim_end())
                .trim_start()
                .into();
        }
    }
    name.replace('_', " ")
}

/// Formats a Markdown table, with each column as wide as its widest cell.
impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = |cell: &String| cell.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|");
        let rows: Vec<Vec<String>> = self.cells().iter().map(|row| row.iter().map(line).collect()).collect();
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
        for (number, row) in rows.iter().enumerate() {
            let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
            writeln!(f, "| {} |", cells.collect::<Vec<_>>().join(" | "))?;
            if number == 0 {
                let dashes = widths.iter().map(|width| "-".repeat(width + 2));
                writeln!(f, "|{}|", dashes.collect::<Vec<_>>().join("|"))?;
            }
        }
        Ok(())
    }
}

impl Row {
    /// A row of `samples`.
    pub(crate) fn of<'a>(setting: Cells<String>, samples: impl IntoIterator<Item = &'a Cells<f64>>) -> Self {
        let mut row = Self { setting, ..Self::default() };
        samples.into_iter().for_each(|sample| row.add(sample));
        row
    }

    /// Adds a sample without its non-finite values, which result from rounds that moved nothing.
    pub(crate) fn add(&mut self, sample: &Cells<f64>) {
        self.samples += 1;
        for (name, value) in sample.0.iter().filter(|(_, value)| value.is_finite()) {
            self.values.0.entry(name.clone()).or_default().push(*value);
        }
        let summary = |(name, values): (&String, &Vec<f64>)| Some((name.clone(), Summary::of(values)?));
        self.measured = Cells(self.values.0.iter().filter_map(summary).collect());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(slots: &str, rates: &[f64]) -> Row {
        let samples: Vec<_> = rates.iter().map(|rate| Cells::of([("gb_per_s", *rate)])).collect();
        Row::of(Cells::of([("slots", slots.to_owned())]), &samples)
    }

    #[test]
    fn settings_become_rows_with_medians() {
        let table = Table::new("t", [row("2", &[1.0, 3.0, f64::NAN, 2.0]), row("8|\n9", &[50.0])]);
        assert_eq!(table.rows[0].measured.get("gb_per_s").unwrap().median, 2.0);
        let expected = "\
| slots | GB/s                | samples |
|-------|---------------------|---------|
| 2     | 2.00 (1.00 to 3.00) | 4       |
| 8\\| 9 | 50.0                | 1       |
";
        assert_eq!(table.to_string(), expected);
    }

    #[test]
    fn headers_have_units() {
        for (name, text) in [
            ("gb_per_s", "GB/s"),
            ("first_gb_per_s", "first GB/s"),
            ("network_cpu_s_per_gib", "network CPU s/GiB"),
            ("small_p50_us", "small p50, µs"),
            ("peak_resident_mib", "peak resident, MiB"),
            ("status", "status"),
        ] {
            assert_eq!(header(name), text);
        }
    }

    #[test]
    fn missing_values_are_dashes() {
        let other = Row::of(Cells::of([("slots", "3".to_owned())]), [&Cells::of([("small_p50_us", 0.5)])]);
        let mut first = row("2", &[1.0]);
        first.ratios = Cells::of([("gb_per_s", PairedRatio::of(&[(2.0, 1.0)]).unwrap())]);
        let cells = Table::new("t", [first, other]).cells();
        assert_eq!(cells[0], ["slots", "GB/s", "small p50, µs", "ratio of GB/s", "samples"]);
        assert_eq!(cells[1][3], "2.000 (–, pairs: 1)");
        assert_eq!(cells[2], ["3", "–", "0.500", "–", "1"]);
    }
}
