//! The agent of `bench run` on another host: `bench node` waits for connections of a driver and starts workers for
//! them.
//!
//! A node only authenticates: it accepts drivers that know its token, and passes each connection to a worker, a process
//! of its own (module `worker`). On its own machine the driver starts the same workers without a node. In both cases
//! the driver and the worker exchange lines of JSON (module `order`).

mod consumer;
mod driver_link;
mod generator;
pub(crate) mod greeting;
pub(crate) mod latency;
pub(crate) mod load;
mod memory;
pub(crate) mod order;
mod producer;
mod snapshot_hash;
mod stream_content;
pub(crate) mod token;
pub(crate) mod worker;

pub use load::Model;
pub use order::Hold;
pub use token::{Token, TokenError};
pub use worker::WorkerArgs;

use crate::program::Program;
use anyhow::{Context, Result};
use socket2::{SockRef, TcpKeepalive};
use std::{
    io::Write,
    net::SocketAddr,
    os::fd::OwnedFd,
    process::{ExitStatus, Stdio},
    time::Duration,
};
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

/// The options of a node.
#[derive(Debug, Clone, clap::Args)]
pub struct NodeArgs {
    /// The TCP address to listen on for a driver. A producer serves its tensors on the same IP address.
    #[arg(long, default_value_t = SocketAddr::from(([0, 0, 0, 0], PORT)))]
    pub listen: SocketAddr,
    /// The port on which a producer serves; 0 lets the system choose. Set it where ports have to be published.
    #[arg(long, default_value_t = 0)]
    pub data_port: u16,
    /// The token that a driver must know, of 8 characters or more. By default a random token is made and printed.
    #[arg(long, env = TOKEN_VARIABLE, hide_env_values = true)]
    pub token: Option<Token>,
}

/// The default TCP port of a node.
pub const PORT: u16 = 4748;

/// The environment variable of the token. All users of a machine can read command lines, but not the environment.
pub const TOKEN_VARIABLE: &str = "TENSOR_RELAY_BENCH_TOKEN";

/// The maximum number of open connections of a node, including those that workers use. Further connections are closed
/// at once.
const CONNECTIONS_MAX: usize = 64;

/// The TCP keep-alive time and interval, which detect a lost driver.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_RETRIES: u32 = 3;

/// The pause after a failure to accept a connection, e.g. for lack of file descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(200);

/// Accepts drivers and starts a worker for each connection, until a signal ends the node.
///
/// Prints a line once it listens, with the token if it was generated.
///
/// # Errors
/// When it cannot listen. An error of one connection is printed to standard error, and affects no other connection.
pub async fn run(args: NodeArgs, this: &Program) -> Result<()> {
    let listener = TcpListener::bind(args.listen).await;
    let listener = listener.with_context(|| format!("cannot listen on {} (TCP)", args.listen))?;
    let is_generated = args.token.is_none();
    let node = Node {
        token: args.token.unwrap_or_else(Token::random),
        program: this.clone(),
        data_address: SocketAddr::new(args.listen.ip(), args.data_port),
    };
    let shown = if is_generated { format!(", token {}", node.token.reveal()) } else { String::new() };
    writeln!(std::io::stdout(), "tensor-relay bench node listens on {}{shown}", listener.local_addr()?)?;
    let mut connections = JoinSet::new();
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                eprintln!("cannot accept a connection: {error}");
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                continue;
            }
        };
        while connections.try_join_next().is_some() {}
        if connections.len() >= CONNECTIONS_MAX {
            eprintln!("{peer} was refused: {CONNECTIONS_MAX} connections are open");
            continue;
        }
        let node = node.clone();
        connections.spawn(async move {
            match node.serve(stream).await {
                Ok(status) if status.success() => eprintln!("{peer}: done"),
                Ok(status) => eprintln!("{peer}: the worker ended with {status}; its message is above"),
                Err(error) => eprintln!("{peer}: {error:#}"),
            }
        });
    }
}

/// The settings of a node, for all connections.
#[derive(Clone)]
struct Node {
    token: Token,
    /// This program, which is started again for each worker.
    program: Program,
    /// The address on which a producer serves.
    data_address: SocketAddr,
}

impl Node {
    /// Authenticates the driver, starts a worker for it, and waits until the worker exits.
    async fn serve(&self, mut stream: TcpStream) -> Result<ExitStatus> {
        stream.set_nodelay(true)?;
        let keepalive = TcpKeepalive::new()
            .with_time(KEEPALIVE_INTERVAL)
            .with_interval(KEEPALIVE_INTERVAL);
        SockRef::from(&stream).set_tcp_keepalive(&keepalive.with_retries(KEEPALIVE_RETRIES))?;
        let (mut reader, mut writer) = stream.split();
        greeting::authenticate(&mut reader, &mut writer, &self.token).await?;
        let mut worker = self.start_worker(stream).context("cannot start a worker")?;
        Ok(worker.wait().await?)
    }

    /// Starts a worker whose standard input and output are the connection to the driver.
    fn start_worker(&self, stream: TcpStream) -> Result<tokio::process::Child> {
        let stream = stream.into_std()?;
        stream.set_nonblocking(false)?;
        let (input, output) = (OwnedFd::from(stream.try_clone()?), OwnedFd::from(stream));
        let mut command = self.program.command();
        command.arg(WORKER).arg(format!("--data={}", self.data_address));
        command.stdin(Stdio::from(input)).stdout(Stdio::from(output)).kill_on_drop(true);
        Ok(command.spawn()?)
    }
}

/// The subcommand of a worker.
pub(crate) const WORKER: &str = "worker";
