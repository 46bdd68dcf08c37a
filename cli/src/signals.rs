//! [`Signals`]: the handling of signals that end the process.

use crate::exit::Exit;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// The handlers of SIGINT, SIGTERM and optionally SIGHUP, which otherwise would kill the process.
#[derive(Debug)]
pub(crate) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Option<Signal>,
    /// A handler of SIGXFSZ, so that a write beyond `ulimit -f` returns an error instead of killing the process.
    _file_too_large: Signal,
}

/// The number of SIGXFSZ on Linux.
const SIGXFSZ: std::ffi::c_int = 25;

impl Signals {
    /// Handles SIGINT and SIGTERM from now on.
    pub(crate) fn listen() -> std::io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: None,
            _file_too_large: signal(SignalKind::from_raw(SIGXFSZ))?,
        })
    }

    /// Handles SIGHUP too, for commands that have to clean up, unless it is ignored (`nohup`).
    pub(crate) fn with_hangup(self) -> std::io::Result<Self> {
        let hangup = match is_hangup_ignored() {
            true => None,
            false => Some(signal(SignalKind::hangup())?),
        };
        Ok(Self { hangup, ..self })
    }

    /// Waits for the next signal and returns its exit code. Cancel safe.
    pub(crate) async fn next(&mut self) -> Exit {
        let hangup = async {
            match &mut self.hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.interrupt.recv() => Exit::Interrupted,
            _ = self.terminate.recv() => Exit::Terminated,
            _ = hangup => Exit::HungUp,
        }
    }
}

/// Whether SIGHUP is ignored, so that the process survives its terminal.
fn is_hangup_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    ignored_signals(&status) & 1 << (SignalKind::hangup().as_raw_value() - 1) != 0
}

/// The ignored signals of a process, one bit per signal, from its `status` in /proc.
fn ignored_signals(status: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_read_from_proc() {
        assert_eq!(ignored_signals("Name:\tx\nSigIgn:\t0000000000001001\nSigCgt:\t0\n"), 0x1001);
        assert_eq!(ignored_signals(""), 0);
    }
}
