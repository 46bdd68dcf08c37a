//! The agent of `bench run` on another host: `bench node` waits for connections of a driver and starts the processes
//! that it orders.
//!
//! A node accepts drivers that know its token. A connection starts one process, a side of a job
//! ([`relay`](crate::relay)), of which it is the standard input and output: the driver reads the same lines as from a
//! process on its own machine.

mod address;
mod greeting;
mod token;

pub use address::{NodeAddress, NodeAddressError};
pub use token::{Token, TokenError};

use crate::{
    process::EXIT_ON_STDIN_EOF,
    program::Program,
    wire::{self, LINE_MAX_BYTES, Lines},
};
use anyhow::{Context, Result, ensure};
use socket2::{SockRef, TcpKeepalive};
use std::{
    io::Write,
    net::SocketAddr,
    os::fd::OwnedFd,
    process::{ExitStatus, Stdio},
    time::Duration,
};
use tokio::{
    io::AsyncRead,
    net::{TcpListener, TcpStream, tcp::OwnedWriteHalf},
    task::JoinSet,
    time::timeout,
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

/// The maximum number of open connections of a node, including those that processes use. Further connections are closed
/// at once.
const CONNECTIONS_MAX: usize = 64;

/// The TCP keep-alive time and interval, which detect a lost driver.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_RETRIES: u32 = 3;

/// The pause after a failure to accept a connection, e.g. for lack of file descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(200);

/// Accepts drivers and starts a process for each connection, until a signal ends the node.
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
                Ok(status) => eprintln!("{peer}: the process ended with {status}; its message is above"),
                Err(error) => eprintln!("{peer}: {error:#}"),
            }
        });
    }
}

/// The settings of a node, for all connections.
#[derive(Clone)]
struct Node {
    token: Token,
    /// This program, which is started again for each connection.
    program: Program,
    /// The address on which a producer serves.
    data_address: SocketAddr,
}

impl Node {
    /// Authenticates the driver, starts the process that it orders, and waits until that exits.
    async fn serve(&self, mut stream: TcpStream) -> Result<ExitStatus> {
        stream.set_nodelay(true)?;
        let keepalive = TcpKeepalive::new()
            .with_time(KEEPALIVE_INTERVAL)
            .with_interval(KEEPALIVE_INTERVAL);
        SockRef::from(&stream).set_tcp_keepalive(&keepalive.with_retries(KEEPALIVE_RETRIES))?;
        let (mut reader, mut writer) = stream.split();
        greeting::authenticate(&mut reader, &mut writer, &self.token).await?;
        // The driver sends nothing after the order, so dropping the buffer loses nothing.
        let order = timeout(STEP_TIMEOUT, Lines::new(reader, LINE_MAX_BYTES).next::<Vec<String>>()).await;
        let order = order.context("it ordered nothing")??.context("it closed the connection")?;
        let mut process = self.start(stream, &order).context("cannot start a process")?;
        Ok(process.wait().await?)
    }

    /// Starts this program with the arguments in `order`. Its standard input and output are the connection to the driver.
    fn start(&self, stream: TcpStream, order: &[String]) -> Result<tokio::process::Child> {
        let side = order.get(..2).unwrap_or_default();
        let (publishes, follows) = (side == PUBLISH, side == FOLLOW);
        ensure!(publishes || follows, "{side:?} is no side of a job");
        let stream = stream.into_std()?;
        stream.set_nonblocking(false)?;
        let (input, output) = (OwnedFd::from(stream.try_clone()?), OwnedFd::from(stream));
        let mut command = self.program.command();
        command.arg(EXIT_ON_STDIN_EOF).args(order);
        command.args(publishes.then(|| format!("--listen={}", self.data_address)));
        command.stdin(Stdio::from(input)).stdout(Stdio::from(output)).kill_on_drop(true);
        Ok(command.spawn()?)
    }
}

/// Makes the node at `address` start this program with `arguments`, which begin with [`PUBLISH`] or [`FOLLOW`]. Returns
/// the lines of the process; dropping the other end ends it.
///
/// # Errors
/// When no node listens there, or the greeting fails, e.g. because the node refuses `token`.
pub(crate) async fn order(
    address: &NodeAddress,
    token: &Token,
    arguments: &[String],
) -> Result<(Lines<Box<dyn AsyncRead + Send + Unpin>>, OwnedWriteHalf)> {
    let connected = timeout(STEP_TIMEOUT, TcpStream::connect(address.to_string())).await;
    let stream = connected
        .with_context(|| format!("no answer over TCP within {} s", STEP_TIMEOUT.as_secs()))?
        .context("is `bench node` running there, and its TCP port published?")?;
    stream.set_nodelay(true)?;
    let (reader, mut writer) = stream.into_split();
    let lines = greeting::prove_token(Box::new(reader) as _, &mut writer, token).await?;
    timeout(STEP_TIMEOUT, wire::send(&mut writer, &arguments))
        .await
        .context("it accepts no order")??;
    Ok((lines, writer))
}

/// The subcommands of the two sides of a job.
pub(crate) const PUBLISH: [&str; 2] = ["relay", "publish"];
pub(crate) const FOLLOW: [&str; 2] = ["relay", "follow"];

/// The deadline of connecting, and of an order.
const STEP_TIMEOUT: Duration = Duration::from_secs(10);
