//! The admin port: what a running server or consumer tells those who run it, over HTTP.
//!
//! `/livez`, `/readyz`, `/metrics`, `/status` and a page for people. It has a thread and a runtime of its own: a scrape takes
//! nothing of the thread that moves tensors but the few locks of a snapshot, and `/livez` can tell that this thread hangs.

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
pub(crate) use consumer::Consumer;
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
    net::{SocketAddr, TcpListener},
    sync::Arc,
};

/// What is looked at through the port.
pub(crate) trait Subject: Send + Sync + 'static {
    /// Whether it does what it was started for.
    ///
    /// # Errors
    /// Why not, as half a sentence.
    fn readiness(&self) -> Result<(), String>;

    /// All that can be told of it.
    fn status(&self) -> Value;

    /// The same as metrics.
    fn families(&self) -> Vec<Family>;
}

/// An admin port that is bound. What asks waits until it [serves](Self::serve).
#[derive(Debug)]
pub(crate) struct Bound {
    listener: TcpListener,
    access: Access,
}

impl Bound {
    /// Binds what `args` ask for; without a word, the usual port of this machine alone where it `is_usual` to have one.
    /// `None` where there is to be none, or the usual port is taken: who did not ask for it does without, and is told.
    ///
    /// # Errors
    /// When the port that was asked for cannot be had, or would be open to others without a token.
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

    /// Where it listens.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.listener.local_addr().ok()
    }

    /// Answers questions about `subject` from now on, until the process ends. To be called on the runtime whose life
    /// `/livez` tells.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub(crate) fn serve(self, subject: impl Subject) -> anyhow::Result<()> {
        let heartbeat = Heartbeat::begin();
        let routes = routes::of(Arc::new(subject), heartbeat, self.access);
        self.listener.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let serve = move || {
            runtime.block_on(async {
                match tokio::net::TcpListener::from_std(self.listener) {
                    Ok(listener) => connections::accept(listener, routes).await,
                    Err(error) => tracing::error!(%error, "The admin port cannot be used."),
                }
            });
        };
        std::thread::Builder::new().name("admin".into()).spawn(serve)?;
        Ok(())
    }
}
