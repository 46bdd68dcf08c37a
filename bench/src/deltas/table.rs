//! What the runs come down to, for people.

use super::{
    Run, Way,
    ends::{Came, Version},
};
use crate::stats::{PairedRatio, Summary};
use std::fmt::{self, Display, Formatter};

/// The runs as tables in Markdown: each way, and each version.
pub(super) struct Table<'a>(pub(super) &'a [Run]);

impl Table<'_> {
    fn of(&self, way: Way) -> impl Iterator<Item = &Run> {
        self.0.iter().filter(move |run| run.way == way)
    }

    fn ways(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "| way | wire bytes of a version | smaller | publish to commit, ms | staging before, ms | encoding, ms of workers | decoding, ms of workers |"
        )?;
        writeln!(f, "|---|---:|---:|---:|---:|---:|---:|")?;
        for (way, name) in [(Way::Delta, "delta"), (Way::Whole, "whole")] {
            let each = |value: fn(&Run) -> f64| Summary::of(&self.of(way).map(value).collect::<Vec<_>>());
            let ms = |value: fn(&Version) -> f64| {
                let runs: Vec<f64> = self.of(way).map(|run| run.median(value) * 1e3).collect();
                Summary::of(&runs)
            };
            let rows = (each(Run::wire_bytes), each(Run::ratio), each(|run| run.seconds() * 1e3));
            let work = (
                ms(|version| version.made.staging_s),
                ms(|version| version.made.encoding_s),
                ms(|version| version.came.decoding_s),
            );
            if let ((Some(wire), Some(ratio), Some(took)), (Some(staging), Some(encoding), Some(decoding))) =
                (rows, work)
            {
                writeln!(
                    f,
                    "| {name} | {:.0} | {ratio} | {took} | {:.1} | {:.1} | {:.1} |",
                    wire.median, staging.median, encoding.median, decoding.median
                )?;
            }
        }
        Ok(())
    }

    fn versions(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\n| version | bytes | as deltas | smaller | ms | whole | smaller | ms | times sooner |"
        )?;
        writeln!(f, "|---:|---:|---:|---:|---:|---:|---:|---:|---:|")?;
        let numbers = self.0.iter().flat_map(|run| &run.versions).map(|version| version.came.version);
        let mut numbers: Vec<u64> = numbers.collect();
        numbers.sort_unstable();
        numbers.dedup();
        let rows = numbers.into_iter();
        for (number, delta, whole) in rows.filter_map(|number| {
            Some((number, self.version(Way::Delta, number)?, self.version(Way::Whole, number)?))
        }) {
            let sooner = whole.ms / delta.ms;
            writeln!(f, "| {number} | {} | {delta} | {whole} | {sooner:.1} |", delta.payload_bytes)?;
        }
        Ok(())
    }

    /// What one version was in the middle over all runs of one way.
    fn version(&self, way: Way, number: u64) -> Option<Middle> {
        let versions: Vec<&Version> = self
            .of(way)
            .flat_map(|run| &run.versions)
            .filter(|version| version.came.version == number)
            .collect();
        let median = |value: fn(&Came) -> f64| {
            let values: Vec<f64> = versions.iter().map(|version| value(&version.came)).collect();
            Summary::of(&values).map(|summary| summary.median)
        };
        Some(Middle {
            payload_bytes: versions.first()?.came.payload_bytes,
            wire_bytes: median(|came| came.wire_bytes as f64)?,
            ms: median(|came| came.seconds * 1e3)?,
        })
    }

    /// How many times sooner a version is committed as deltas than whole, over neighbouring runs.
    pub(super) fn sooner(&self) -> Option<PairedRatio> {
        let pairs = self.of(Way::Whole).map(Run::seconds).zip(self.of(Way::Delta).map(Run::seconds));
        PairedRatio::of(&pairs.collect::<Vec<_>>())
    }
}

/// A version on one way.
struct Middle {
    payload_bytes: u64,
    wire_bytes: f64,
    ms: f64,
}

impl Display for Middle {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { payload_bytes, wire_bytes, ms } = self;
        write!(f, "{wire_bytes:.0} | {:.1} | {ms:.1}", *payload_bytes as f64 / wire_bytes.max(1.0))
    }
}

impl Display for Table<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.ways(f)?;
        self.versions(f)?;
        let Some(sooner) = self.sooner() else { return Ok(()) };
        let sooner = sooner.full_text(|times| format!("{times:.1}"));
        writeln!(f, "\nAs deltas, versions are committed so many times sooner: {sooner}.")
    }
}

#[cfg(test)]
mod tests {
    use super::{super::ends::Made, *};

    fn run(way: Way, wire_bytes: u64, seconds: f64) -> Run {
        let came = |version| {
            let (payload_bytes, delta_bytes, decoding_s) = (1000, 0, 0.003);
            Came { version, payload_bytes, wire_bytes, delta_bytes, decoding_s, seconds }
        };
        let made = Made { staging_s: 0.001, encoding_s: 0.002 };
        Run { way, versions: [2, 3].map(|version| Version { came: came(version), made }).into() }
    }

    #[test]
    fn neighbours_are_compared() {
        let runs = [
            run(Way::Delta, 10, 0.1),
            run(Way::Whole, 1000, 2.0),
            run(Way::Whole, 1000, 6.0),
            run(Way::Delta, 10, 0.2),
        ];
        let table = Table(&runs).to_string();
        assert!(table.contains("| delta | 10 | 100 | 150 (100 to 200) | 1.0 | 2.0 | 3.0 |\n"), "{table}");
        assert!(table.contains("so many times sooner: 25.0 (–, pairs: 2).\n"), "{table}");
        for version in ["2", "3"] {
            let row = format!("\n| {version} | 1000 | 10 | 100.0 | 150.0 | 1000 | 1.0 | 4000.0 | 26.7 |\n");
            assert!(table.contains(&row), "{table}");
        }
    }

    #[test]
    fn a_version_that_came_one_way_alone_has_no_row() {
        let table = Table(&[run(Way::Delta, 10, 0.1)]).to_string();
        assert!(!table.contains("\n| 2 |"), "{table}");
        assert!(!table.contains("so many times"), "{table}");
    }
}
