//! `bench compare`: moves the same bytes with tensor-relay and with other programs.

use crate::{
    harness::{self, Comparison, Contenders, Over, RunSettings},
    network::NetworkArgs,
    program::Program,
    relay::Content,
    size,
};
use anyhow::Result;
use serde_json::json;
use std::path::PathBuf;

/// The options of `compare`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct CompareArgs {
    /// The contenders: the first is compared with each of the others. `all` means tensor-relay, stock-quinn, tcp,
    /// tcp-tls and all peers. Variants of tensor-relay: `10000-tensors`, with the payload in many tensors; `2-lanes`,
    /// `4-lanes`, `8-lanes` instead of one, and `auto-lanes`; `raw`, `bitplanes`, `planes` and `zstd`, with a fixed
    /// codec; `borrowed`, which lends its tensors for each round and hashes them as they are sent; and `other-build`.
    #[arg(value_name = "NAME", default_values = [harness::RELAY, harness::STOCK_QUINN])]
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
    pub data: Content,
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

/// Compares the contenders and prints a table. `this` is the running program, which is started again for each side.
///
/// # Errors
/// When a contender is unknown, or the list of peers cannot be read; and the errors of `Comparison::run`.
pub async fn run(args: CompareArgs, this: &Program) -> Result<()> {
    let mut contenders = Contenders::of_this(this, args.relay.as_deref());
    if let Some(python) = &args.python {
        contenders.extend_with_python(this, python);
    }
    if let Some(path) = &args.peers {
        contenders.extend(harness::read_peers(path)?)?;
    }
    let contenders = contenders.pick(&args.names)?;
    let first = contenders.first().map_or("", |contender| contender.name.as_str());
    let about = format!(
        "{} a round, from memory to memory, both sides on one machine. A run's value is the median of its {} rounds; \
         the table shows the median of all runs (minimum to maximum). CPU time is that of both sides. A ratio divides \
         {first} by the row's contender, for neighbouring runs; the table shows the median ratio and its confidence interval.",
        size::text(args.size),
        args.rounds
    );
    let settings = RunSettings {
        bytes: Some(args.size),
        warm_up: 1,
        mtu: args.network.mtu,
        data: args.data,
        rounds: args.rounds,
        small: args.small,
        round_timeout: harness::round_timeout(args.size, args.small, &args.network),
    };
    let comparison = Comparison {
        kind: "compare",
        title: format!("{first} beside others"),
        about,
        contenders,
        settings,
        pairs: args.pairs,
        over: Over::Local(args.network),
        // The content is that of tensor-relay.
        options: json!({ "size_bytes": args.size, "data": args.data }),
        json: args.json.as_deref(),
    };
    comparison.run(this, |_| vec![]).await
}
