//! The admin port: status and metrics of a running server or consumer over HTTP, for operators.
//!
//! It serves `/livez`, `/readyz`, `/metrics`, `/status` and a status page on its own thread and runtime, for two
//! reasons: a scrape delays the network thread only by the few locks that reading the status takes, and `/livez` can
//! report that the network thread hangs.

mod access;
mod address;
mod connections;
mod consumer;
mod events;
mod heartbeat;
mod memory;
mod metrics;
mod routes;
mod server;

pub(crate) use address::{AdminArgs, ReadyArgs};
pub use consumer::{Consumer, FollowedTopic};
pub(crate) use events::recorder;
pub(crate) use memory::DeviceMemory;
pub(crate) use metrics::Part;
pub(crate) use server::ServerSubject;

use crate::exit::UsageError;
use access::Access;
use address::{Admin, DEFAULT};
use anyhow::{Context, bail};
use heartbeat::Heartbeat;
use serde_json::{Value, json};
use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
    path::Path,
    sync::Arc,
    thread::JoinHandle,
};
use tensor_relay_device::Device;
use tensor_relay_server::{LaneKind, LaneStats, StatusReader};
use tokio::sync::oneshot;

/// The URL of the status page on `address`, for a browser on this machine.
pub(crate) fn page_url(mut address: SocketAddr) -> String {
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    format!("http://{address}/")
}

/// The server or consumer that an admin port reports on.
pub(crate) trait Subject: Send + Sync + 'static {
    /// Whether the subject is ready for its task.
    ///
    /// # Errors
    /// The reason why not, as a clause.
    fn readiness(&self) -> Result<(), String>;

    /// The status as a JSON object.
    fn status(&self) -> Value;

    /// The metrics: what Prometheus reads in the status.
    fn metrics(&self) -> &'static [Part];
}

/// The status of a lane.
fn lane(transport: LaneKind, stats: &LaneStats) -> Value {
    json!({
        "transport": transport.name(),
        "rtt_s": stats.rtt.as_secs_f64(),
        "udp_payload_bytes": stats.udp_payload_bytes,
        "sent_bytes": stats.sent_bytes,
        "received_bytes": stats.received_bytes,
        "sent_packets": stats.sent_packets,
        "lost_packets": stats.lost_packets,
    })
}

/// A bound admin port. Requests wait until [`serve`](Self::serve) is called.
pub(crate) struct BoundPort {
    listener: TcpListener,
    access: Access,
}

impl BoundPort {
    /// Binds the address of `--admin`. Without `--admin`, binds the default port on loopback if the command
    /// `has_default`. Returns `None` with `--admin none`, for a command without a default, and if the default port
    /// cannot be bound, which is logged.
    ///
    /// # Errors
    /// When the requested port cannot be bound, would be open to other machines without a token, or has an invalid
    /// token file; and for a token file without a port.
    pub(crate) fn new(args: &AdminArgs, has_default: bool) -> anyhow::Result<Option<Self>> {
        let (address, is_requested) = match args.admin {
            Some(Admin::At(address)) => (address, true),
            None if has_default => (DEFAULT, false),
            None if args.admin_token_file.is_some() => {
                bail!(UsageError("--admin-token-file requires --admin ADDR:PORT".into()))
            }
            Some(Admin::None) | None => return Ok(None),
        };
        let access = Access::new(address.ip(), args.admin_token_file.as_deref())?;
        match TcpListener::bind(address) {
            Ok(listener) => Ok(Some(Self { listener, access })),
            Err(error) if is_requested => Err(error)
                .with_context(|| format!("cannot listen on {address}: choose another address with --admin")),
            Err(error) => {
                tracing::info!(
                    %error,
                    "No admin port is open, because {address} cannot be bound. Choose another port with --admin \
                     127.0.0.1:PORT."
                );
                Ok(None)
            }
        }
    }

    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.listener.local_addr().ok()
    }

    /// Answers requests about `subject` until the port is dropped. Must be called on the runtime that `/livez` watches.
    ///
    /// # Errors
    /// When no thread can be started.
    pub(crate) fn serve(self, subject: impl Subject) -> anyhow::Result<AdminPort> {
        let address = self.listener.local_addr()?;
        let (stop, stopped) = oneshot::channel::<()>();
        let heartbeat = Heartbeat::start();
        let routes = routes::Routes::new(Arc::new(subject), heartbeat, self.access);
        self.listener.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let serve = move || {
            runtime.block_on(async {
                match tokio::net::TcpListener::from_std(self.listener) {
                    Ok(listener) => tokio::select! {
                        () = connections::accept(listener, routes) => {}
                        _ = stopped => {}
                    },
                    Err(error) => tracing::error!(%error, "Cannot serve the admin port."),
                }
            });
        };
        let thread = std::thread::Builder::new().name("admin".into()).spawn(serve)?;
        Ok(AdminPort { address, running: Some((stop, thread)) })
    }
}

/// An admin port that answers requests on its own thread. Dropping it closes the port; the address can be bound
/// again afterwards.
#[derive(Debug)]
pub struct AdminPort {
    address: SocketAddr,
    /// The stop signal of the thread, and its handle; `None` only during drop.
    running: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
}

impl Drop for AdminPort {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.running.take() {
            drop(stop);
            // A request in progress takes milliseconds; the panic hook has reported any panic.
            let _ = thread.join();
        }
    }
}

impl AdminPort {
    /// Opens an admin port for a server of this process, as `tensor-relay serve --admin` does. Port 0 selects a free
    /// port. Must be called on the server's runtime. `/readyz` returns 200 until the server drains; the list of events
    /// stays empty, since only the log of the command line records events.
    ///
    /// # Errors
    /// When the address cannot be bound, when it is not loopback and `token_file` is `None`, and when the token file
    /// cannot be read or its token is invalid.
    pub fn for_server(
        address: SocketAddr,
        token_file: Option<&Path>,
        server: StatusReader,
        device: Option<&Device>,
    ) -> anyhow::Result<Self> {
        let subject = ServerSubject { reader: server, topics: vec![], device: DeviceMemory::of(device) };
        Self::open(address, token_file, subject)
    }

    /// Opens an admin port for a consumer of this process, as `tensor-relay subscribe --admin` does. Must be called on
    /// the client's runtime.
    ///
    /// # Errors
    /// As [`for_server`](Self::for_server).
    pub fn for_consumer(
        address: SocketAddr,
        token_file: Option<&Path>,
        consumer: Consumer,
    ) -> anyhow::Result<Self> {
        Self::open(address, token_file, consumer)
    }

    fn open(address: SocketAddr, token_file: Option<&Path>, subject: impl Subject) -> anyhow::Result<Self> {
        let args =
            AdminArgs { admin: Some(Admin::At(address)), admin_token_file: token_file.map(Path::to_owned) };
        let bound = BoundPort::new(&args, true)?.context("an address is given, so a port is bound")?;
        bound.serve(subject)
    }

    /// The address that the port listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}
