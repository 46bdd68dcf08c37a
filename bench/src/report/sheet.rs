//! What a report says of one file, before it is drawn or written.

use crate::{
    origin::Origin,
    stats::{PairedRatio, Summary, number},
};

/// One file.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Sheet {
    pub(super) title: String,
    /// What was done, and over what, in a sentence.
    pub(super) setting: String,
    pub(super) origin: Origin,
    pub(super) table: Table,
    pub(super) charts: Vec<Chart>,
    /// What a reader must know beside the numbers.
    pub(super) notes: Vec<String>,
}

/// Rows under a head; the first column names the row.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Table {
    pub(super) head: Vec<&'static str>,
    pub(super) rows: Vec<Row>,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Row {
    /// Whether it is ours, which stands out.
    pub(super) is_ours: bool,
    pub(super) cells: Vec<String>,
}

/// One measure of several, side by side.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Chart {
    /// What is measured, its unit, and whether more is better.
    pub(super) title: &'static str,
    pub(super) bars: Vec<Bar>,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Bar {
    pub(super) name: String,
    pub(super) kind: Kind,
    pub(super) value: f64,
    /// Where the values begin and end that `value` is the middle of.
    pub(super) low: f64,
    pub(super) high: f64,
}

/// What a bar belongs to, which is its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Ours,
    Encrypted,
    Plain,
}

impl Sheet {
    /// Where the numbers come from, in a sentence.
    pub(super) fn origin_text(&self) -> String {
        let Origin { date, kernel, cpu, cores, commit } = &self.origin;
        format!("{date}, {cpu}, {cores} cores, Linux {kernel}, commit {commit}")
    }
}

impl Bar {
    /// A bar with its spread; none of what was not measured.
    pub(super) fn of(name: &str, kind: Kind, summary: Option<Summary>) -> Option<Self> {
        let Summary { median, min, max } = summary?;
        Some(Self { name: name.into(), kind, value: median, low: min, high: max })
    }
}

/// The middle, and how far the others are from it.
pub(super) fn spread(summary: Option<Summary>) -> String {
    summary.map_or_else(|| NOTHING.into(), |summary| summary.to_string())
}

/// The middle, the interval in which the true one is, how surely, and of how many pairs.
pub(super) fn ratio(ratio: Option<PairedRatio>) -> String {
    ratio.map_or_else(|| NOTHING.into(), |ratio| ratio.full_text(number))
}

/// What stands where nothing was measured.
pub(super) const NOTHING: &str = "–";
