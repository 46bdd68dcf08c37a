//! A worker's link to its driver: orders from standard input, reports to standard output.

use super::order::{Order, Report};
use crate::wire::{LINE_MAX_BYTES, Lines};
use anyhow::{Result, bail};
use std::{io::Write, time::Duration};
use tokio::{
    io::{Stdin, stdin},
    time::{interval, timeout},
};

/// The deadline for the next order: long, because the driver may be waiting for other workers. A driver whose machine
/// is unreachable is noticed earlier, by TCP keep-alive.
const ORDER_TIMEOUT: Duration = Duration::from_secs(3_600);

/// The interval of a worker's progress reports.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);

/// A reader of the driver's orders from standard input, which is a pipe or a TCP connection.
pub(super) struct DriverLink(Lines<Stdin>);

/// The error of a worker whose driver closed the connection.
#[derive(Debug, thiserror::Error)]
#[error("the driver disconnected")]
pub(super) struct DriverGone;

impl DriverLink {
    pub(super) fn new() -> Self {
        Self(Lines::new(stdin(), LINE_MAX_BYTES))
    }

    /// Waits for the next order.
    ///
    /// # Errors
    /// [`DriverGone`]; input that is not an order; no order for an hour.
    pub(super) async fn next_order(&mut self) -> Result<Order> {
        match timeout(ORDER_TIMEOUT, self.0.next()).await {
            Ok(order) => Ok(order?.ok_or(DriverGone)?),
            Err(_) => bail!("the driver sent no order for {} s", ORDER_TIMEOUT.as_secs()),
        }
    }

    /// Runs `work` to its end, and reports its progress periodically. Returns `None` if the driver sends `Stop` before
    /// the end.
    ///
    /// # Errors
    /// The error of `work`, or a driver that disconnects or violates the protocol.
    pub(super) async fn until_stopped<T>(
        &mut self,
        work: impl Future<Output = Result<T>>,
        progress: impl Fn() -> u64,
    ) -> Result<Option<T>> {
        tokio::pin!(work);
        let mut ticks = interval(PROGRESS_INTERVAL);
        loop {
            tokio::select! {
                result = &mut work => return result.map(Some),
                order = self.next_order() => match order? {
                    Order::Stop { .. } => return Ok(None),
                    other => bail!("the driver sent {other:?} in the middle of a round"),
                },
                _ = ticks.tick() => send_report(&Report::Progress { bytes: progress() })?,
            }
        }
    }
}

/// Sends `report` to the driver.
///
/// # Errors
/// When standard output is closed.
pub(super) fn send_report(report: &Report) -> Result<()> {
    let mut line = serde_json::to_vec(report)?;
    line.push(b'\n');
    let mut out = std::io::stdout().lock();
    out.write_all(&line)?;
    Ok(out.flush()?)
}
