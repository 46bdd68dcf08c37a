//! Samples become tables: one row for each setting, with medians and spreads.

use super::line::{Cells, Sample};
use crate::stats::Summary;
use serde::Serialize;
use std::fmt::Write;

/// All samples of one name.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Table {
    pub(super) name: String,
    pub(super) rows: Vec<Row>,
}

/// All samples of one setting.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Row {
    pub(super) setting: Cells<String>,
    /// How often it was measured.
    pub(super) samples: usize,
    pub(super) measured: Cells<Summary>,
    /// Each value in the order of measuring, so that others can summarise otherwise.
    values: Cells<Vec<f64>>,
}

/// Sorts samples into tables and rows, both in the order in which they first came.
pub(super) fn of<'a>(samples: impl Iterator<Item = &'a Sample>) -> Vec<Table> {
    let mut tables: Vec<Table> = Vec::new();
    for sample in samples {
        let at = tables.iter().position(|table| table.name == sample.table).unwrap_or_else(|| {
            tables.push(Table { name: sample.table.clone(), rows: vec![] });
            tables.len() - 1
        });
        tables[at].add(sample);
    }
    for row in tables.iter_mut().flat_map(|table| &mut table.rows) {
        row.summarise();
    }
    tables
}

impl Table {
    fn add(&mut self, sample: &Sample) {
        let at = self
            .rows
            .iter()
            .position(|row| row.setting == sample.setting)
            .unwrap_or_else(|| {
                self.rows.push(Row::new(sample.setting.clone()));
                self.rows.len() - 1
            });
        self.rows[at].add(&sample.measured);
    }

    /// The table in Markdown. A cell has the median, and the spread where there was more than one sample.
    pub(super) fn markdown(&self) -> String {
        let mut columns: Vec<&str> = Vec::new();
        for (name, _) in self.rows.iter().flat_map(|row| &row.measured.0) {
            if !columns.contains(&name.as_str()) {
                columns.push(name);
            }
        }
        let settings: Vec<&str> = self
            .rows
            .first()
            .map_or(vec![], |row| row.setting.0.iter().map(|(name, _)| &**name).collect());
        let mut text = String::new();
        let head = settings.iter().chain(&columns).map(|name| name.replace('_', " "));
        let _ = writeln!(text, "| {} | samples |", head.collect::<Vec<_>>().join(" | "));
        let _ = writeln!(text, "|{}---|", "---|".repeat(settings.len() + columns.len()));
        for row in &self.rows {
            let setting = settings.iter().map(|name| row.setting.get(name).cloned().unwrap_or_default());
            let values = columns
                .iter()
                .map(|name| row.measured.get(name).map_or_else(|| "–".into(), ToString::to_string));
            let cells: Vec<String> = setting.chain(values).collect();
            let _ = writeln!(text, "| {} | {} |", cells.join(" | "), row.samples);
        }
        text
    }
}

impl Row {
    fn new(setting: Cells<String>) -> Self {
        Self { setting, samples: 0, measured: Cells(vec![]), values: Cells(vec![]) }
    }

    fn add(&mut self, measured: &Cells<f64>) {
        self.samples += 1;
        for (name, value) in &measured.0 {
            match self.values.0.iter_mut().find(|(own, _)| own == name) {
                Some((_, values)) => values.push(*value),
                None => self.values.0.push((name.clone(), vec![*value])),
            }
        }
    }

    fn summarise(&mut self) {
        let summary = |(name, values): &(String, Vec<f64>)| Some((name.clone(), Summary::of(values)?));
        self.measured = Cells(self.values.0.iter().filter_map(summary).collect());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(slots: &str, rate: f64) -> Sample {
        Sample {
            table: "t".into(),
            setting: Cells::of([("slots", slots.to_owned())]),
            measured: Cells::of([("gb_per_s", rate)]),
        }
    }

    #[test]
    fn settings_become_rows_with_medians() {
        let samples = [sample("2", 1.0), sample("8", 50.0), sample("2", 3.0), sample("2", 2.0)];
        let tables = of(samples.iter());
        let row = &tables[0].rows[0];
        assert_eq!((row.samples, row.measured.get("gb_per_s").unwrap().median), (3, 2.0));
        let expected = "| slots | gb per s | samples |\n|---|---|---|\n| 2 | 2.00 (1.00 to 3.00) | 3 |\n| 8 | 50.0 | 1 |\n";
        assert_eq!(tables[0].markdown(), expected);
    }

    #[test]
    fn what_some_rows_lack_is_a_dash() {
        let mut other = sample("3", 1.0);
        other.measured = Cells::of([("of_plain", 0.5)]);
        let text = of([sample("2", 1.0), other].iter())[0].markdown();
        assert!(text.contains("| 3 | – | 0.500 | 1 |"), "{text}");
    }
}
