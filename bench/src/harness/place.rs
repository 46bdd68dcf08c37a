//! The place where the processes of a run are started: a network on this machine, or other hosts.

use super::contenders::{Contender, SideCommand};
use crate::{
    contender::Ready,
    network::{Network, NetworkArgs, Side},
    process::{EXIT_ON_STDIN_EOF, Process},
    program::Program,
};
use anyhow::{Context, Result};
use serde::Serialize;
use std::{ffi::OsString, fmt, num::ParseIntError, process::Stdio, str::FromStr};
use tensor_relay_client::Ticket;

/// The description of the network between the two sides, which the result file records.
#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
pub(crate) enum Over {
    /// A network on this machine.
    Local(NetworkArgs),
    /// The network between hosts.
    Hosts(Hosts),
}

/// The hosts on which the processes run.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Hosts {
    /// The program that runs the benchmark's subcommands on the producer's host, e.g. `ssh host-a tensor-relay bench`.
    #[serde(skip)]
    pub(crate) producer: Program,
    /// The same of each consumer.
    #[serde(rename = "nodes", serialize_with = "count")]
    pub(crate) consumers: Vec<Program>,
    #[serde(skip)]
    pub(crate) serve_at: ServeAt,
}

/// `HOST[:PORT]` at which consumers reach a producer on another host. The host is a name, an IPv4 address or an IPv6
/// address in brackets. Without a port, the producer's system chooses one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServeAt {
    host: String,
    port: u16,
}

/// A place, ready to start processes.
pub(crate) enum Place {
    Local(Box<Network>),
    Hosts(Hosts),
}

/// A process of a run.
#[derive(Debug, Clone, Copy)]
pub(super) enum Role {
    Server,
    /// The receiver with this number, from 0.
    Receiver(u32),
}

impl Place {
    /// Creates the network, unless there are hosts. `this` is the running program.
    ///
    /// # Errors
    /// When a tool or the privilege to use it is missing.
    pub(super) async fn new(over: &Over, this: &Program) -> Result<Self> {
        Ok(match over {
            Over::Local(network) => Self::Local(Box::new(Network::new(network, this).await?)),
            Over::Hosts(hosts) => Self::Hosts(hosts.clone()),
        })
    }

    /// Starts a process of `contender` as `role`. `options` follow the arguments of its side.
    ///
    /// # Errors
    /// When it cannot be started.
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
                Process::start(name, command, Stdio::piped())
            }
            Self::Hosts(hosts) => {
                let program = match role {
                    Role::Server => Some(&hosts.producer),
                    Role::Receiver(number) => hosts.consumers.get(number as usize),
                };
                let program = program.with_context(|| format!("{name} has no host"))?;
                if let Role::Server = role {
                    options.push(hosts.serve_at.listen_option());
                }
                let mut command = program.command();
                command.arg(SIDE);
                let mut process = Process::start(format!("{name} ({program})"), command, Stdio::piped())?;
                let words = side.arguments.iter().chain(&options).map(|word| word.to_string_lossy());
                process.send(&serde_json::to_string(&words.collect::<Vec<_>>())?).await?;
                Ok(process)
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
            (Self::Hosts(Hosts { serve_at, .. }), ticket) => {
                // A server that listens on all addresses does not know which of them the consumers reach.
                let (address, ticket) =
                    (format!("{}:{}", serve_at.host, ready.port), ticket.context("it has no ticket")?);
                let ticket = Ticket::new(vec![address], ticket.keys().to_vec(), ticket.topic().cloned())?;
                format!("--ticket={ticket}").into()
            }
        })
    }
}

/// The subcommand that reads the arguments of a side from its standard input, as JSON: a shell of another host would
/// expand them.
pub(crate) const SIDE: &str = "side";

impl ServeAt {
    /// The option with which a producer listens on all addresses.
    fn listen_option(&self) -> OsString {
        let all = if self.host.starts_with('[') { "[::]" } else { "0.0.0.0" };
        format!("--listen={all}:{}", self.port).into()
    }
}

impl FromStr for ServeAt {
    type Err = ParseIntError;

    fn from_str(text: &str) -> Result<Self, ParseIntError> {
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) if !host.contains(':') || host.ends_with(']') => (host, port.parse()?),
            _ => (text, 0),
        };
        Ok(Self { host: host.into(), port })
    }
}

impl fmt::Display for Over {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local(network) => network.fmt(f),
            Self::Hosts(hosts) => {
                write!(f, "the network between a host and the consumers on others: {}", hosts.consumers.len())
            }
        }
    }
}

fn count<S: serde::Serializer>(hosts: &[Program], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(hosts.len() as u64)
}
