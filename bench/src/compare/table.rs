//! What was measured, for people.

use super::outcome::{Comparison, Measured, Ratio};
use crate::{
    size,
    stats::{PairedRatio, Summary, exact, number},
};
use std::fmt;

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rounds = self.runs.first().map_or(0, |run| run.rounds.len());
        writeln!(f, "{} over {}", size::text(self.size_bytes), self.network)?;
        writeln!(f, "medians over runs (least to most) of medians over {rounds} rounds; CPU of both sides")?;
        align(f, &self.rows())?;
        self.explain_ratios(f)?;
        for contender in &self.contenders {
            if let Some(reason) = &contender.failure {
                writeln!(f, "{} failed: {reason}", contender.name)?;
            }
        }
        Ok(())
    }
}

impl Comparison {
    fn rows(&self) -> Vec<[String; COLUMNS]> {
        let row = |contender| self.row(contender);
        std::iter::once(HEAD.map(str::to_owned))
            .chain(self.contenders.iter().map(row))
            .collect()
    }

    fn row(&self, contender: &Measured) -> [String; COLUMNS] {
        let ratio = self.ratios.iter().find(|ratio| ratio.to == contender.name);
        let text = match self.common_ratio() {
            Some(_) => PairedRatio::text,
            None => PairedRatio::full_text,
        };
        let of = |value: fn(&Ratio) -> Option<PairedRatio>| match ratio.and_then(value) {
            // Ratios are what goals are about.
            Some(ratio) => text(&ratio, exact),
            None => NOTHING.into(),
        };
        [
            contender.name.clone(),
            if contender.encrypted { "yes" } else { "no" }.into(),
            spread(contender.gb_per_s),
            spread(contender.cpu_s_per_gib),
            latency(contender),
            of(|ratio| ratio.gb_per_s),
            of(|ratio| ratio.cpu_s_per_gib),
            of(|ratio| ratio.small_p50_us),
        ]
    }

    fn explain_ratios(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.ratios.iter().all(|ratio| ratio.gb_per_s.is_none()) {
            return Ok(());
        }
        let first = self.contenders.first().map_or("", |contender| contender.name.as_str());
        write!(f, "ratios: {first} / the row, of ")?;
        match self.common_ratio() {
            Some(common) => {
                write!(f, "{} neighbouring runs", common.pairs)?;
                match common.interval() {
                    Some(_) => {
                        writeln!(
                            f,
                            "; in brackets, where their median is at {:.1} %",
                            common.confidence * 100.0
                        )
                    }
                    None => writeln!(f, ", too few for intervals"),
                }
            }
            None => {
                writeln!(f, "neighbouring runs; in brackets, where their median is, how surely, of how many")
            }
        }
    }
}

const COLUMNS: usize = 8;

const HEAD: [&str; COLUMNS] = [
    "contender",
    "encrypted",
    "GB/s",
    "CPU s/GiB",
    "4 KiB, us (99 %)",
    "ratio of GB/s",
    "ratio of CPU",
    "ratio of 4 KiB",
];

/// Writes `rows` with each column as wide as its widest cell.
fn align(f: &mut fmt::Formatter<'_>, rows: &[[String; COLUMNS]]) -> fmt::Result {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; COLUMNS] = std::array::from_fn(width);
    for row in rows {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
        writeln!(f, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
    }
    Ok(())
}

fn spread(summary: Option<Summary>) -> String {
    summary.map_or_else(|| NOTHING.into(), |summary| summary.to_string())
}

fn latency(contender: &Measured) -> String {
    match (contender.small_p50_us, contender.small_p99_us) {
        (Some(p50), Some(p99)) => format!("{} ({})", number(p50.median), number(p99.median)),
        _ => NOTHING.into(),
    }
}

const NOTHING: &str = "–";

#[cfg(test)]
mod tests {
    use crate::compare::outcome::tests::example;

    #[test]
    fn a_row_for_each_with_its_ratios() {
        let table = example().to_string();
        let lines: Vec<&str> = table.lines().collect();
        assert!(lines[0].starts_with("64 MiB over loopback"), "{table}");
        assert!(lines[3].starts_with("tensor-relay  yes        4.00 "), "{table}");
        assert!(lines[3].contains("100 (200)") && lines[3].ends_with('–'), "{table}");
        assert!(lines[4].starts_with("tcp           no "), "{table}");
        assert!(
            lines[4].ends_with(
                "0.500 (0.500 to 0.500, 96.9 %, pairs: 6)  2.000 (2.000 to 2.000, 96.9 %, pairs: 6)"
            ),
            "{table}"
        );
        assert!(lines[5].contains("3.000 (–, pairs: 1)"), "{table}");
        assert!(table.contains("tensor-relay / the row, of neighbouring runs; in brackets"), "{table}");
        assert!(table.ends_with("tcp-tls failed: it ended early\n"), "{table}");
    }

    #[test]
    fn what_all_ratios_share_is_told_once() {
        let mut comparison = example();
        comparison.ratios.truncate(1);
        let table = comparison.to_string();
        assert!(
            table.contains("  2.000 (2.000 to 2.000)  0.500 (0.500 to 0.500)  2.000 (2.000 to 2.000)\n"),
            "{table}"
        );
        assert!(
            table.contains("of 6 neighbouring runs; in brackets, where their median is at 96.9 %"),
            "{table}"
        );
    }
}
