//! The process that does the work, at either end: the same on the driver's machine and on another.
//!
//! It is a process of its own for each job, so that its CPU time and its memory are those of the job alone.

use super::{
    consumer,
    driver_link::{DriverGone, DriverLink, send_report},
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
    let mut driver = DriverLink::new();
    match work(&mut driver, args).await {
        Ok(()) => send_report(&Report::Ended { peak_resident_bytes: memory::peak_resident_bytes() }),
        // It was killed, or interrupted: that is no fault of ours, and nobody would read it.
        Err(error) if error.is::<DriverGone>() => Ok(()),
        Err(error) => {
            send_report(&Report::Failed { reason: format!("{error:#}") })?;
            Err(error)
        }
    }
}

async fn work(driver: &mut DriverLink, args: WorkerArgs) -> Result<()> {
    send_report(&Report::Here(Introduction { origin: Origin::here(), clock: clock::name() }))?;
    match driver.next_order().await? {
        Order::Produce(job) => producer::run(job, args.data, driver).await,
        Order::Consume(job) => consumer::run(job, driver).await,
        Order::End => Ok(()),
        other => bail!("the driver said {other:?} before it said what to be"),
    }
}
