//! The place where the processes of a run are started: a network on this machine, or nodes on others.

use super::contenders::{Contender, SideCommand};
use crate::{
    contender::Ready,
    network::{Network, NetworkArgs, Side},
    node::{NodeAddress, Token},
    process::{EXIT_ON_STDIN_EOF, Process},
    program::Program,
};
use anyhow::{Context, Result};
use serde::Serialize;
use std::{ffi::OsString, fmt};
use tensor_relay_client::Ticket;

/// The description of the network between the two sides, which the result file records.
#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
pub(crate) enum Over {
    /// A network on this machine.
    Local(NetworkArgs),
    /// The network between the nodes.
    Nodes(Nodes),
}

/// The nodes on which the processes run.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Nodes {
    #[serde(skip)]
    pub(crate) producer: NodeAddress,
    /// One for each receiver.
    #[serde(rename = "nodes", serialize_with = "count")]
    pub(crate) consumers: Vec<NodeAddress>,
    #[serde(skip)]
    pub(crate) token: Token,
    /// The host at which consumers reach the producer, if it is not that of its node. The port is ignored.
    #[serde(skip)]
    pub(crate) serve_at: Option<NodeAddress>,
}

/// A place, ready to start processes.
pub(crate) enum Place {
    Local(Box<Network>),
    Nodes(Nodes),
}

/// A process of a run.
#[derive(Debug, Clone, Copy)]
pub(super) enum Role {
    Server,
    /// The receiver with this number, from 0.
    Receiver(u32),
}

impl Place {
    /// Creates the network, unless there are nodes. `this` is the running program.
    ///
    /// # Errors
    /// When a tool or the privilege to use it is missing.
    pub(super) async fn new(over: &Over, this: &Program) -> Result<Self> {
        Ok(match over {
            Over::Local(network) => Self::Local(Box::new(Network::new(network, this).await?)),
            Over::Nodes(nodes) => Self::Nodes(nodes.clone()),
        })
    }

    /// Starts a process of `contender` as `role`. `options` follow the arguments of its side.
    ///
    /// # Errors
    /// When it cannot be started, or a node does not accept this driver.
    pub(super) async fn start(
        &self,
        contender: &Contender,
        role: Role,
        side: &SideCommand,
        mut options: Vec<OsString>,
    ) -> Result<Process> {
        let name = contender.process_name(role);
        match self {
            Self::Local(network) => {
                let at = match role {
                    Role::Server => Side::Serving,
                    Role::Receiver(_) => Side::Receiving,
                };
                if let Role::Server = role {
                    options.push(format!("--listen={}:0", network.server_ip()).into());
                }
                let mut command = network.command(at, &side.program);
                command.envs(contender.environment()).arg(EXIT_ON_STDIN_EOF);
                command.args(&side.arguments).args(options);
                if let Some(folder) = &contender.folder {
                    command.current_dir(folder);
                }
                Process::start(name, command)
            }
            Self::Nodes(nodes) => {
                let address = match role {
                    Role::Server => Some(&nodes.producer),
                    Role::Receiver(number) => nodes.consumers.get(number as usize),
                };
                let address = address.with_context(|| format!("{name} has no node"))?;
                let arguments = side.arguments.iter().chain(&options);
                let arguments: Vec<String> = arguments.map(|word| word.to_string_lossy().into()).collect();
                Process::start_at(&name, address, &nodes.token, &arguments).await
            }
        }
    }

    /// The option by which receivers find the server that is `ready`.
    ///
    /// # Errors
    /// When its ticket is invalid, or a server on a node has none.
    pub(super) fn server_option(&self, ready: &Ready) -> Result<OsString> {
        let ticket: Option<Ticket> = ready.ticket.as_deref().map(str::parse).transpose()?;
        Ok(match (self, ticket) {
            (Self::Local(network), None) => {
                format!("--connect={}:{}", network.server_ip(), ready.port).into()
            }
            (Self::Local(_), Some(ticket)) => format!("--ticket={ticket}").into(),
            (Self::Nodes(nodes), ticket) => {
                // A server that listens on all addresses does not know which of them the consumers reach.
                let host = nodes.serve_at.as_ref().unwrap_or(&nodes.producer);
                let (address, ticket) = (host.with_port(ready.port), ticket.context("it has no ticket")?);
                let ticket =
                    Ticket::new(vec![address.to_string()], ticket.keys().to_vec(), ticket.topic().cloned())?;
                format!("--ticket={ticket}").into()
            }
        })
    }
}

impl fmt::Display for Over {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local(network) => network.fmt(f),
            Self::Nodes(nodes) => match nodes.consumers.len() {
                1 => write!(f, "the network between two nodes"),
                consumers => write!(f, "the network between a node and {consumers} consumers"),
            },
        }
    }
}

fn count<S: serde::Serializer>(nodes: &[NodeAddress], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(nodes.len() as u64)
}
