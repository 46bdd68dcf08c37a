//! A worker's desk: where orders come in, and reports go out.

use super::order::{Order, Report};
use crate::wire::{LINE_MAX_BYTES, Lines};
use anyhow::{Result, bail};
use std::{io::Write, time::Duration};
use tokio::{
    io::{Stdin, stdin},
    time::{interval, timeout},
};

/// The deadline for the next order. A driver whose other workers are busy may take long; one whose machine is gone
/// is noticed earlier, where the connection is watched.
const ORDER_MAX: Duration = Duration::from_secs(3_600);

/// The interval of a worker's progress reports.
const TELL: Duration = Duration::from_millis(500);

/// Orders, from standard input: a pipe of the driver's, or its connection.
pub(super) struct Desk(Lines<Stdin>);

/// There is nobody any more to work for.
#[derive(Debug, thiserror::Error)]
#[error("the driver went away")]
pub(super) struct DriverGone;

impl Desk {
    pub(super) fn new() -> Self {
        Self(Lines::new(stdin(), LINE_MAX_BYTES))
    }

    /// Waits for the next order.
    ///
    /// # Errors
    /// [`DriverGone`], and when something else than an order comes, or nothing for an hour.
    pub(super) async fn next(&mut self) -> Result<Order> {
        match timeout(ORDER_MAX, self.0.next()).await {
            Ok(order) => Ok(order?.ok_or(DriverGone)?),
            Err(_) => bail!("the driver gave no order for {} s", ORDER_MAX.as_secs()),
        }
    }

    /// Does `work` until it is done, and tells now and then how far it is; `None` when the driver says to stop before.
    ///
    /// # Errors
    /// The error of `work`, or a driver that disconnects or violates the protocol.
    pub(super) async fn until_stopped<T>(
        &mut self,
        work: impl Future<Output = Result<T>>,
        progress: impl Fn() -> u64,
    ) -> Result<Option<T>> {
        tokio::pin!(work);
        let mut tell = interval(TELL);
        loop {
            tokio::select! {
                done = &mut work => return done.map(Some),
                order = self.next() => match order? {
                    Order::Stop { .. } => return Ok(None),
                    other => bail!("the driver said {other:?} in the middle of a round"),
                },
                _ = tell.tick() => say(&Report::Moving { bytes: progress() })?,
            }
        }
    }
}

/// Tells the driver.
///
/// # Errors
/// When it is gone.
pub(super) fn say(report: &Report) -> Result<()> {
    let mut line = serde_json::to_vec(report)?;
    line.push(b'\n');
    let mut out = std::io::stdout().lock();
    out.write_all(&line)?;
    Ok(out.flush()?)
}
