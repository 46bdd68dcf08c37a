//! The admin port: status and metrics of a running server or consumer over HTTP, for operators.
//!
//! `/livez`, `/readyz`, `/metrics`, `/status` and a page for people. It has a thread and a runtime of its own: a scrape
//! costs the thread that moves tensors only the few locks of a snapshot, and `/livez` can report that it hangs.

mod access;
mod address;
mod classic;
mod connections;
mod consumer;
mod events;
mod families;
mod heartbeat;
mod memory;
mod routes;
mod server;
mod server_families;
mod server_status;

pub(crate) use address::{AdminArgs, ReadyArgs};
pub use consumer::{Consumer, FollowedTopic};
pub(crate) use events::remember;
pub(crate) use memory::DeviceMemory;
pub(crate) use server::ServerSubject;

use crate::exit::UsageError;
use access::Access;
use address::{Admin, DEFAULT};
use anyhow::Context;
use families::Family;
use heartbeat::Heartbeat;
use serde_json::Value;
use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
    path::Path,
    sync::Arc,
    thread::JoinHandle,
};
use tensor_relay_device::Device;
use tensor_relay_server::StatusReader;
use tokio::sync::oneshot;

/// The address of the page of an admin port on `address`, as a browser on this machine takes it.
pub(crate) fn page_url(mut address: SocketAddr) -> String {
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    format!("http://{address}/")
}

/// The process observed through the port.
pub(crate) trait Subject: Send + Sync + 'static {
    /// Whether it is ready for its task.
    ///
    /// # Errors
    /// Why it is not ready, as half a sentence.
    fn readiness(&self) -> Result<(), String>;

    /// Its status as JSON.
    fn status(&self) -> Value;

    /// Its metrics.
    fn families(&self) -> Vec<Family>;
}

/// A bound admin port. Requests wait until it [serves](Self::serve).
#[derive(Debug)]
pub(crate) struct Bound {
    listener: TcpListener,
    access: Access,
}

impl Bound {
    /// Binds the port in `args`; without one, the default port on loopback if it `is_usual` to have one. `None` if
    /// there is to be none, or the default port is taken, which is logged.
    ///
    /// # Errors
    /// When the requested port cannot be bound, or would be open to others without a token.
    pub(crate) fn new(args: &AdminArgs, is_usual: bool) -> anyhow::Result<Option<Self>> {
        match args.admin {
            Some(Admin::None) => Ok(None),
            Some(Admin::At(address)) => {
                let access = Access::new(address.ip(), args.admin_token_file.as_deref())?;
                let listener = TcpListener::bind(address).with_context(|| {
                    format!("cannot listen on {address}: choose another address with --admin")
                })?;
                Ok(Some(Self { listener, access }))
            }
            None if args.admin_token_file.is_some() && !is_usual => {
                Err(UsageError("--admin-token-file means nothing without --admin ADDR:PORT".into()).into())
            }
            None if is_usual => Self::usual(args),
            None => Ok(None),
        }
    }

    fn usual(args: &AdminArgs) -> anyhow::Result<Option<Self>> {
        let access = Access::new(DEFAULT.ip(), args.admin_token_file.as_deref())?;
        match TcpListener::bind(DEFAULT) {
            Ok(listener) => Ok(Some(Self { listener, access })),
            Err(error) => {
                tracing::info!(
                    %error,
                    "There is no admin port: {DEFAULT} cannot be had. --admin 127.0.0.1:PORT takes another one."
                );
                Ok(None)
            }
        }
    }

    /// The local address.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.listener.local_addr().ok()
    }

    /// Answers requests about `subject` until the port is dropped. Call it on the runtime that `/livez` watches.
    ///
    /// # Errors
    /// When no thread can be started.
    pub(crate) fn serve(self, subject: impl Subject) -> anyhow::Result<AdminPort> {
        let address = self.listener.local_addr()?;
        let (stop, stopped) = oneshot::channel::<()>();
        let heartbeat = Heartbeat::begin();
        let routes = routes::of(Arc::new(subject), heartbeat, self.access);
        self.listener.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let serve = move || {
            runtime.block_on(async {
                match tokio::net::TcpListener::from_std(self.listener) {
                    Ok(listener) => tokio::select! {
                        () = connections::accept(listener, routes) => {}
                        _ = stopped => {}
                    },
                    Err(error) => tracing::error!(%error, "The admin port cannot be used."),
                }
            });
        };
        let thread = std::thread::Builder::new().name("admin".into()).spawn(serve)?;
        Ok(AdminPort { address, running: Some((stop, thread)) })
    }
}

/// An admin port that answers requests on a thread of its own. Dropping it closes the port, which is free afterwards.
#[derive(Debug)]
pub struct AdminPort {
    address: SocketAddr,
    /// What stops the thread, and the thread; taken when this is dropped.
    running: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
}

impl Drop for AdminPort {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.running.take() {
            drop(stop);
            // A request that is being answered takes milliseconds; a panic was told when it happened.
            let _ = thread.join();
        }
    }
}

impl AdminPort {
    /// Opens an admin port for a server of this process, as `tensor-relay serve --admin` does; without a port in `address`, on
    /// one that is free. Call it on the server's runtime. `/readyz` says 200 until the server drains; the list of events stays
    /// empty, since they are of the command line's log.
    ///
    /// # Errors
    /// When the address cannot be bound, or is not loopback and `token_file` is none, cannot be read or is open to others.
    pub fn for_server(
        address: SocketAddr,
        token_file: Option<&Path>,
        server: StatusReader,
        device: Option<&Device>,
    ) -> anyhow::Result<Self> {
        let subject = ServerSubject { reader: server, wanted: vec![], device: DeviceMemory::of(device) };
        Self::open(address, token_file, subject)
    }

    /// The same for a consumer of this process, as `tensor-relay subscribe --admin` does. Call it on the client's runtime.
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
        let bound = Bound::new(&args, true)?.context("an address was asked for")?;
        bound.serve(subject)
    }

    /// The address that it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}
