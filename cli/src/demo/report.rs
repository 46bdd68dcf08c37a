//! The demo's report to the user.

use super::events::{Serving, SmallVersions, Verified, VersionStarted};
use crate::{
    args::{DemoArgs, DeviceName},
    bar::Bar,
    units,
};
use anyhow::Context;
use serde_json::json;
use std::time::Duration;

/// Reports events as they happen, and a summary. With `--json` only the summary, as one object.
pub(crate) struct DemoReport {
    json: bool,
    device: DeviceName,
    bar: Bar,
    verified: Vec<Verified>,
    smalls: Option<SmallVersions>,
}

impl DemoReport {
    pub(crate) fn begin(args: &DemoArgs) -> Self {
        let (json, device) = (args.json, args.device.device);
        let story = Self { json, device, bar: Bar::new(!json), verified: vec![], smalls: None };
        story.tell(&match device {
            DeviceName::Cpu => "Two processes on this machine, one encrypted QUIC connection between them.\n".into(),
            cuda => format!(
                "Two processes on this machine, both with their tensors on {cuda}, one encrypted QUIC connection between \
                 them.\n"
            ),
        });
        story.tell(&format!("  producer  makes a model of {} …", units::bytes(args.size)));
        story
    }

    pub(crate) fn serving(&self, serving: &Serving, process: u32) {
        let Serving { ticket, large_tensors, small_tensors, tensor_bytes } = serving;
        let size = units::bytes(*tensor_bytes);
        self.tell(&format!(
            "  producer  serves it as topic `weights`: {large_tensors} large and {small_tensors} small tensors, {size} (process {process})"
        ));
        self.tell(&format!("            its ticket: {ticket}"));
    }

    pub(crate) fn connected(&self, process: u32) {
        self.tell(&format!("  consumer  connected with that ticket and subscribed (process {process})\n"));
    }

    pub(crate) fn publishing(&mut self, version: u64) {
        if version == 1 {
            self.tell("  Each version has new bytes in every tensor. The producer makes it before its transfer begins; the");
            self.tell("  consumer generates it again and compares after it was committed. The time is that of the transfer.");
        }
    }

    pub(crate) fn progress(&mut self, progress: VersionStarted) {
        self.bar.show(progress.into());
    }

    pub(crate) fn verified(&mut self, verified: Verified) {
        self.bar.clear();
        let duration = Duration::from_secs_f64(verified.duration_s);
        let Verified { version, tensors, payload_bytes, checked_bytes, .. } = &verified;
        self.tell(&format!(
            "  version {version}: {} in {} = {}; {tensors} tensors, {checked_bytes} bytes compared, all equal",
            units::bytes(*payload_bytes),
            units::time(duration),
            units::rate(*payload_bytes, duration),
        ));
        self.verified.push(verified);
    }

    pub(crate) fn smalls(&mut self, smalls: SmallVersions) {
        let time = |us: f64| units::time(Duration::from_secs_f64(us / 1e6));
        self.tell(&format!(
            "  {} versions of one {} tensor: from publish to usable in {} (median), {} (99 of 100)",
            smalls.received,
            units::bytes(smalls.bytes_each),
            time(smalls.p50_us),
            time(smalls.p99_us),
        ));
        self.smalls = Some(smalls);
    }

    pub(crate) fn end(self) -> anyhow::Result<()> {
        let fastest = self.verified.iter().min_by(|a, b| a.duration_s.total_cmp(&b.duration_s));
        let fastest = fastest.context("no version arrived")?;
        let smalls = self.smalls.as_ref().context("no small version arrived")?;
        if self.json {
            let told = json!({
                "device": self.device.to_string(),
                "versions": self.verified,
                "small": smalls,
                "all_bytes_equal": true,
            });
            println!("{told}");
            return Ok(());
        }
        let duration = Duration::from_secs_f64(fastest.duration_s);
        let rate = units::rate(fastest.payload_bytes, duration);
        let checked: u64 = self.verified.iter().map(|v| v.checked_bytes).sum();
        println!("\nWhat happened");
        println!("  moved     {} of tensors between two processes, at best at {rate}", units::bytes(checked));
        match fastest.udp_payload_bytes {
            0 => println!("  how       TLS 1.3 over TCP, because the path is short"),
            bytes => println!("  how       QUIC, {bytes} bytes per packet here"),
        }
        println!("            in {} chunks a version, each on a stream of its own", fastest.chunks);
        println!(
            "  checked   every chunk by its hash, every version as a whole, and here every byte besides"
        );
        if self.device != DeviceName::Cpu {
            println!(
                "  device    out of {0} and into it again by its copy engines, through page-locked memory",
                self.device
            );
        }
        println!(
            "  memory    the first version takes fresh memory, which is cleared as it comes; later ones reuse it; since every"
        );
        println!(
            "            byte is new, no copy is kept here to apply deltas to, as `subscribe` does by default"
        );
        println!(
            "\nNext: on two hosts, `tensor-relay serve --topic NAME=FILE.safetensors` and, with the ticket"
        );
        println!("it prints, `tensor-relay subscribe TICKET --out DIR`.");
        Ok(())
    }

    fn tell(&self, line: &str) {
        if !self.json {
            println!("{line}");
        }
    }
}
