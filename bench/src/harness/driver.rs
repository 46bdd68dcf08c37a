//! One run of one contender: starts its processes, reads their measurements and ends them.

use super::{
    contenders::Contender,
    place::{Place, Role},
    runs::{ProcessRounds, Run},
};
use crate::{
    cells::Cells,
    contender::{Ready, Received, Sent, SideFacts},
    cpu, latency,
    network::NetworkArgs,
    process::Process,
    relay::{Content, name_of},
};
use anyhow::{Context, Result, ensure};
use futures_util::future::try_join_all;
use serde_json::Value;
use std::{ffi::OsString, fmt::Display, time::Duration};

/// The settings of a run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RunSettings {
    /// The number of bytes in a round; `None` if the server reports it for each round.
    pub(crate) bytes: Option<u64>,
    pub(crate) mtu: u16,
    /// The content of the contenders that are tensor-relay.
    pub(crate) data: Content,
    /// The number of warm-up rounds.
    pub(crate) warm_up: u32,
    /// The number of counted rounds.
    pub(crate) rounds: u32,
    /// The number of counted small messages before the rounds.
    pub(crate) small: u32,
    /// The deadline of one round, or of all small messages.
    pub(crate) round_timeout: Duration,
}

/// The deadline for a round of `bytes`, or for all small messages, on `network`.
pub(crate) fn round_timeout(bytes: u64, small: u32, network: &NetworkArgs) -> Duration {
    let bits = bytes as f64 * 8.0;
    let transmission_s = network.rate.map_or(0.0, |rate| bits / rate as f64);
    let round_trip = Duration::from_millis(2 * u64::from(network.delay_ms));
    let messages = round_trip * SMALL_ROUND_TRIPS * latency::message_count(small);
    ROUND_TIMEOUT_MARGIN + Duration::from_secs_f64(TRANSMISSION_FACTOR * transmission_s) + messages
}

/// Runs all processes of `contender`: small messages, warm-up rounds, and counted rounds.
///
/// # Errors
/// When a process does not start, misses a deadline, exits, or reports another size or other bytes than expected. All
/// processes are ended in any case.
pub(super) async fn run(contender: &Contender, settings: RunSettings, place: &Place) -> Result<Run> {
    let settings = RunSettings { small: if contender.has_small { settings.small } else { 0 }, ..settings };
    let data = (contender.is_ours && settings.data != Content::Noise)
        .then(|| option("data", name_of(&settings.data)));
    let options = common_options(settings).chain(data).collect();
    let mut server = place.start(contender, Role::Server, &contender.serve, options).await?;
    let outcome = with_server(contender, settings, place, &mut server).await;
    server.end().await;
    outcome
}

async fn with_server(
    contender: &Contender,
    settings: RunSettings,
    place: &Place,
    server: &mut Process,
) -> Result<Run> {
    let ready: Ready = server.line(READY_TIMEOUT).await?;
    let options = || -> Result<Vec<OsString>> {
        let rounds = option("rounds", settings.rounds + settings.warm_up);
        // Left out without messages, so that builds without this option can be compared too.
        let small = (settings.small > 0).then(|| option("small", settings.small));
        let clock = ready.clock.as_ref().map(|clock| option("clock", clock));
        let options = common_options(settings).chain([place.server_option(&ready)?, rounds]);
        Ok(options.chain(small).chain(clock).collect())
    };
    let mut clients = vec![];
    for number in 0..contender.receivers {
        let role = Role::Receiver(number);
        clients.push(place.start(contender, role, &contender.receive, options()?).await?);
    }
    let mut slow = vec![];
    if let Some(side) = &contender.slow {
        let role = Role::Receiver(contender.receivers);
        slow.push(place.start(contender, role, side, options()?).await?);
    }
    let outcome = tokio::select! {
        outcome = measure_rounds(contender, settings, &mut clients, server) => outcome,
        error = failure_of(&mut slow) => Err(error),
    };
    for client in clients.into_iter().chain(slow) {
        client.end().await;
    }
    outcome
}

/// The failure of a slow receiver, which prints nothing else.
async fn failure_of(slow: &mut [Process]) -> anyhow::Error {
    match slow {
        [slow, ..] => match slow.line::<Value>(Duration::MAX).await {
            Ok(line) => anyhow::anyhow!("a slow receiver printed {line}"),
            Err(error) => error,
        },
        [] => std::future::pending().await,
    }
}

async fn measure_rounds(
    contender: &Contender,
    settings: RunSettings,
    clients: &mut [Process],
    server: &mut Process,
) -> Result<Run> {
    let small = match (settings.small, &mut clients[..]) {
        (1.., [client, ..]) => Some(client.line(settings.round_timeout).await?),
        _ => None,
    };
    let mut run = Run { small, ..Run::default() };
    for number in 0..settings.warm_up + settings.rounds {
        let lines = try_join_all(clients.iter_mut().map(|client| client.line(settings.round_timeout)));
        let (received, sent) = tokio::try_join!(lines, server.line(settings.round_timeout))?;
        let round = Round::new(received, sent, settings.bytes)?;
        if number < settings.warm_up {
            run.first_gb_per_s = run.first_gb_per_s.or_else(|| Some(round.gb_per_s()));
            continue;
        }
        run.rounds.push(round.cells());
        round.add_processes(contender, &mut run.processes);
    }
    Ok(run)
}

/// The reports of all processes about one round.
struct Round {
    received: Vec<Received>,
    sent: Sent,
}

impl Round {
    /// Compares the reports with each other and with the number of `bytes`, if it is known.
    fn new(received: Vec<Received>, sent: Sent, bytes: Option<u64>) -> Result<Self> {
        let expected = bytes.unwrap_or(sent.bytes);
        let sizes = received.iter().map(|r| ("received", r.bytes.saturating_add(r.missed_bytes)));
        for (verb, bytes) in std::iter::once(("sent", sent.bytes)).chain(sizes) {
            ensure!(bytes == expected, "{bytes} bytes were {verb} instead of {expected}");
        }
        for other in &received {
            ensure!(
                other.side.hash == sent.side.hash,
                "the received bytes are not the published ones: the hashes differ"
            );
            ensure!(other.seconds >= 0.0 && other.cpu_s >= 0.0, "a receiver reported a negative time");
        }
        received.first().context("there is no receiver")?;
        Ok(Self { received, sent })
    }

    fn bytes(&self) -> u64 {
        self.received.iter().map(|received| received.bytes).sum()
    }

    /// The rate of all receivers together: by the server's time, if it began the round, else by the receiver's.
    fn gb_per_s(&self) -> f64 {
        match self.sent.seconds {
            Some(seconds) => self.bytes() as f64 / seconds / 1e9,
            None => self.received.iter().map(|received| received.gb_per_s).sum(),
        }
    }

    /// The numbers of all processes together.
    fn cells(&self) -> Cells<f64> {
        let cpu_s: f64 = self.received.iter().map(|received| received.cpu_s).sum();
        let cpu_s_per_gib = cpu::per_gib(cpu_s + self.sent.cpu_s, self.bytes());
        let mut cells = Cells::of([("gb_per_s", self.gb_per_s()), ("cpu_s_per_gib", cpu_s_per_gib)]);
        if let [only] = &self.received[..] {
            cells.0.extend(only.more.0.clone());
        }
        cells.0.extend(self.sent.more.0.clone());
        cells
    }

    /// Adds the numbers of each process, if the processes report any.
    fn add_processes(&self, contender: &Contender, processes: &mut Vec<ProcessRounds>) {
        let several = self.received.len() > 1;
        let server_cpu = Cells::of([("cpu_s_per_gib", cpu::per_gib(self.sent.cpu_s, self.bytes()))]);
        let server = (Role::Server, server_cpu, &self.sent.side);
        let receivers = (0..).zip(&self.received).map(|(number, received)| {
            let mut cells = Cells::of([
                ("gb_per_s", received.gb_per_s),
                ("cpu_s_per_gib", cpu::per_gib(received.cpu_s, received.bytes)),
            ]);
            cells.0.extend(received.more.0.clone().into_iter().filter(|_| several));
            (Role::Receiver(number), cells, &received.side)
        });
        for (role, mut cells, SideFacts { process, machine, .. }) in receivers.chain([server]) {
            let Some(process) = process else { continue };
            cells.0.extend(process.0.clone());
            let name = contender.process_name(role);
            match processes.iter_mut().find(|other| other.process == name) {
                Some(other) => other.rounds.push(cells),
                None => processes.push(ProcessRounds {
                    process: name,
                    machine: machine.clone(),
                    rounds: vec![cells],
                }),
            }
        }
    }
}

fn common_options(settings: RunSettings) -> impl Iterator<Item = OsString> {
    let bytes = settings.bytes.map(|bytes| option("bytes", bytes));
    [option("mtu", settings.mtu)].into_iter().chain(bytes)
}

fn option(name: &str, value: impl Display) -> OsString {
    format!("--{name}={value}").into()
}

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
    use super::*;
    use crate::network::tests::parsed;

    #[test]
    fn slow_networks_have_later_deadlines() {
        let timeout_on = |arguments| round_timeout(1 << 30, 100, &parsed(arguments).unwrap());
        assert_eq!(timeout_on("x"), ROUND_TIMEOUT_MARGIN);
        let slow = timeout_on("x --namespaces --rate=1Mbit");
        assert_eq!((slow - ROUND_TIMEOUT_MARGIN).as_secs(), 17_179, "8.6 Gbit at 1 Mbit/s, twice");
        let far = timeout_on("x --namespaces --delay-ms=50");
        assert_eq!((far - ROUND_TIMEOUT_MARGIN).as_secs(), 44, "110 messages, 4 times 0.1 s each");
    }

    fn received(bytes: u64, seconds: f64, hash: Option<&str>) -> Received {
        let side = SideFacts { hash: hash.map(Into::into), ..SideFacts::default() };
        Received { bytes, cpu_s: 0.25, side, ..Received::default() }.within(seconds)
    }

    fn sent(bytes: u64, seconds: Option<f64>, hash: Option<&str>) -> Sent {
        let side = SideFacts { hash: hash.map(Into::into), ..SideFacts::default() };
        Sent { bytes, cpu_s: 0.5, seconds, side, ..Sent::default() }
    }

    #[test]
    fn rates_are_those_of_all_receivers_together() {
        let gib = 1 << 30;
        let round = Round::new(
            vec![received(gib, 1.0, None), received(gib, 2.0, None)],
            sent(gib, Some(4.0), None),
            None,
        );
        let cells = round.unwrap().cells();
        assert_eq!(cells.get("gb_per_s"), Some(&(2.0 * gib as f64 / 4.0 / 1e9)), "by the server's time");
        assert_eq!(cells.get("cpu_s_per_gib"), Some(&0.5), "of three processes, for two GiB");
        let alone = Round::new(vec![received(gib, 2.0, None)], sent(gib, None, None), Some(gib)).unwrap();
        assert_eq!(alone.gb_per_s(), gib as f64 / 2.0 / 1e9, "by the receiver's time");
    }

    #[test]
    fn impossible_reports_are_refused() {
        let possible =
            |received: Received, sent: Sent, bytes| Round::new(vec![received], sent, bytes).is_ok();
        assert!(possible(received(7, 1.0, Some("a")), sent(7, None, Some("a")), Some(7)));
        assert!(possible(Received { missed_bytes: 4, ..received(3, 1.0, None) }, sent(7, None, None), None));
        assert!(!possible(received(7, 1.0, Some("b")), sent(7, None, Some("a")), None), "other bytes");
        assert!(!possible(received(7, 1.0, None), sent(7, None, Some("a")), None), "no hash");
        assert!(!possible(received(6, 1.0, None), sent(7, None, None), None));
        assert!(!possible(received(6, 1.0, None), sent(6, None, None), Some(7)));
        assert!(!possible(
            Received { missed_bytes: u64::MAX, ..received(3, 1.0, None) },
            sent(7, None, None),
            None
        ));
        assert!(!possible(received(7, -1.0, None), sent(7, None, None), None));
        assert!(!possible(received(7, f64::NAN, None), sent(7, None, None), None));
        assert!(Round::new(vec![], sent(7, None, None), None).is_err());
    }
}
