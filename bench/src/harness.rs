//! The harness: runs contenders, each in processes of its own, in alternating pairs, and compares their numbers.
//!
//! Each contender runs as a serving and one or more receiving processes. Runs alternate, A B A C and then B A C A,
//! because a machine's speed drifts over minutes by more than the differences to be measured: ratios are those of
//! neighbouring runs of the first contender and another.

mod contenders;
mod driver;
mod peers;
mod place;
mod runs;
mod schedule;

use crate::{program::Program, results::Results, table::Table};
use anyhow::{Result, bail};
pub(crate) use contenders::{Contender, Contenders, RELAY, STOCK_QUINN};
pub(crate) use driver::{RunSettings, round_timeout};
pub(crate) use peers::read as read_peers;
pub use place::ServeAt;
pub(crate) use place::{Hosts, Over, Place, SIDE};
use runs::Run;
pub(crate) use runs::Runs;
use schedule::{ScheduledRun, schedule};
use serde::Serialize;
use serde_json::Value;
use std::path::Path;

/// The details of a result file, besides its tables.
#[derive(Serialize)]
pub(crate) struct Details<'a> {
    network: &'a Over,
    #[serde(flatten)]
    options: Value,
    #[serde(flatten)]
    runs: Runs,
}

/// A comparison of contenders that do the same work, in alternating pairs of runs.
pub(crate) struct Comparison<'a> {
    /// The name of the command.
    pub(crate) kind: &'static str,
    /// The title of the results, without the network.
    pub(crate) title: String,
    /// The explanation of the numbers.
    pub(crate) about: String,
    /// The contenders; the others are compared with the first.
    pub(crate) contenders: Vec<Contender>,
    pub(crate) settings: RunSettings,
    /// The number of pairs.
    pub(crate) pairs: u32,
    pub(crate) over: Over,
    /// The options in the result file.
    pub(crate) options: Value,
    /// The result file.
    pub(crate) json: Option<&'a Path>,
}

impl Comparison<'_> {
    /// Measures all pairs and prints the results. `this` is the running program, which is started again for each side;
    /// `tables` adds tables to those of all runs. A contender that fails does not run again, and its failure is printed
    /// below the tables.
    ///
    /// # Errors
    /// When the network cannot be created, the file cannot be written, or a contender that is no peer failed. The
    /// failure of a peer is a result, not an error.
    pub(crate) async fn run(self, this: &Program, tables: impl Fn(&Runs) -> Vec<Table>) -> Result<()> {
        let Self { kind, title, about, contenders, settings, pairs, over, options, json } = self;
        eprintln!("{over}");
        let place = Place::new(&over, this).await?;
        let details = Details { network: &over, options, runs: Runs::new(&contenders) };
        let mut results = Results::new(kind, format!("{title}, over {over}"), about, details);
        for pair in 0..pairs {
            let runs = schedule(pair, &contenders, |name| results.details.runs.has_failed(name));
            for ScheduledRun { contender, beside } in runs {
                if !results.details.runs.has_failed(&contender.name) {
                    let run = driver::run(contender, settings, &place).await;
                    let outcome =
                        run.as_ref().map_or_else(|error| format!("failed: {error:#}"), Run::to_string);
                    eprintln!("{} of {pairs}: {:<16} {outcome}", pair + 1, contender.name);
                    results.details.runs.add(&contender.name, pair, beside, run);
                }
            }
            let runs = &results.details.runs;
            results.tables = [runs.tables(), tables(runs)].concat();
            results.notes = runs.notes();
            // Written after each pair: a comparison of many contenders takes hours, and may be interrupted.
            results.write(json)?;
        }
        print!("{results}");
        let failed = contenders
            .iter()
            .find(|c| !c.is_external && results.details.runs.has_failed(&c.name));
        match failed {
            Some(contender) => bail!("{} failed: see above", contender.name),
            None => Ok(()),
        }
    }
}
