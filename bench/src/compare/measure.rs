//! One run of one contender: starts both sides, reads their measurements and ends them.

use super::{CompareArgs, contenders::Contender, outcome::Run};
use crate::{
    cells::Cells,
    contender::{Ready, Received, Sent},
    cpu, latency,
    network::{Network, NetworkArgs, Side},
    process::{EXIT_ON_STDIN_EOF, Process},
    relay::Data,
};
use anyhow::{Result, ensure};
use std::{ffi::OsString, fmt::Display, time::Duration};

/// The settings of a run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RunSettings {
    /// The number of bytes in a round; `None` if the server reports it for each round.
    pub(crate) bytes: Option<u64>,
    pub(crate) mtu: u16,
    pub(crate) data: Data,
    /// The number of warm-up rounds.
    pub(crate) warm_up: u32,
    /// The number of counted rounds.
    pub(crate) rounds: u32,
    /// The number of counted small messages before the rounds.
    pub(crate) small: u32,
    /// The deadline of one round, or of all small messages.
    pub(crate) round_timeout: Duration,
}

impl RunSettings {
    /// The settings in `args`.
    pub(super) fn new(args: &CompareArgs) -> Self {
        Self {
            bytes: Some(args.size),
            warm_up: 1,
            mtu: args.network.mtu,
            data: args.data,
            rounds: args.rounds,
            small: args.small,
            round_timeout: round_timeout(args.size, args.small, &args.network),
        }
    }
}

/// The deadline for a round of `bytes`, or for all small messages, on `network`.
fn round_timeout(bytes: u64, small: u32, network: &NetworkArgs) -> Duration {
    let bits = bytes as f64 * 8.0;
    let transmission_s = network.rate.map_or(0.0, |rate| bits / rate.bits_per_s() as f64);
    let round_trip = Duration::from_millis(2 * u64::from(network.delay_ms));
    let messages = round_trip * SMALL_ROUND_TRIPS * latency::message_count(small);
    ROUND_TIMEOUT_MARGIN + Duration::from_secs_f64(TRANSMISSION_FACTOR * transmission_s) + messages
}

/// Runs both sides of `contender`: small messages, warm-up rounds, and counted rounds.
///
/// # Errors
/// When a side does not start, misses a deadline, exits, or reports another size than expected. Both sides are ended in
/// any case.
pub(super) async fn run(contender: &Contender, settings: RunSettings, network: &Network) -> Result<Run> {
    let settings = RunSettings { small: if contender.has_small { settings.small } else { 0 }, ..settings };
    let mut server = start(contender, Side::Serving, settings, network, listen_options(network))?;
    let outcome = with_server(contender, settings, network, &mut server).await;
    server.end().await;
    outcome
}

async fn with_server(
    contender: &Contender,
    settings: RunSettings,
    network: &Network,
    server: &mut Process,
) -> Result<Run> {
    let ready: Ready = server.line(READY_TIMEOUT).await?;
    let mut client =
        start(contender, Side::Receiving, settings, network, connect_options(network, ready.port, settings))?;
    let outcome = measure_rounds(settings, &mut client, server).await;
    client.end().await;
    outcome
}

async fn measure_rounds(settings: RunSettings, client: &mut Process, server: &mut Process) -> Result<Run> {
    let small = match settings.small {
        0 => None,
        _ => Some(client.line(settings.round_timeout).await?),
    };
    let mut run = Run { small, ..Run::default() };
    for _ in 0..settings.warm_up {
        let round = measure_round(settings, client, server).await?;
        run.first_gb_per_s = run.first_gb_per_s.or_else(|| round.get("gb_per_s").copied());
    }
    for _ in 0..settings.rounds {
        run.rounds.push(measure_round(settings, client, server).await?);
    }
    Ok(run)
}

/// Waits for the reports of both sides about one round.
async fn measure_round(
    settings: RunSettings,
    client: &mut Process,
    server: &mut Process,
) -> Result<Cells<f64>> {
    let received: Received = client.line(settings.round_timeout).await?;
    let sent: Sent = server.line(settings.round_timeout).await?;
    let expected = settings.bytes.unwrap_or(sent.bytes);
    for (verb, bytes) in [("sent", sent.bytes), ("received", received.bytes)] {
        ensure!(bytes == expected, "{bytes} bytes were {verb} instead of {expected}");
    }
    let cpu_s_per_gib = cpu::per_gib(received.cpu_s + sent.cpu_s, received.bytes);
    let mut round = Cells::of([("gb_per_s", received.gb_per_s), ("cpu_s_per_gib", cpu_s_per_gib)]);
    round.0.extend(received.more.0.into_iter().chain(sent.more.0));
    Ok(round)
}

fn start(
    contender: &Contender,
    side: Side,
    settings: RunSettings,
    network: &Network,
    options: Vec<OsString>,
) -> Result<Process> {
    let (subcommand, side_command) = match side {
        Side::Serving => ("serve", &contender.serve),
        Side::Receiving => ("receive", &contender.receive),
    };
    let mut arguments = side_command.arguments.clone();
    arguments.extend([option("bytes", settings.bytes.unwrap_or(0)), option("mtu", settings.mtu)]);
    arguments.extend(options);
    if contender.is_ours && settings.data != Data::Noise {
        arguments.extend(matches!(side, Side::Serving).then(|| option("data", settings.data.name())));
    }
    let mut command = network.command(side, &side_command.program);
    command.envs(environment(contender)).arg(EXIT_ON_STDIN_EOF).args(arguments);
    if let Some(folder) = &contender.folder {
        command.current_dir(folder);
    }
    Process::start(format!("{} {subcommand}", contender.name), command)
}

/// Environment variables added for both sides. tensor-relay and its variants get none: they run as users run them. The
/// other contenders get the settings that make them fastest.
fn environment(contender: &Contender) -> Vec<(&'static str, &'static str)> {
    let copies = (!contender.is_ours).then_some(NO_REP_MOVSB);
    let memory = contender.is_external.then_some(KEEP_FREED_MEMORY);
    copies.into_iter().chain(memory).collect()
}

fn listen_options(network: &Network) -> Vec<OsString> {
    vec![option("listen", format_args!("{}:0", network.server_ip()))]
}

fn connect_options(network: &Network, port: u16, settings: RunSettings) -> Vec<OsString> {
    let connect = option("connect", format_args!("{}:{port}", network.server_ip()));
    let mut options = vec![connect, option("rounds", settings.rounds + settings.warm_up)];
    if settings.small > 0 {
        // Left out otherwise, so that builds without this option can be compared too.
        options.push(option("small", settings.small));
    }
    options
}

fn option(name: &str, value: impl Display) -> OsString {
    format!("--{name}={value}").into()
}

/// Keeps glibc from copying with `rep movsb`. On AMD processors that is several times slower if source and destination
/// have the same offset in their pages; this nearly doubled the CPU time of a receiver over TLS. Other C libraries
/// ignore it.
const NO_REP_MOVSB: (&str, &str) = ("GLIBC_TUNABLES", "glibc.cpu.x86_rep_movsb_threshold=1073741824");

/// Makes glibc keep free memory, up to 64 MiB. Returning memory to the system after each piece and allocating it again
/// more than doubled the CPU time of a sender over TLS. The contenders of this program do not need it: they
/// allocate with mimalloc.
const KEEP_FREED_MEMORY: (&str, &str) = ("MALLOC_TRIM_THRESHOLD_", "67108864");

/// The deadline for a server to fill its memory and listen. Some peers load a gigabyte of libraries first.
const READY_TIMEOUT: Duration = Duration::from_secs(90);

/// The part of the deadline that does not depend on the network: enough for 1 GiB at a hundredth of the usual rate.
const ROUND_TIMEOUT_MARGIN: Duration = Duration::from_secs(120);

/// The factor on the transmission time at the link's rate, for headers and retransmissions.
const TRANSMISSION_FACTOR: f64 = 2.0;

/// The maximum number of round trips for a small message: some peers request, prepare, send and acknowledge.
const SMALL_ROUND_TRIPS: u32 = 4;

#[cfg(test)]
mod tests {
    use super::{super::contenders::Contenders, *};
    use crate::{network::tests::parsed, program::Program};

    #[test]
    fn slow_networks_have_later_deadlines() {
        let timeout_on = |arguments| round_timeout(1 << 30, 100, &parsed(arguments).unwrap());
        assert_eq!(timeout_on("x"), ROUND_TIMEOUT_MARGIN);
        let slow = timeout_on("x --namespaces --rate=1Mbit");
        assert_eq!((slow - ROUND_TIMEOUT_MARGIN).as_secs(), 17_179, "8.6 Gbit at 1 Mbit/s, twice");
        let far = timeout_on("x --namespaces --delay-ms=50");
        assert_eq!((far - ROUND_TIMEOUT_MARGIN).as_secs(), 44, "110 messages, 4 times 0.1 s each");
    }

    #[test]
    fn tensor_relay_gets_no_environment_variables() {
        let contenders = Contenders::of_this(&Program::new("bench", &[]), None);
        let names = ["tensor-relay", "2-lanes", "stock-quinn", "tcp-tls"].map(str::to_owned);
        let mut contenders = contenders.pick(&names).unwrap();
        contenders.push(Contender { is_external: true, ..contenders[3].clone() });
        let environments: Vec<_> = contenders.iter().map(environment).collect();
        assert_eq!(
            environments,
            [vec![], vec![], vec![NO_REP_MOVSB], vec![NO_REP_MOVSB], vec![NO_REP_MOVSB, KEEP_FREED_MEMORY]]
        );
    }
}
