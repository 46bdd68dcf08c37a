//! Two network namespaces, and the commands that run in them.

use super::Side;
use crate::program::Program;
use anyhow::{Context, Result, bail};
use std::sync::atomic::{AtomicU32, Ordering};
use tokio::process::Command;

/// A network namespace for each end. Dropping this removes both with their devices.
pub(super) struct Namespaces {
    /// The names, by [`Side`].
    names: [String; 2],
}

impl Namespaces {
    /// Creates two namespaces, empty but for their loopback devices.
    ///
    /// # Errors
    /// When `ip` or the privilege to use it is missing.
    pub(super) fn new() -> Result<Self> {
        /// Numbers the networks of this process.
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = |side| format!("relay-bench-{}-{number}-{side}", std::process::id());
        let namespaces = Self { names: ["server", "client"].map(name) };
        for side in [Side::Serving, Side::Receiving] {
            run("ip", &["netns", "add", namespaces.name(side)])?;
            // Some peers connect to their own address.
            namespaces.ip(side, "link set lo up")?;
        }
        Ok(namespaces)
    }

    /// The name of the namespace at `side`.
    pub(super) fn name(&self, side: Side) -> &str {
        &self.names[side as usize]
    }

    /// A command that runs `program` in the namespace at `side`. `ip` replaces itself by the program with exec, so that
    /// killing the child kills the program.
    pub(super) fn command(&self, side: Side, program: &Program) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", self.name(side)]).args(program.words());
        command
    }

    /// Runs `ip` with `words` in the namespace at `side`.
    pub(super) fn ip(&self, side: Side, words: &str) -> Result<()> {
        run_in("ip", self.name(side), words)
    }

    /// Runs `tc` with `words` in the namespace at `side`.
    pub(super) fn tc(&self, side: Side, words: &str) -> Result<()> {
        run_in("tc", self.name(side), words)
    }

    /// Loads nftables `rules` in the namespace at `side`.
    pub(super) fn nft(&self, side: Side, rules: &str) -> Result<()> {
        run("ip", &["netns", "exec", self.name(side), "nft", rules])
            .context("cannot drop packets: --loss needs nftables")
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for side in [Side::Serving, Side::Receiving] {
            if let Err(error) = run("ip", &["netns", "delete", self.name(side)]) {
                eprintln!("{error:#}");
            }
        }
    }
}

/// Runs a tool of iproute2 with `words` in `namespace`.
fn run_in(tool: &str, namespace: &str, words: &str) -> Result<()> {
    let words: Vec<&str> = ["-n", namespace].into_iter().chain(words.split(' ')).collect();
    run(tool, &words)
}

/// Runs `tool` and waits for it, which takes milliseconds.
fn run(tool: &str, words: &[&str]) -> Result<()> {
    let output = std::process::Command::new(tool).args(words).output();
    let output =
        output.with_context(|| format!("cannot run `{tool}`, which --namespaces needs: install iproute2"))?;
    if !output.status.success() {
        let reason = String::from_utf8_lossy(&output.stderr);
        bail!("`{tool} {}` failed (--namespaces needs root): {}", words.join(" "), reason.trim());
    }
    Ok(())
}
