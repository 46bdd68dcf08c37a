//! The rate of the path to a server, and its bottleneck.

use super::{
    cgroup::Cgroup,
    finding::{Finding, Fix, State},
};
use crate::units;
use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;
use tensor_relay_client::{Client, ClientError, ProbeBytes, ProbeReport};

/// The size of the first probe: small enough for a slow line.
const FIRST_BYTES: u32 = 256 << 10;

/// The factor by which each probe is larger than the previous one.
const GROWTH_FACTOR: u32 = 4;

/// The minimum duration of the probe whose rate is the result. All probes together take about two seconds at most,
/// unless the rate falls meanwhile.
const PROBE_DURATION_MIN: Duration = Duration::from_millis(400);

/// The utilisation, from 0 to 1, from which a processor counts as the bottleneck.
const UTILISATION_MIN: f64 = 0.8;

/// The fraction of lost packets from which loss counts as the bottleneck of QUIC.
const LOSS_MIN: f64 = 0.001;

/// The flow-control window of a probe.
const WINDOW_BYTES: f64 = (32 << 20) as f64;

/// A measured rate.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rate {
    bytes: u64,
    elapsed: Duration,
    round_trip: Duration,
    /// Whether client and server are on this machine, without a network between them.
    is_local: bool,
    /// The CPU time of this process during the probe.
    cpu_time: Duration,
    /// The number of processors that this process may use.
    processors: f64,
    /// The server's counters during the probe.
    server: ProbeReport,
}

const LIMITED_BY_LOSS: &str = "limited by loss";

const LIMITED_BY_THIS_MACHINE: &str = "limited by the processors of this machine";

/// Measures the rate at which the server sends to `client`. `None` if the server does not answer probes: it is too old,
/// answers too many other probes, or grants this client no topic.
pub(super) async fn measure(client: &Client, round_trip: Duration) -> Result<Option<Rate>, ClientError> {
    let count = std::thread::available_parallelism().map_or(1.0, |count| count.get() as f64);
    let processors = Cgroup::own().processors().map_or(count, |quota| quota.min(count));
    let probe = async |bytes| {
        client
            .probe(ProbeBytes::new(bytes).expect("sizes are at most ProbeBytes::MAX"))
            .await
    };
    let mut bytes = FIRST_BYTES;
    loop {
        let Some(before) = probe(1).await? else { return Ok(None) };
        let began = process_cpu_time();
        let Some(measured) = probe(bytes).await? else { return Ok(None) };
        let cpu_time = process_cpu_time().saturating_sub(began);
        // By the end of this probe, the server has detected the packets lost at the end of the measured probe.
        let Some(after) = probe(1).await? else { return Ok(None) };
        let (elapsed, server) = (measured.elapsed, after.sender.since(&before.sender));
        if elapsed >= PROBE_DURATION_MIN || bytes == ProbeBytes::MAX {
            let (bytes, is_local) = (measured.bytes, client.peer().is_on_this_host());
            return Ok(Some(Rate { bytes, elapsed, round_trip, is_local, cpu_time, processors, server }));
        }
        bytes = bytes.saturating_mul(GROWTH_FACTOR).min(ProbeBytes::MAX);
    }
}

/// The CPU time of this process.
fn process_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

impl Rate {
    fn bytes_per_s(&self) -> f64 {
        self.bytes as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// The bottleneck.
    fn limit(&self) -> &'static str {
        let local =
            self.cpu_time.as_secs_f64() / self.elapsed.as_secs_f64().max(1e-9) / self.processors.min(1.0);
        let server = self.server.processors();
        match () {
            () if local.max(server) >= UTILISATION_MIN && local < server => {
                "limited by the processors of the server"
            }
            () if local >= UTILISATION_MIN => LIMITED_BY_THIS_MACHINE,
            () if self.server.loss() >= LOSS_MIN => LIMITED_BY_LOSS,
            () if self.bytes_per_s() * self.round_trip.as_secs_f64() >= WINDOW_BYTES / 2.0 => {
                "limited by the flow-control window on this long path: use more lanes (--lanes)"
            }
            () if self.is_local => LIMITED_BY_THIS_MACHINE,
            () => "limited by the line, or by other traffic on it",
        }
    }
}

/// Judges the rate over one transport. Only loss is a warning, because it can be fixed.
pub(super) fn judge(name: &'static str, rate: &Rate) -> Finding {
    let limit = rate.limit();
    let loss = match rate.server.sent_packets {
        0 => String::new(),
        sent => format!(", {} of {sent} packets lost", rate.server.lost_packets),
    };
    let measured = format!("{}, {limit}{loss}", units::rate(rate.bytes, rate.elapsed));
    let wanted = "less than one packet in a thousand lost";
    let fix = Fix {
        host: "raise net.core.rmem_max (see UDP buffers); check the network card for errors (ip -s link); if a device \
               limits only UDP or only TCP, the rates differ: choose the faster one with --transport quic or tcp",
        docker: "the same on both hosts",
        kubernetes: "the same on both nodes; a CNI that encapsulates packets needs a smaller MTU for the pods",
    };
    Finding::new(name, State::Warn.unless(limit != LIMITED_BY_LOSS), measured, wanted, fix)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One second at 1 Gbit/s over a round trip of 1 ms, limited by the line alone.
    const LIMITED_BY_LINE: Rate = Rate {
        bytes: 125_000_000,
        elapsed: Duration::from_secs(1),
        round_trip: Duration::from_millis(1),
        is_local: false,
        cpu_time: Duration::from_millis(300),
        processors: 2.0,
        server: ProbeReport {
            clock_us: 1_000_000,
            processor_us: 200_000,
            sent_packets: 90_000,
            lost_packets: 3,
        },
    };

    #[test]
    fn the_bottleneck_of_a_rate_is_named() {
        let busy = Duration::from_millis(950);
        let cases = [
            (LIMITED_BY_LINE, "the line"),
            (Rate { is_local: true, ..LIMITED_BY_LINE }, "of this machine"),
            (Rate { cpu_time: busy, ..LIMITED_BY_LINE }, "of this machine"),
            (Rate { cpu_time: busy / 2, processors: 0.5, ..LIMITED_BY_LINE }, "of this machine"),
            (
                Rate {
                    server: ProbeReport { processor_us: 950_000, ..LIMITED_BY_LINE.server },
                    ..LIMITED_BY_LINE
                },
                "of the server",
            ),
            (
                Rate {
                    server: ProbeReport { lost_packets: 2_000, ..LIMITED_BY_LINE.server },
                    ..LIMITED_BY_LINE
                },
                "loss",
            ),
            (Rate { round_trip: Duration::from_millis(200), ..LIMITED_BY_LINE }, "window"),
        ];
        for (rate, limit) in cases {
            assert!(rate.limit().contains(limit), "{rate:?}");
            let finding = judge("rate over UDP", &rate);
            assert_eq!(finding.state == State::Warn, limit == "loss", "{finding:?}");
        }
        let measured = judge("rate over UDP", &LIMITED_BY_LINE).measured;
        assert!(measured.contains("3 of 90000 packets lost") && measured.contains("the line"), "{measured}");
    }
}
