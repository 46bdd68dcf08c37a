//! A comparison as a sheet.

use super::sheet::{Bar, Chart, Kind, NOTHING, Row, Sheet, Table, ratio, spread};
use crate::{
    compare::{Comparison, Measured, Ratio},
    size,
    stats::{PairedRatio, Summary, number},
};

/// What `comparison` says.
pub(super) fn sheet(comparison: &Comparison) -> Sheet {
    let first = comparison.contenders.first().map_or("", |contender| contender.name.as_str());
    Sheet {
        title: format!("{first} beside others, over {}", comparison.network),
        setting: setting(comparison),
        origin: comparison.origin.clone(),
        table: table(comparison),
        charts: charts(&comparison.contenders),
        notes: notes(comparison, first),
    }
}

fn setting(comparison: &Comparison) -> String {
    let pairs = comparison.runs.iter().map(|run| run.pair + 1).max().unwrap_or(0);
    let rounds = comparison.runs.first().map_or(0, |run| run.rounds.len());
    format!(
        "{} a round, from memory to memory, both sides on one machine; medians over runs, {pairs} beside each other, of \
         medians over {rounds} rounds, least to most in brackets; CPU of both sides together; ratios of neighbouring runs \
         with their interval.",
        size::text(comparison.size_bytes)
    )
}

fn table(comparison: &Comparison) -> Table {
    let row = |contender: &Measured| {
        let its = comparison.ratios.iter().find(|ratio| ratio.to == contender.name);
        let text = |of: fn(&Ratio) -> Option<PairedRatio>| match (its, comparison.common_ratio()) {
            (Some(its), Some(_)) => of(its).map_or_else(|| NOTHING.into(), |ratio| ratio.text(number)),
            (Some(its), None) => ratio(of(its)),
            (None, _) => NOTHING.into(),
        };
        let encrypted = if contender.encrypted { "yes" } else { "no" };
        Row {
            is_ours: contender.is_ours,
            cells: vec![
                contender.name.clone(),
                encrypted.into(),
                contender.receives_into.clone(),
                spread(contender.gb_per_s),
                spread(contender.cpu_s_per_gib),
                spread(contender.small_p50_us),
                spread(contender.small_p99_us),
                text(|ratio| ratio.gb_per_s),
                text(|ratio| ratio.cpu_s_per_gib),
            ],
        }
    };
    Table { head: HEAD.to_vec(), rows: comparison.contenders.iter().map(row).collect() }
}

/// The best first.
fn charts(contenders: &[Measured]) -> Vec<Chart> {
    let bars = |value: fn(&Measured) -> Option<Summary>| {
        let bars = contenders.iter().filter_map(|c| Bar::of(&c.name, kind(c), value(c)));
        let mut bars: Vec<Bar> = bars.collect();
        bars.sort_by(|a, b| a.value.total_cmp(&b.value));
        bars
    };
    let mut speed = bars(|contender| contender.gb_per_s);
    speed.reverse();
    let charts = [
        Chart { title: "GB/s: more is better", bars: speed },
        Chart {
            title: "CPU seconds for each GiB, both sides: less is better",
            bars: bars(|contender| contender.cpu_s_per_gib),
        },
        Chart {
            title: "4 KiB one way, microseconds, median: less is better",
            bars: bars(|contender| contender.small_p50_us),
        },
    ];
    charts.into_iter().filter(|chart| !chart.bars.is_empty()).collect()
}

fn notes(comparison: &Comparison, first: &str) -> Vec<String> {
    let brackets = match comparison.common_ratio() {
        Some(common) => common.interval().map(|_| {
            let percent = common.confidence * 100.0;
            format!("the interval that holds the true median at {percent:.1} %, of {} pairs", common.pairs)
        }),
        None => Some("the interval that holds the true median, how surely, and of how many pairs".into()),
    };
    let brackets = brackets.unwrap_or_else(|| "no interval: below six pairs there is none".into());
    let mut notes =
        vec![format!("The last two columns are {first}, divided by the row; in brackets, {brackets}.")];
    for contender in &comparison.contenders {
        if !contender.note.is_empty() {
            notes.push(format!("{}: {}", contender.name, contender.note));
        }
        if let Some(reason) = &contender.failure {
            notes.push(format!("{} failed: {reason}", contender.name));
        }
    }
    notes
}

fn kind(contender: &Measured) -> Kind {
    match contender.encrypted {
        _ if contender.is_ours => Kind::Ours,
        true => Kind::Encrypted,
        false => Kind::Plain,
    }
}

const HEAD: [&str; 9] = [
    "contender",
    "encrypted",
    "memory",
    "GB/s",
    "CPU s/GiB",
    "4 KiB, µs",
    "99 %, µs",
    "speed ratio",
    "CPU ratio",
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::tests::example;

    #[test]
    fn every_contender_has_a_row_and_bars() {
        let sheet = sheet(&example());
        assert_eq!(sheet.table.rows.len(), 3);
        assert!(sheet.table.rows.iter().all(|row| row.cells.len() == HEAD.len()));
        assert_eq!(sheet.table.rows[0].cells[7], NOTHING, "nobody is divided by himself");
        assert_eq!(sheet.table.rows[1].cells[7], "2.00 (2.00 to 2.00, 96.9 %, pairs: 6)");
        assert_eq!(sheet.table.rows[2].cells[7], "3.00 (–, pairs: 1)");
        assert_eq!(sheet.charts.len(), 3);
        let names = |chart: &Chart| chart.bars.iter().map(|bar| bar.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&sheet.charts[0]), ["tensor-relay", "tcp", "tcp-tls"], "the fastest first");
        assert_eq!(names(&sheet.charts[2]), ["tcp", "tcp-tls", "tensor-relay"]);
        let kinds: Vec<Kind> = sheet.charts[0].bars.iter().map(|bar| bar.kind).collect();
        assert_eq!(kinds, [Kind::Ours, Kind::Plain, Kind::Encrypted]);
        assert_eq!(sheet.table.rows.iter().map(|row| row.is_ours).collect::<Vec<_>>(), [true, false, false]);
        assert!(sheet.notes.contains(&"tcp-tls failed: it ended early".to_owned()));
    }
}
