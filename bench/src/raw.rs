//! The comparison of raw speed, in pairs: tensor-relay with one tensor against a rival, or against itself with many.
//!
//! Each contender runs as two processes of its own, a serving and a receiving one, on one machine. They alternate, A B
//! A B, because a machine's speed drifts over minutes by more than what is to be told apart: only neighbours are
//! compared.

mod report;

use crate::{
    contender::{LOOPBACK_MTU, MTU_RANGE, Ready, Received, Sent},
    cpu,
    network::Network,
    side::Side,
    size,
};
use anyhow::{Context, Result, ensure};
use report::{Report, Round, Run};
use std::{ffi::OsString, path::PathBuf, time::Duration};

/// What is compared, and how often.
#[derive(Debug, Clone, clap::Args)]
pub struct RawArgs {
    /// How much each round moves.
    #[arg(long, default_value = "1GiB", value_parser = size::parse)]
    pub size: u64,
    /// How many rounds each run counts; one more comes first, to warm up.
    #[arg(long, default_value_t = 5)]
    pub rounds: u32,
    /// How many pairs of runs. From six on, the interval reaches 95 %.
    #[arg(long, default_value_t = 5)]
    pub pairs: u32,
    /// The UDP payload of a full packet.
    #[arg(long, default_value_t = LOOPBACK_MTU, value_parser = clap::value_parser!(u16).range(MTU_RANGE))]
    pub mtu: u16,
    /// Over how many lanes tensor-relay receives.
    #[arg(long, default_value_t = 1)]
    pub lanes: u32,
    /// The program that runs tensor-relay, if not this one: another build of it.
    #[arg(long)]
    pub relay: Option<PathBuf>,
    /// What it is compared with: bare quinn, or itself with the same bytes in 10,000 tensors.
    #[arg(long, default_value = RIVAL, value_parser = [RIVAL, SMALL])]
    pub rival: String,
    /// Runs one contender alone.
    #[arg(long, value_parser = [RELAY, RIVAL, SMALL])]
    pub only: Option<String>,
    /// Puts the two sides into network namespaces joined by a virtual cable of the right MTU. Needs root and `ip`.
    #[arg(long)]
    pub namespaces: bool,
    /// Also writes everything that was measured to this file.
    #[arg(long)]
    pub json: Option<PathBuf>,
}

/// Compares and prints a table.
///
/// # Errors
/// When a side does not start, stops talking, or ends; it and all others are then killed.
pub async fn run(args: RawArgs) -> Result<()> {
    let contenders = contenders(&args)?;
    let network = Network::new(args.namespaces, args.mtu)?;
    let mut report = Report::new(&args, contenders.iter().map(|c| c.name));
    for pair in 0..args.pairs {
        for (index, contender) in contenders.iter().enumerate() {
            let run = measure(contender, &args, &network).await?;
            eprintln!("pair {} of {}: {:<12} {run}", pair + 1, args.pairs, contender.name);
            report.add(index, run);
        }
    }
    print!("{report}");
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&report.summarised())?;
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Something that can be compared: a program, and what to say to it before the options of
/// [`contender`](crate::contender).
struct Contender {
    name: &'static str,
    program: PathBuf,
    serve: &'static [&'static str],
    receive: &'static [&'static str],
}

/// A, then B; or the one that was asked for.
fn contenders(args: &RawArgs) -> Result<Vec<Contender>> {
    let this = std::env::current_exe().context("cannot find this program to start it again")?;
    let all = [
        Contender {
            name: RELAY,
            program: args.relay.clone().unwrap_or_else(|| this.clone()),
            serve: &["relay", "serve"],
            receive: &["relay", "receive"],
        },
        Contender {
            name: RIVAL,
            program: this.clone(),
            serve: &["stock-quinn", "serve"],
            receive: &["stock-quinn", "receive"],
        },
        Contender {
            name: SMALL,
            program: this,
            serve: &["relay", "serve", "--tensors=10000"],
            receive: &["relay", "receive"],
        },
    ];
    let wanted = |contender: &Contender| match &args.only {
        Some(only) => only == contender.name,
        None => [RELAY, args.rival.as_str()].contains(&contender.name),
    };
    Ok(all.into_iter().filter(wanted).collect())
}

/// Runs both sides of `contender` for one warm-up and `args.rounds` more rounds.
async fn measure(contender: &Contender, args: &RawArgs, network: &Network) -> Result<Run> {
    let name = |role| format!("{} {role}", contender.name);
    let load = [option("bytes", args.size), option("mtu", args.mtu)];

    let listen = option("listen", format_args!("{}:0", network.server_ip()));
    let serve = network.server_command(&contender.program);
    let mut server = Side::start(name("serve"), serve, contender.serve, [&load[..], &[listen]].concat())?;
    let ready: Ready = server.line(READY_DEADLINE).await?;

    let connect = option("connect", format_args!("{}:{}", network.server_ip(), ready.port));
    let rounds = option("rounds", args.rounds + 1);
    let receive = network.client_command(&contender.program);
    let lanes = (contender.name != RIVAL).then(|| option("lanes", args.lanes));
    let options = [&load[..], &[connect, rounds], lanes.as_slice()].concat();
    let mut client = Side::start(name("receive"), receive, contender.receive, options)?;

    round(&mut client, &mut server).await?;
    let mut run = Run::default();
    for _ in 0..args.rounds {
        run.rounds.push(round(&mut client, &mut server).await?);
    }
    client.end().await;
    server.end().await;
    Ok(run)
}

/// Waits for what both sides say of one round.
async fn round(client: &mut Side, server: &mut Side) -> Result<Round> {
    let received: Received = client.line(ROUND_DEADLINE).await?;
    let sent: Sent = server.line(ROUND_DEADLINE).await?;
    ensure!(
        received.bytes == sent.bytes,
        "the sides disagree: {} bytes were sent and {} received",
        sent.bytes,
        received.bytes
    );
    Ok(Round {
        gb_per_s: received.gb_per_s,
        cpu_s_per_gib: cpu::per_gib(received.cpu_s + sent.cpu_s, received.bytes),
    })
}

fn option(name: &str, value: impl std::fmt::Display) -> OsString {
    format!("--{name}={value}").into()
}

const RELAY: &str = "tensor-relay";
const RIVAL: &str = "stock-quinn";
const SMALL: &str = "10000-tensors";

/// How long a serving side may take to fill its memory and listen.
const READY_DEADLINE: Duration = Duration::from_secs(30);

/// How long one round may take: 1 GiB at a hundredth of the usual speed.
const ROUND_DEADLINE: Duration = Duration::from_secs(120);
