//! The process that does the work, at either end: the same on the driver's machine and on another.
//!
//! It is a process of its own for each job, so that its CPU time and its memory are those of the job alone.

use super::{
    consumer,
    desk::{Desk, DriverGone, say},
    memory,
    order::{Introduction, Order, Report},
    producer,
};
use crate::{clock, origin::Origin};
use anyhow::{Result, bail};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// The default address of a worker's server.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct WorkerArgs {
    /// The address of this machine.
    #[arg(long, default_value_t = SocketAddr::from((IpAddr::V4(Ipv4Addr::LOCALHOST), 0)))]
    pub(crate) data: SocketAddr,
}

/// Does what the driver behind standard input says.
///
/// # Errors
/// When something goes wrong, after the driver was told.
pub(crate) async fn run(args: WorkerArgs) -> Result<()> {
    let mut desk = Desk::new();
    match work(&mut desk, args).await {
        Ok(()) => say(&Report::Ended { peak_resident_bytes: memory::peak_resident_bytes() }),
        // It was killed, or interrupted: that is no fault of ours, and nobody would read it.
        Err(error) if error.is::<DriverGone>() => Ok(()),
        Err(error) => {
            say(&Report::Failed { reason: format!("{error:#}") })?;
            Err(error)
        }
    }
}

async fn work(desk: &mut Desk, args: WorkerArgs) -> Result<()> {
    say(&Report::Here(Introduction { origin: Origin::here(), clock: clock::name() }))?;
    match desk.next().await? {
        Order::Produce(job) => producer::run(job, args.data, desk).await,
        Order::Consume(job) => consumer::run(job, desk).await,
        Order::End => Ok(()),
        other => bail!("the driver said {other:?} before it said what to be"),
    }
}
