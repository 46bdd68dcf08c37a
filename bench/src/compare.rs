//! `bench compare`: moves the same bytes with tensor-relay and with other programs, in alternating runs.
//!
//! Each contender runs as two processes of its own, a serving and a receiving one, on one machine. Runs alternate, A B
//! A C and then B A C A, because a machine's speed drifts over minutes by more than the differences to be measured:
//! ratios are those of neighbouring runs of the first contender and another.

mod contenders;
mod measure;
mod outcome;
mod peers;
mod schedule;

use crate::{
    network::{Network, NetworkArgs},
    program::Program,
    relay::Data,
    results::Results,
    size,
    table::Table,
};
use anyhow::{Result, bail};
pub(crate) use contenders::Contender;
use contenders::Contenders;
pub(crate) use measure::RunSettings;
use outcome::Run;
pub(crate) use outcome::Runs;
use schedule::{ScheduledRun, schedule};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// The options of `compare`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct CompareArgs {
    /// The contenders: the first is compared with each of the others. `all` means tensor-relay, stock-quinn, tcp,
    /// tcp-tls and all peers. Variants of tensor-relay: `10000-tensors`, with the payload in many tensors; `2-lanes`,
    /// `4-lanes`, `8-lanes` instead of one, and `auto-lanes`; `raw`, `bitplanes`, `planes` and `zstd`, with a fixed
    /// codec; `borrowed`, which lends its tensors for each round and hashes them as they are sent; and `other-build`.
    #[arg(value_name = "NAME", default_values = [contenders::RELAY, contenders::STOCK_QUINN])]
    pub names: Vec<String>,
    /// The number of bytes moved in a round.
    #[arg(long, default_value = "1GiB", value_parser = size::parse)]
    pub size: u64,
    /// The number of counted rounds of each run; one more comes first, to warm up.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// The number of pairs: how often each contender after the first runs, each time before or after a run of the
    /// first. Six or more give confidence intervals of at least 95 %.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub pairs: u32,
    /// The number of 4 KiB messages that each run sends before its rounds, to measure their latency.
    #[arg(long, default_value_t = 0)]
    pub small: u32,
    /// The content that tensor-relay moves. The other contenders do not encode, and always move noise.
    #[arg(long, value_enum, default_value_t)]
    pub data: Data,
    /// The network between both ends.
    #[command(flatten)]
    pub network: NetworkArgs,
    /// The program `tensor-relay-bench` of another build, whose contender `tensor-relay` runs as `other-build`.
    #[arg(long, value_name = "PROGRAM")]
    pub relay: Option<PathBuf>,
    /// A Python interpreter with the packages tensor_relay and NumPy. It adds the contenders `python`, which is
    /// `borrowed` with both sides in Python, `python-auto-lanes`, and `python-producer` and `python-consumer` with
    /// one side in Python. `python-auto-lanes` has as many lanes as a client chooses, the others one.
    #[arg(long, value_name = "PROGRAM")]
    pub python: Option<PathBuf>,
    /// A file that lists programs of other projects as contenders: bench/peers/peers.json. A peer whose name is taken,
    /// such as `tcp`, is called `peers/tcp`.
    #[arg(long, value_name = "FILE")]
    pub peers: Option<PathBuf>,
    /// Runs this contender alone.
    #[arg(long, value_name = "NAME")]
    pub only: Option<String>,
    /// Also writes everything that was measured to this file.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  compare tensor-relay tcp-tls --pairs 20
  compare tensor-relay stock-quinn --namespaces --mtu 1472
  compare tensor-relay other-build --relay old/tensor-relay-bench
  compare tensor-relay raw --data weights --namespaces --rate 1Gbit
  compare borrowed python python-consumer --python .venv/bin/python --pairs 20
  compare all --peers bench/peers/peers.json --small 1000 --json all.json";

/// The details of the result file, besides its tables.
#[derive(Serialize)]
pub(crate) struct Details<'a, Options> {
    network: &'a NetworkArgs,
    #[serde(flatten)]
    options: Options,
    #[serde(flatten)]
    runs: Runs,
}

impl<'a, Options> Details<'a, Options> {
    /// The details of `runs` with these options.
    pub(crate) fn new(network: &'a NetworkArgs, options: Options, runs: Runs) -> Self {
        Self { network, options, runs }
    }
}

/// The options in the result file.
#[derive(Serialize)]
struct Options {
    size_bytes: u64,
    /// The content that tensor-relay moved.
    data: Data,
}

/// Compares the contenders and prints a table. `this` is the running program, which is started again for each side.
///
/// # Errors
/// When a contender is unknown, or the list of peers cannot be read; and the errors of `Comparison::run`.
pub async fn run(args: CompareArgs, this: &Program) -> Result<()> {
    let contenders = picked_contenders(&args, this)?;
    let first = contenders.first().map_or("", |contender| contender.name.as_str());
    let about = format!(
        "{} a round, from memory to memory, both sides on one machine. A run's value is the median of its {} rounds; \
         the table shows the median of all runs (minimum to maximum). CPU time is that of both sides. A ratio divides \
         {first} by the row's contender, for neighbouring runs; the table shows the median ratio and its confidence interval.",
        size::text(args.size),
        args.rounds
    );
    let title = format!("{first} beside others, over {}", args.network);
    let options = Options { size_bytes: args.size, data: args.data };
    let settings = RunSettings::new(&args);
    let (pairs, network, json) = (args.pairs, &args.network, args.json.as_deref());
    let comparison = Comparison { contenders, settings, pairs, network, json };
    comparison
        .run(
            this,
            |runs| Results::new("compare", title, about, Details::new(network, options, runs)),
            |_| vec![],
        )
        .await
}

/// A comparison of contenders that move the same bytes, in alternating pairs of runs.
pub(crate) struct Comparison<'a> {
    pub(crate) contenders: Vec<Contender>,
    pub(crate) settings: RunSettings,
    pub(crate) pairs: u32,
    pub(crate) network: &'a NetworkArgs,
    pub(crate) json: Option<&'a Path>,
}

impl Comparison<'_> {
    /// Measures all pairs and prints the results. `begin` creates the results with empty runs; `tables` adds tables to
    /// the table of all runs. A contender that fails does not run again, and its failure is printed below the tables.
    ///
    /// # Errors
    /// When the network cannot be created, the file cannot be written, or a contender that is no peer failed. The
    /// failure of a peer is a result, not an error.
    pub(crate) async fn run<'d, Options: Serialize>(
        self,
        this: &Program,
        begin: impl FnOnce(Runs) -> Results<Details<'d, Options>>,
        tables: impl Fn(&Runs) -> Vec<Table>,
    ) -> Result<()> {
        let Self { contenders, settings, pairs, network, json } = self;
        eprintln!("{network}");
        let network = Network::new(network, this).await?;
        let mut results = begin(Runs::new(&contenders));
        for pair in 0..pairs {
            let runs = schedule(pair, &contenders, |name| results.details.runs.has_failed(name));
            for ScheduledRun { contender, beside } in runs {
                if !results.details.runs.has_failed(&contender.name) {
                    let run = measure::run(contender, settings, &network).await;
                    print_outcome(pair, pairs, &contender.name, &run);
                    results.details.runs.add(&contender.name, pair, beside, run);
                }
            }
            let runs = &results.details.runs;
            results.tables = [vec![runs.table()], tables(runs)].concat();
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

fn picked_contenders(args: &CompareArgs, this: &Program) -> Result<Vec<Contender>> {
    let mut contenders = Contenders::of_this(this, args.relay.as_deref());
    if let Some(python) = &args.python {
        contenders.extend_with_python(this, python);
    }
    if let Some(path) = &args.peers {
        contenders.extend(peers::read(path)?)?;
    }
    match &args.only {
        Some(only) => contenders.pick(std::slice::from_ref(only)),
        None => contenders.pick(&args.names),
    }
}

fn print_outcome(pair: u32, pairs: u32, name: &str, run: &Result<Run>) {
    let number = pair + 1;
    match run {
        Ok(run) => eprintln!("{number} of {pairs}: {name:<16} {run}"),
        Err(error) => eprintln!("{number} of {pairs}: {name:<16} failed: {error:#}"),
    }
}
