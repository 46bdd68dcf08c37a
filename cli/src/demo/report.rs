//! The demo's report to the user.

use super::consumer::{SmallVersions, Verified};
use crate::{
    args::{DemoArgs, DeviceName},
    subscribe::print_line,
    units,
};
use anyhow::Context;
use serde_json::json;
use std::time::Duration;
use tensor_relay_bench::workload::StateDict;
use tensor_relay_client::Ticket;

/// The minimum size of a tensor that counts as large.
const LARGE_BYTES: u64 = 64 << 10;

/// The utilisation, from 0 to 1, from which the processors count as the limit.
const UTILISATION_MIN: f64 = 0.8;

/// Prints what happens, and a summary at the end. With `--json`, prints only the summary, as one object.
pub(super) struct Report {
    json: bool,
    device: DeviceName,
    verified: Vec<Verified>,
}

impl Report {
    pub(super) fn begin(args: &DemoArgs) -> Self {
        let report = Self { json: args.json, device: args.device.device, verified: vec![] };
        let tensors = match report.device {
            DeviceName::Cpu => String::new(),
            cuda => format!(" both with their tensors on {cuda},"),
        };
        let size = units::bytes(args.size);
        report.print(&format!(
            "A server and a subscriber on this machine,{tensors} with one encrypted connection between them.\n\n  \
             producer  generates a model of {size} …"
        ));
        report
    }

    pub(super) fn serving(&self, size_bytes: u64, ticket: &Ticket) {
        let dict = StateDict::new(size_bytes, 0);
        let all = dict.tensors().len();
        let large = (0..all).filter(|index| dict.byte_len(*index) >= LARGE_BYTES).count();
        self.print(&format!(
            "  producer  serves it as topic `weights`: {large} large and {} small tensors, {}\n            its ticket: \
             {ticket}",
            all - large,
            units::bytes(dict.total_bytes())
        ));
    }

    pub(super) fn connected(&self) {
        self.print(
            "  consumer  connected with that ticket and subscribed\n\n  Each version changes every byte. The producer \
             generates it before the transfer; after the\n  commit, the consumer generates it again and compares. The \
             time is that of the transfer.",
        );
    }

    pub(super) fn verified(&mut self, verified: Verified) {
        let duration = Duration::from_secs_f64(verified.duration_s);
        let Verified { version, tensors, payload_bytes, checked_bytes, .. } = &verified;
        self.print(&format!(
            "  version {version}: {} in {} = {}; {tensors} tensors, {checked_bytes} bytes compared, all equal",
            units::bytes(*payload_bytes),
            units::time(duration),
            units::rate(*payload_bytes, duration),
        ));
        self.verified.push(verified);
    }

    pub(super) fn small_versions(&self, small: &SmallVersions) {
        let time = |us: f64| units::time(Duration::from_secs_f64(us / 1e6));
        self.print(&format!(
            "  {} versions of one {} tensor: usable {} after the publish (median), {} (99th percentile)",
            small.received,
            units::bytes(small.bytes_each),
            time(small.p50_us),
            time(small.p99_us),
        ));
    }

    pub(super) fn end(self, small: &SmallVersions) -> anyhow::Result<()> {
        if self.json {
            let summary = json!({
                "device": self.device.to_string(),
                "versions": self.verified,
                "small": small,
                "all_bytes_equal": true,
            });
            print_line(&summary.to_string());
            return Ok(());
        }
        let fastest = self.verified.iter().min_by(|a, b| a.duration_s.total_cmp(&b.duration_s));
        let fastest = fastest.context("no version was received")?;
        let rate = units::rate(fastest.payload_bytes, Duration::from_secs_f64(fastest.duration_s));
        let moved = units::bytes(self.verified.iter().map(|version| version.checked_bytes).sum());
        let transport = match fastest.udp_payload_bytes {
            0 => "TLS 1.3 over TCP, because the path is short".into(),
            bytes => format!("QUIC, {bytes} bytes per packet"),
        };
        let (chunks, limit) = (fastest.chunks, limit(fastest));
        let device = match self.device {
            DeviceName::Cpu => String::new(),
            gpu => format!(
                "\n  device    copied from {gpu} and back to it by its copy engines, through page-locked memory"
            ),
        };
        self.print(&format!(
            "
What happened
  moved     {moved} of tensors from the server to the subscriber, at up to {rate}
  how       {transport}
            in {chunks} chunks per version, each on its own stream
  limit     {limit}
  checked   every chunk by its hash, every version by its digest, and in this demo every byte{device}
  memory    the first version needs new memory, which the system clears; later versions reuse it. Since
            every byte changes, no copy is kept as a base of deltas; `subscribe` keeps one by default

Next: on two hosts, `tensor-relay serve --topic NAME=FILE.safetensors` and, with the ticket
it prints, `tensor-relay subscribe TICKET --out DIR`."
        ));
        Ok(())
    }

    fn print(&self, text: &str) {
        if !self.json {
            print_line(text);
        }
    }
}

/// The limit on the rate of a version: the processors of this machine, or one thread of the producer or consumer.
fn limit(version: &Verified) -> String {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let busy = version.cpu_s / version.duration_s;
    let cause = match busy >= UTILISATION_MIN * processors as f64 {
        true => "the processors, which producer and consumer share here",
        false => "not the processors, but waiting, or one thread of the producer or consumer",
    };
    format!("{cause}: both used {busy:.1} of {processors} during the fastest transfer")
}
