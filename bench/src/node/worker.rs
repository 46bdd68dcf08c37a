//! The worker, a process that runs the producer or one consumer, on the driver's machine or behind a node.
//!
//! Each job has a worker of its own, so that the CPU time and the memory of the process are those of the job.

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

/// The options of a worker.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct WorkerArgs {
    /// The address on which a producer serves.
    #[arg(long, default_value_t = SocketAddr::from((IpAddr::V4(Ipv4Addr::LOCALHOST), 0)))]
    pub(crate) data: SocketAddr,
}

/// Carries out the orders that arrive on standard input.
///
/// # Errors
/// The error of the job, after it was reported to the driver.
pub(crate) async fn run(args: WorkerArgs) -> Result<()> {
    let mut driver = DriverLink::new();
    match work(&mut driver, args).await {
        Ok(()) => send_report(&Report::Ended { peak_resident_bytes: memory::peak_resident_bytes() }),
        // The driver was killed or interrupted: this worker has not failed, and no driver would read a report.
        Err(error) if error.is::<DriverGone>() => Ok(()),
        Err(error) => {
            send_report(&Report::Failed { reason: format!("{error:#}") })?;
            Err(error)
        }
    }
}

async fn work(driver: &mut DriverLink, args: WorkerArgs) -> Result<()> {
    send_report(&Report::Introduced(Introduction { origin: Origin::here(), clock: clock::identifier() }))?;
    match driver.next_order().await? {
        Order::Produce(job) => producer::run(job, args.data, driver).await,
        Order::Consume(job) => consumer::run(job, driver).await,
        Order::End => Ok(()),
        other => bail!("the driver sent {other:?} before it assigned a job"),
    }
}
