//! The rate that a path to a server reaches, and what limits it.

use super::{
    cgroup::Cgroup,
    finding::{Finding, Fix},
};
use crate::units;
use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;
use tensor_relay_client::{Client, ClientError, ProbeBytes, ProbeReport};

/// The first probe: small enough for a slow line.
const FIRST_BYTES: u32 = 256 << 10;

/// How many times as large each probe is as the one before.
const GROWTH: u32 = 4;

/// A probe that takes as long counts; all of them take two seconds at most, unless the rate falls meanwhile.
const ENOUGH: Duration = Duration::from_millis(400);

/// How much of one processor a process has to use for that to be what limits it.
const BUSY: f64 = 0.8;

/// The fraction of lost packets from which on loss is what limits QUIC.
const LOSSY: f64 = 0.001;

/// The flow-control window of a probe.
const WINDOW_BYTES: f64 = (32 << 20) as f64;

/// A measured rate.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rate {
    bytes: u64,
    elapsed: Duration,
    round_trip: Duration,
    /// Whether both ends are on this machine: then there is no line.
    is_local: bool,
    /// How long this process computed meanwhile, and how many processors it may use.
    computed: Duration,
    processors: f64,
    /// The server's counters meanwhile.
    server: ProbeReport,
}

/// What a rate is limited by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Limit {
    ProcessorHere,
    ProcessorThere,
    Loss,
    Window,
    Line,
}

/// Measures how fast the server sends to `client`; `None` where it cannot, since it is older, or answers too many others.
pub(super) async fn measure(client: &Client, round_trip: Duration) -> Result<Option<Rate>, ClientError> {
    let seen = std::thread::available_parallelism().map_or(1.0, |count| count.get() as f64);
    let processors = Cgroup::own().processors().map_or(seen, |quota| quota.min(seen));
    let probe = async |bytes| {
        client
            .probe(ProbeBytes::new(bytes).expect("it grows no further than that"))
            .await
    };
    let mut bytes = FIRST_BYTES;
    loop {
        let Some(before) = probe(1).await? else { return Ok(None) };
        let began = processor_time();
        let Some(measured) = probe(bytes).await? else { return Ok(None) };
        let computed = processor_time().saturating_sub(began);
        // What was sent last is only now known to have arrived.
        let Some(after) = probe(1).await? else { return Ok(None) };
        let (elapsed, server) = (measured.elapsed, after.sender.since(&before.sender));
        if elapsed >= ENOUGH || bytes == ProbeBytes::MAX {
            let (bytes, is_local) = (measured.bytes, client.peer().ip().is_loopback());
            return Ok(Some(Rate { bytes, elapsed, round_trip, is_local, computed, processors, server }));
        }
        bytes = bytes.saturating_mul(GROWTH).min(ProbeBytes::MAX);
    }
}

/// How long this process has computed.
fn processor_time() -> Duration {
    let spent = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(spent.tv_sec as u64, spent.tv_nsec as u32)
}

impl Rate {
    fn bytes_per_s(&self) -> f64 {
        self.bytes as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    fn limit(&self) -> Limit {
        let here =
            self.computed.as_secs_f64() / self.elapsed.as_secs_f64().max(1e-9) / self.processors.min(1.0);
        let there = self.server.processors();
        if here.max(there) >= BUSY {
            return if here >= there { Limit::ProcessorHere } else { Limit::ProcessorThere };
        }
        match () {
            () if self.server.loss() >= LOSSY => Limit::Loss,
            () if self.bytes_per_s() * self.round_trip.as_secs_f64() >= WINDOW_BYTES / 2.0 => Limit::Window,
            () if self.is_local => Limit::ProcessorHere,
            () => Limit::Line,
        }
    }
}

/// Judges the rate over one transport: loss costs speed that can be had back, the rest is as it is.
pub(super) fn judge(name: &'static str, rate: &Rate) -> Finding {
    let limit = match rate.limit() {
        Limit::ProcessorHere => "limited by the processors here",
        Limit::ProcessorThere => "limited by the processors of the server",
        Limit::Loss => "limited by loss",
        Limit::Window => "limited by the window on so long a path: more lanes carry more (--lanes)",
        Limit::Line => "limited by the line, or by what else uses it",
    };
    let loss = match rate.server.sent_packets {
        0 => String::new(),
        sent => format!(", {} of {sent} packets lost", rate.server.lost_packets),
    };
    let measured = format!("{}, {limit}{loss}", units::rate(rate.bytes, rate.elapsed));
    let wanted = "less than one packet in a thousand lost";
    let fix = Fix {
        host: "raise net.core.rmem_max (see UDP buffers), look for errors of the network card (ip -s link), and for a device that \
               limits one of UDP and TCP: compare their rates, and take --transport quic or tcp, whichever is higher",
        docker: "the same on both hosts",
        kubernetes: "the same on both nodes; a CNI that encapsulates packets needs a smaller MTU for the pods",
    };
    match rate.limit() {
        Limit::Loss => Finding::warn(name, measured, wanted, fix),
        _ => Finding::ok(name, measured, wanted),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::State;

    /// One second of 1 Gbit/s over 1 ms, with nothing in the way.
    const CLEAN: Rate = Rate {
        bytes: 125_000_000,
        elapsed: Duration::from_secs(1),
        round_trip: Duration::from_millis(1),
        is_local: false,
        computed: Duration::from_millis(300),
        processors: 2.0,
        server: ProbeReport {
            clock_us: 1_000_000,
            processor_us: 200_000,
            sent_packets: 90_000,
            lost_packets: 3,
        },
    };

    #[test]
    fn what_limits_a_rate_is_named() {
        let busy = Duration::from_millis(950);
        let cases = [
            (CLEAN, Limit::Line),
            (Rate { is_local: true, ..CLEAN }, Limit::ProcessorHere),
            (Rate { computed: busy, ..CLEAN }, Limit::ProcessorHere),
            (Rate { computed: busy / 2, processors: 0.5, ..CLEAN }, Limit::ProcessorHere),
            (
                Rate { server: ProbeReport { processor_us: 950_000, ..CLEAN.server }, ..CLEAN },
                Limit::ProcessorThere,
            ),
            (Rate { server: ProbeReport { lost_packets: 2_000, ..CLEAN.server }, ..CLEAN }, Limit::Loss),
            (Rate { round_trip: Duration::from_millis(200), ..CLEAN }, Limit::Window),
        ];
        for (rate, limit) in cases {
            assert_eq!(rate.limit(), limit, "{rate:?}");
            let finding = judge("rate over UDP", &rate);
            assert_eq!(finding.state == State::Warn, limit == Limit::Loss, "{finding:?}");
        }
        let told = judge("rate over UDP", &CLEAN).measured;
        assert!(told.contains("3 of 90000 packets lost") && told.contains("the line"), "{told}");
    }
}
