//! The driver's end of the connection to one worker.

use super::address::NodeAddress;
use crate::{
    node::{
        Token, greeting,
        order::{Order, Report},
    },
    process::Process,
    wire::{self, Lines},
};
use anyhow::{Context, Result, bail};
use std::time::Duration;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    process::Command,
    sync::mpsc,
    time::timeout,
};

/// The deadline for resolving a node's name and connecting to it.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The deadline for writing an order to a worker.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// A worker on this machine or behind a node. Dropping the handle ends the worker: a local process is killed, and a
/// remote one exits when its connection closes.
pub(crate) struct WorkerHandle {
    /// For messages: `producer`, or `consumer 2 (10.0.0.7:4748)`.
    name: String,
    orders: Box<dyn AsyncWrite + Send + Unpin>,
    process: Option<Process>,
}

/// A worker's number, and an event of that worker: a report, or the end of its reports.
pub(crate) type Event = (usize, Result<Report, Disconnected>);

/// The reason why a worker sends no more reports.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Disconnected {
    #[error("it ended")]
    Ended,
    #[error(transparent)]
    Wire(#[from] wire::WireError),
}

impl WorkerHandle {
    /// Starts a worker on this machine with `command`. Its reports go to `events`, numbered `index`.
    ///
    /// # Errors
    /// When it cannot be started.
    pub(crate) fn start(
        name: String,
        command: Command,
        index: usize,
        events: mpsc::Sender<Event>,
    ) -> Result<Self> {
        let mut process = Process::start(name.clone(), command)?;
        let (orders, reports) = process.split()?;
        tokio::spawn(forward_reports(reports, index, events));
        Ok(Self { name, orders: Box::new(orders), process: Some(process) })
    }

    /// Connects to the node at `address`, which starts a worker. Its reports go to `events`, numbered `index`.
    ///
    /// # Errors
    /// When no node listens there, or the greeting fails, e.g. because the node refuses `token`.
    pub(crate) async fn connect(
        role: &str,
        address: &NodeAddress,
        token: &Token,
        index: usize,
        events: mpsc::Sender<Event>,
    ) -> Result<Self> {
        let name = format!("{role} ({address})");
        let Ok(connected) = timeout(CONNECT_TIMEOUT, TcpStream::connect(address.to_string())).await else {
            bail!("cannot reach {name}: no answer over TCP within {} s", CONNECT_TIMEOUT.as_secs());
        };
        let stream = connected.with_context(|| {
            format!("cannot reach {name}: is `bench node` running there, and its TCP port published?")
        })?;
        stream.set_nodelay(true)?;
        let (reports, mut orders) = stream.into_split();
        let greeted = greeting::prove_token(reports, &mut orders, token).await;
        let reports = greeted.with_context(|| format!("cannot work with {name}"))?;
        tokio::spawn(forward_reports(reports, index, events));
        Ok(Self { name, orders: Box::new(orders), process: None })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Sends an order.
    ///
    /// # Errors
    /// When the worker is gone, or reads nothing until the deadline.
    pub(crate) async fn send(&mut self, order: &Order) -> Result<()> {
        match timeout(SEND_TIMEOUT, wire::send(&mut self.orders, order)).await {
            Ok(sent) => sent.with_context(|| format!("{} accepts no more orders", self.name)),
            Err(_) => bail!("{} accepted no order within {} s", self.name, SEND_TIMEOUT.as_secs()),
        }
    }

    /// The reason why the worker's connection ended, as a sentence for an error.
    pub(crate) async fn end_reason(&mut self) -> String {
        match &mut self.process {
            Some(process) => format!("it {}", process.end_reason().await),
            None => "its node closed the connection; see the standard error of that node".into(),
        }
    }
}

/// Forwards the reports of a worker to `events`, and finally the reason why they ended.
async fn forward_reports(
    mut lines: Lines<impl AsyncRead + Unpin>,
    index: usize,
    events: mpsc::Sender<Event>,
) {
    loop {
        let report = match lines.next::<Report>().await {
            Ok(Some(report)) => Ok(report),
            Ok(None) => Err(Disconnected::Ended),
            Err(error) => Err(error.into()),
        };
        let is_last = report.is_err();
        if events.send((index, report)).await.is_err() || is_last {
            return;
        }
    }
}
