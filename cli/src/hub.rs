//! `tensor-relay hub`: topics as repositories of Hugging Face's hub, for clients that know nothing of tensor-relay.
//!
//! A topic is a model, a version is a commit. Files are computed from the manifest; their bytes are received in blocks when
//! a client reads them, and kept in bounded memory for the next reader. Nothing is written to disk.

mod access;
mod blocks;
mod body;
mod connections;
mod describing;
mod failure;
mod names;
mod origin;
mod range;
mod recent;
mod routes;
mod service;
mod version;
mod versions;

pub(crate) use names::is_repo_id;

use crate::{
    args::{HubArgs, HubOptions},
    exit::Exit,
    output::print_json,
    signals::Signals,
};
use access::Access;
use anyhow::Context;
use origin::Origin;
use service::Service;
use std::{net::SocketAddr, sync::Arc, time::Duration};
use tensor_relay_client::{Config, Ticket};
use tokio::net::TcpListener;

pub(crate) async fn run(args: HubArgs) -> anyhow::Result<Exit> {
    let (tickets, connection) = (args.origins.read()?, &args.origins.connection);
    let mut signals = Signals::listen()?;
    let identity = connection.identity.load()?;
    let config = Config { transport: args.transport, identity, ..Config::default() };
    let hub = Hub::open(args.listen, &args.options, (tickets, config, connection.connect_timeout));
    let hub = tokio::select! {
        hub = hub => hub?,
        exit = signals.next() => return Ok(exit),
    };
    tokio::select! {
        reported = hub.report(args.json) => reported?,
        exit = signals.next() => return Ok(exit),
    }
    tokio::select! {
        () = hub.run() => Ok(Exit::Done),
        exit = signals.next() => Ok(exit),
    }
}

/// A hub that listens. Dropping it closes its port; connections end with the process.
#[derive(Debug)]
pub(crate) struct Hub {
    listener: TcpListener,
    address: SocketAddr,
    service: Arc<Service>,
}

impl Hub {
    /// Listens at `address`, and connects to the servers of `tickets` with this configuration and this deadline.
    ///
    /// # Errors
    /// When the address cannot be bound, the token is not usable, or a server is not reached.
    pub(crate) async fn open(
        address: SocketAddr,
        options: &HubOptions,
        (tickets, config, connect_timeout): (Vec<Ticket>, Config, Duration),
    ) -> anyhow::Result<Self> {
        let access = Access::new(address.ip(), options)?;
        let listener = TcpListener::bind(address).await;
        let listener = listener.with_context(|| format!("the hub cannot listen on {address}"))?;
        let address = listener.local_addr()?;
        let mut origins = vec![];
        for ticket in tickets {
            origins.push(Arc::new(Origin::open(ticket, config.clone(), connect_timeout).await?));
        }
        let names = options.hub_repo.iter().cloned().collect();
        let service = Arc::new(Service::new(access, origins, names, options.hub_mem));
        Ok(Self { listener, address, service })
    }

    /// Prints how clients use the hub, and what it has.
    ///
    /// # Errors
    /// When no server tells its topics.
    pub(crate) async fn report(&self, as_json: bool) -> anyhow::Result<()> {
        let repos = self.service.repos().await?;
        let (address, token) = (format!("http://{}", self.address), self.service.access.token());
        if as_json {
            print_json(&service::started(&address, token, &repos));
            return Ok(());
        }
        let names: Vec<&str> = repos.keys().map(String::as_str).collect();
        crate::log::message!(
            "models: {}",
            if names.is_empty() { "none yet".into() } else { names.join(", ") }
        );
        crate::log::message!("clients of Hugging Face's hub use them with");
        let token = token.map_or_else(String::new, |token| format!(" HF_TOKEN={token}"));
        crate::output::print_line(&format!("export HF_ENDPOINT={address} HF_HUB_DISABLE_XET=1{token}"));
        Ok(())
    }

    /// Answers requests. Never returns.
    pub(crate) async fn run(self) {
        connections::accept(self.listener, self.service).await;
    }
}
