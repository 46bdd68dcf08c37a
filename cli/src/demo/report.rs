//! The demo's report to the user.

use super::events::{Serving, SmallVersions, Verified, VersionProgress};
use crate::{
    args::{DemoArgs, DeviceName},
    bar::Bar,
    subscribe::print_line,
    units,
};
use anyhow::Context;
use serde_json::json;
use std::time::Duration;

/// Prints the events as they happen, and a summary at the end. With `--json`, prints only the summary, as one object.
pub(crate) struct DemoReport {
    json: bool,
    device: DeviceName,
    bar: Bar,
    verified: Vec<Verified>,
    small_versions: Option<SmallVersions>,
}

impl DemoReport {
    pub(crate) fn begin(args: &DemoArgs) -> Self {
        let (json, device) = (args.json, args.device.device);
        let report = Self { json, device, bar: Bar::new(!json), verified: vec![], small_versions: None };
        report.print(&match device {
            DeviceName::Cpu => "Two processes on this machine, with one encrypted connection between them.\n".into(),
            cuda => format!(
                "Two processes on this machine, both with their tensors on {cuda}, with one encrypted connection \
                 between them.\n"
            ),
        });
        report.print(&format!("  producer  generates a model of {} …", units::bytes(args.size)));
        report
    }

    pub(crate) fn serving(&self, serving: &Serving, process_id: u32) {
        let Serving { ticket, large_tensors, small_tensors, tensor_bytes } = serving;
        let size = units::bytes(*tensor_bytes);
        self.print(&format!(
            "  producer  serves it as topic `weights`: {large_tensors} large and {small_tensors} small tensors, {size} \
             (process {process_id})"
        ));
        self.print(&format!("            its ticket: {ticket}"));
    }

    pub(crate) fn connected(&self, process_id: u32) {
        self.print(&format!(
            "  consumer  connected with that ticket and subscribed (process {process_id})\n"
        ));
    }

    pub(crate) fn publishing(&mut self, version: u64) {
        if version == 1 {
            self.print(
                "  Each version changes every byte. The producer generates it before the transfer; after the",
            );
            self.print(
                "  commit, the consumer generates it again and compares. The time is that of the transfer.",
            );
        }
    }

    pub(crate) fn progress(&mut self, progress: VersionProgress) {
        self.bar.show(progress.into());
    }

    pub(crate) fn verified(&mut self, verified: Verified) {
        self.bar.clear();
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

    pub(crate) fn small_versions(&mut self, small: SmallVersions) {
        let time = |us: f64| units::time(Duration::from_secs_f64(us / 1e6));
        self.print(&format!(
            "  {} versions of one {} tensor: usable {} after the publish (median), {} (99th percentile)",
            small.received,
            units::bytes(small.bytes_each),
            time(small.p50_us),
            time(small.p99_us),
        ));
        self.small_versions = Some(small);
    }

    pub(crate) fn end(self) -> anyhow::Result<()> {
        let fastest = self.verified.iter().min_by(|a, b| a.duration_s.total_cmp(&b.duration_s));
        let fastest = fastest.context("no version was received")?;
        let small = self.small_versions.as_ref().context("no small version was received")?;
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
        let duration = Duration::from_secs_f64(fastest.duration_s);
        let rate = units::rate(fastest.payload_bytes, duration);
        let checked: u64 = self.verified.iter().map(|v| v.checked_bytes).sum();
        self.print("\nWhat happened");
        self.print(&format!(
            "  moved     {} of tensors between two processes, at up to {rate}",
            units::bytes(checked)
        ));
        match fastest.udp_payload_bytes {
            0 => self.print("  how       TLS 1.3 over TCP, because the path is short"),
            bytes => self.print(&format!("  how       QUIC, {bytes} bytes per packet")),
        }
        self.print(&format!("            in {} chunks per version, each on its own stream", fastest.chunks));
        self.print(&format!("  limit     {}", limit(fastest)));
        self.print(
            "  checked   every chunk by its hash, every version by its digest, and in this demo every byte",
        );
        if self.device != DeviceName::Cpu {
            self.print(&format!(
                "  device    copied from {0} and back to it by its copy engines, through page-locked memory",
                self.device
            ));
        }
        self.print(
            "  memory    the first version needs new memory, which the system clears; later versions reuse it. Since",
        );
        self.print(
            "            every byte changes, no copy is kept as a base of deltas; `subscribe` keeps one by default",
        );
        self.print(
            "\nNext: on two hosts, `tensor-relay serve --topic NAME=FILE.safetensors` and, with the ticket",
        );
        self.print("it prints, `tensor-relay subscribe TICKET --out DIR`.");
        Ok(())
    }

    fn print(&self, line: &str) {
        if !self.json {
            print_line(line);
        }
    }
}

/// The utilisation, from 0 to 1, from which the processors count as the limit.
const UTILISATION_MIN: f64 = 0.8;

/// The limit on the rate of a version: the processors of this machine, or one thread of the producer or consumer.
fn limit(version: &Verified) -> String {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let busy = version.cpu_s / version.duration_s;
    let cause = match busy >= UTILISATION_MIN * processors as f64 {
        true => "the processors, which producer and consumer share here",
        false => "not the processors, but waiting, or one thread of the producer or consumer",
    };
    format!("{cause}: both processes used {busy:.1} of {processors} during the fastest transfer")
}
