//! Signals that end the process.

use crate::exit::Exit;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Hears SIGINT and SIGTERM from now on, instead of dying of them.
#[derive(Debug)]
pub(crate) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Option<Signal>,
    /// Heard so that a file that is larger than `ulimit -f` is an error of the write, and not the end of the process.
    _too_large: Signal,
}

/// SIGXFSZ.
const TOO_LARGE: std::ffi::c_int = 25;

impl Signals {
    pub(crate) fn hear() -> std::io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: None,
            _too_large: signal(SignalKind::from_raw(TOO_LARGE))?,
        })
    }

    /// Hears SIGHUP too, for who has to clean up, unless it is ignored (`nohup`).
    pub(crate) fn with_hangup(self) -> std::io::Result<Self> {
        let hangup = match is_hangup_ignored() {
            true => None,
            false => Some(signal(SignalKind::hangup())?),
        };
        Ok(Self { hangup, ..self })
    }

    /// Waits for the next signal and says what an exit because of it is. Cancel safe.
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

/// Whether whoever started this process wants it to survive its terminal.
fn is_hangup_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    ignored_signals(&status) & 1 << (SignalKind::hangup().as_raw_value() - 1) != 0
}

/// The signals that a process ignores, a bit each, by its `status` in /proc.
fn ignored_signals(status: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_ignored_is_read_from_proc() {
        assert_eq!(ignored_signals("Name:\tx\nSigIgn:\t0000000000001001\nSigCgt:\t0\n"), 0x1001);
        assert_eq!(ignored_signals(""), 0);
    }
}
