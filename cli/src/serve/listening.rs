//! Where `serve` listens, and the addresses that its tickets name.

use crate::args::{ListenArg, ServerArgs};
use anyhow::Context;
use std::{
    fmt,
    net::SocketAddr,
    path::{Path, PathBuf},
};
use tensor_relay_server::{
    Advertised, BindError, Identity, Listener, Server, SocketListener, Transport, Tuning, reachable,
};

/// Listens on the network, on the socket for this host, or on both.
pub(crate) fn open(args: &ServerArgs, identity: &Identity) -> anyhow::Result<Listener> {
    let transport = if args.no_tcp { Transport::Quic } else { args.transport };
    let network = match args.listen {
        ListenArg::Nowhere => None,
        ListenArg::On(address) => {
            let listener = Listener::bind_for(transport, address, identity, Tuning::default());
            Some(listener.map_err(add_listen_option)?)
        }
    };
    let socket = args.socket.socket.as_deref();
    let socket = socket.map(|path| open_socket(path, args.socket.socket_mode)).transpose()?;
    Ok(match (network, socket) {
        (Some(network), Some(socket)) => network.and_socket(socket),
        (Some(network), None) => network,
        (None, Some(socket)) => Listener::on_socket(socket, Tuning::default()),
        (None, None) => anyhow::bail!("--listen none requires --socket PATH"),
    })
}

/// Opens a socket for this host, with a file of these permissions.
pub(crate) fn open_socket(path: &Path, mode: u32) -> anyhow::Result<SocketListener> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Some(missing) = folder.filter(|folder| !folder.exists()) {
        anyhow::bail!(
            "cannot open the socket {}: create its folder {} first",
            path.display(),
            missing.display()
        );
    }
    SocketListener::bind(path, mode).context("cannot open the socket for clients of this host")
}

/// Adds the option `--listen` to the error of a port in use.
fn add_listen_option(error: BindError) -> anyhow::Error {
    match error {
        BindError::InUse { .. } => anyhow::anyhow!("{error} with --listen"),
        other => other.into(),
    }
}

/// Where a server listens.
pub(crate) struct Listening {
    /// The address on the network, if it is on one.
    pub(crate) network: Option<SocketAddr>,
    /// The absolute path of its socket.
    pub(crate) socket: Option<PathBuf>,
}

impl Listening {
    pub(crate) fn of(server: &Server) -> Self {
        let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.into());
        Self { network: server.network_address(), socket: server.socket_path().map(absolute) }
    }

    /// The addresses for tickets: those of `--advertise`, or else those that other hosts probably reach; without a
    /// network, the socket.
    pub(crate) fn advertised(&self, named: &[Advertised]) -> Vec<String> {
        let Some(network) = self.network else {
            return self.socket.iter().map(|path| format!("unix:{}", path.display())).collect();
        };
        if !named.is_empty() {
            return named.iter().map(|host| host.with_port(network.port())).collect();
        }
        let addresses = reachable(network);
        let named: Vec<String> = addresses.iter().map(SocketAddr::to_string).collect();
        let list = named.join(" and ");
        match network.ip().is_unspecified() {
            true if addresses.iter().all(|address| address.ip().is_loopback()) => crate::log::message!(
                "warning: this machine has no default route, so the tickets name {list}, which no other machine \
                 reaches; name the address that clients reach with --advertise"
            ),
            true => crate::log::message!(
                "advertising {list}, by this machine's default route; choose another address with --advertise"
            ),
            false => {}
        }
        named
    }
}

impl fmt::Display for Listening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let network = self.network.map(|address| address.to_string());
        let socket = self.socket.as_ref().map(|path| path.display().to_string());
        f.write_str(&network.into_iter().chain(socket).collect::<Vec<_>>().join(" and "))
    }
}
