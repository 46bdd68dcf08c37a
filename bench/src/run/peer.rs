//! One worker, as the driver speaks to it.

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
const CONNECT_MAX: Duration = Duration::from_secs(10);

/// The deadline for writing an order to a worker.
const TELL_MAX: Duration = Duration::from_secs(10);

/// A worker, here or behind a node. Dropping it ends its work: a process here is killed, and one on another machine ends
/// when the connection does.
pub(crate) struct Peer {
    /// For messages: `producer`, or `consumer 2 (10.0.0.7:4748)`.
    name: String,
    orders: Box<dyn AsyncWrite + Send + Unpin>,
    process: Option<Process>,
}

/// An event of a worker: a message, or its end.
pub(crate) type Heard = (usize, Result<Report, Silence>);

/// Why nothing more comes from a worker.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Silence {
    #[error("it ended")]
    Ended,
    #[error(transparent)]
    Wire(#[from] wire::WireError),
}

impl Peer {
    /// Starts a worker on this machine; `command` names it. What it says goes to `heard`, as number `index`.
    ///
    /// # Errors
    /// When it cannot be started.
    pub(crate) fn start(
        name: String,
        command: Command,
        index: usize,
        heard: mpsc::Sender<Heard>,
    ) -> Result<Self> {
        let mut process = Process::start(name.clone(), command)?;
        let (orders, reports) = process.split()?;
        tokio::spawn(listen(reports, index, heard));
        Ok(Self { name, orders: Box::new(orders), process: Some(process) })
    }

    /// Connects to the node at `address`, which starts a worker.
    ///
    /// # Errors
    /// When no node is there, or it does not let in who knows `token`.
    pub(crate) async fn connect(
        role: &str,
        address: &NodeAddress,
        token: &Token,
        index: usize,
        heard: mpsc::Sender<Heard>,
    ) -> Result<Self> {
        let name = format!("{role} ({address})");
        let Ok(connected) = timeout(CONNECT_MAX, TcpStream::connect(address.to_string())).await else {
            bail!("cannot reach {name}: no answer over TCP within {} s", CONNECT_MAX.as_secs());
        };
        let stream = connected.with_context(|| {
            format!("cannot reach {name}: is `bench node` running there, and its TCP port published?")
        })?;
        stream.set_nodelay(true)?;
        let (reports, mut orders) = stream.into_split();
        let greeted = greeting::ask(reports, &mut orders, token).await;
        let reports = greeted.with_context(|| format!("cannot work with {name}"))?;
        tokio::spawn(listen(reports, index, heard));
        Ok(Self { name, orders: Box::new(orders), process: None })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Gives an order.
    ///
    /// # Errors
    /// When the worker is gone, or takes nothing in.
    pub(crate) async fn tell(&mut self, order: &Order) -> Result<()> {
        match timeout(TELL_MAX, wire::send(&mut self.orders, order)).await {
            Ok(told) => told.with_context(|| format!("{} takes no orders any more", self.name)),
            Err(_) => bail!("{} took no order in within {} s", self.name, TELL_MAX.as_secs()),
        }
    }

    /// The error for a worker whose connection has ended.
    pub(crate) async fn obituary(&mut self) -> String {
        match &mut self.process {
            Some(process) => format!("it {}", process.obituary().await),
            None => {
                "its node closed the connection; look at what that node says on its standard error".into()
            }
        }
    }
}

/// Passes on what a worker says, until it says nothing more.
async fn listen(mut lines: Lines<impl AsyncRead + Unpin>, index: usize, heard: mpsc::Sender<Heard>) {
    loop {
        let said = match lines.next::<Report>().await {
            Ok(Some(report)) => Ok(report),
            Ok(None) => Err(Silence::Ended),
            Err(error) => Err(error.into()),
        };
        let is_last = said.is_err();
        if heard.send((index, said)).await.is_err() || is_last {
            return;
        }
    }
}
