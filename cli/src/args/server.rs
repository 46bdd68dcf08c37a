//! [`ServerArgs`]: the options that all servers have, `serve` and `relay`.

use crate::{admin::AdminArgs, units};
use clap::ValueEnum;
use std::{
    net::{AddrParseError, SocketAddr},
    path::PathBuf,
    str::FromStr,
    time::Duration,
};
use tensor_relay_server::{
    Advertised, Config, Keep, PeerDialling, PeerNetwork, TopicOptions, Transport, WhenFull,
};

/// The options of a server.
#[derive(Debug, clap::Args)]
pub(crate) struct ServerArgs {
    /// The number of versions retained for each topic, including the newest: for subscribers in mode `every`.
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Versions")]
    pub(crate) keep_versions: u32,

    /// The maximum size of the versions retained for each topic; the newest is always retained. Default: no limit.
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes, help_heading = "Versions")]
    pub(crate) keep_bytes: Option<u64>,

    /// What happens when retention is full of versions that a subscriber in mode `every` has not acknowledged.
    #[arg(long, value_enum, default_value_t = WhenFullArg::Evict, help_heading = "Versions")]
    pub(crate) when_full: WhenFullArg,

    /// With --when-full evict: how long a new version waits for acknowledgements before it evicts subscribers, in
    /// seconds.
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = units::parse_seconds, help_heading = "Versions")]
    pub(crate) publish_timeout: Duration,

    /// How long subscribers may take to finish a version that left retention, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = units::parse_seconds, help_heading = "Versions")]
    pub(crate) release_timeout: Duration,

    /// How long the place of a named subscriber in mode `every` is kept when its connection is lost, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = units::parse_seconds, help_heading = "Versions")]
    pub(crate) reader_linger: Duration,

    /// The address to listen on, over UDP and TCP. `[::]` is every address of IPv6 and IPv4, `0.0.0.0` every one of IPv4.
    /// With `none` and --socket, only this host is served.
    #[arg(long, value_name = "ADDR:PORT|none", default_value = "[::]:4747", help_heading = "Network")]
    pub(crate) listen: ListenArg,

    #[command(flatten)]
    pub(crate) socket: SocketArgs,

    /// The transports that clients may use: QUIC (UDP), TCP with TLS, or `auto` for both, on the same port number.
    #[arg(long, value_name = "auto|quic|tcp", default_value = "auto", help_heading = "Network")]
    pub(crate) transport: Transport,

    /// Do not listen on TCP: the same as --transport quic.
    #[arg(long, conflicts_with = "transport", help_heading = "Network")]
    pub(crate) no_tcp: bool,

    /// An address that tickets name instead of this machine's own: HOST or HOST:PORT. Repeat the option for several, or
    /// separate them by `,`.
    #[arg(long, value_name = "HOST[:PORT]", value_delimiter = ',', help_heading = "Network")]
    pub(crate) advertise: Vec<Advertised>,

    /// Do not let subscribers take chunks from each other: send each of them everything, and tell nobody of others.
    #[arg(long, help_heading = "Network")]
    pub(crate) no_peers: bool,

    /// A network in which subscribers that share may listen at other addresses than those from which they connect, e.g.
    /// 10.0.0.0/8: this server connects to their ports there to find out whether they are theirs. Repeat the option for
    /// several, or separate them by `,`.
    #[arg(
        long,
        value_name = "CIDR",
        value_delimiter = ',',
        conflicts_with = "no_peers",
        help_heading = "Network"
    )]
    pub(crate) peer_networks: Vec<PeerNetwork>,

    /// The maximum number of connected clients.
    #[arg(long, value_name = "N", default_value = "1024", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Network")]
    pub(crate) sessions: u32,

    /// The maximum number of lanes of each client: connections that share its transfers.
    #[arg(long, value_name = "N", default_value = "16", value_parser = clap::value_parser!(u32).range(1..=64), help_heading = "Network")]
    pub(crate) lanes_max: u32,

    /// How long a subscriber may accept no bytes during a transfer before it is evicted, in seconds; more than 0.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = units::parse_positive_seconds, help_heading = "Network")]
    pub(crate) stall_timeout: Duration,

    /// The directory of the server's key, the secrets of its tickets and its last version numbers, which all outlive a
    /// restart. Only one `serve --watch` at a time can use it. Default: $XDG_STATE_HOME/tensor-relay or
    /// ~/.local/state/tensor-relay.
    #[arg(long, value_name = "DIR", help_heading = "Key and tickets")]
    pub(crate) state_dir: Option<PathBuf>,

    /// A file to write the tickets to, besides `tickets` in the state directory, readable by its owner alone. It is
    /// replaced atomically: a symbolic link is itself replaced; a device, a FIFO or a socket is refused.
    #[arg(long, value_name = "FILE", help_heading = "Key and tickets")]
    pub(crate) ticket_file: Option<PathBuf>,

    /// Grant access to every topic to everybody who can reach this server; tickets then contain no token. Only for
    /// networks on which everybody is trusted.
    #[arg(long, help_heading = "Key and tickets")]
    pub(crate) open: bool,

    /// The maximum number of chunks in progress for one subscriber on each lane: being read, encoded or sent. The
    /// default keeps each of these stages busy; paths with long round trips need more. With a GPU, each chunk occupies
    /// page-locked memory until it is acknowledged.
    #[arg(long, value_name = "N", default_value = "8", value_parser = clap::value_parser!(u32).range(1..=1024), help_heading = "Encoding")]
    pub(crate) chunks_in_flight: u32,

    /// The maximum memory for encoded chunks. Up to half of it caches chunks for further subscribers, and when it is
    /// full, chunks are sent raw. Default: 512MiB, or an eighth of the container's memory limit.
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes, help_heading = "Memory")]
    pub(crate) encoded_mem: Option<u64>,

    /// The number of versions of each topic that are kept as bases of deltas after they left retention, while subscribers
    /// hold copies of them. With 0, every version is sent whole. Files that are served without --watch have no later
    /// version.
    #[arg(long, value_name = "N", default_value = "2", help_heading = "Memory")]
    pub(crate) bases: u32,

    /// The maximum memory for bases of deltas, over all topics.
    #[arg(long, value_name = "SIZE", default_value = "4GiB", value_parser = units::parse_bytes_or_zero, help_heading = "Memory")]
    pub(crate) base_mem: u64,

    #[command(flatten)]
    pub(crate) admin: AdminArgs,

    /// How long transfers in progress may take to finish after a signal to end, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "8", value_parser = units::parse_seconds, help_heading = "Network")]
    pub(crate) grace: Duration,
}

/// The socket for clients of this host.
#[derive(Debug, clap::Args)]
pub(crate) struct SocketArgs {
    /// Create a Unix socket through which processes of this host take versions, with the ticket unix:PATH. They share
    /// the memory of staged versions instead of receiving copies.
    #[arg(long, value_name = "PATH", help_heading = "Network")]
    pub(crate) socket: Option<PathBuf>,

    /// With --socket: the permissions of its file, in octal. Who can open it still needs rights: those of its user or of
    /// a token.
    #[arg(long, value_name = "MODE", default_value = "0660", value_parser = parse_socket_mode, help_heading = "Network")]
    pub(crate) socket_mode: u32,

    /// With --socket and --device: processes of this user that ask for it have a version on the GPU in common, and use
    /// it there, instead of a copy of their own. Any of them could write to it.
    #[arg(long, requires = "socket", help_heading = "Network")]
    pub(crate) share_gpu: bool,
}

/// The values of `--listen`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ListenArg {
    /// No network: for this host alone.
    Nowhere,
    /// An address of the network.
    On(SocketAddr),
}

impl FromStr for ListenArg {
    type Err = AddrParseError;

    fn from_str(text: &str) -> Result<Self, AddrParseError> {
        match text {
            "none" => Ok(Self::Nowhere),
            address => Ok(Self::On(address.parse()?)),
        }
    }
}

/// The values of `--when-full`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum WhenFullArg {
    /// The subscriber is evicted after --publish-timeout.
    Evict,
    /// The new version waits without a time limit.
    Block,
}

impl ServerArgs {
    /// The configuration of a server with these options.
    pub(crate) fn config(&self) -> Config {
        Config {
            chunks_in_flight: self.chunks_in_flight as usize,
            sessions_max: self.sessions as usize,
            lanes_max: self.lanes_max,
            stall_timeout: self.stall_timeout,
            reader_linger: self.reader_linger,
            base_bytes: self.base_mem,
            share_gpu: self.socket.share_gpu,
            peers: (!self.no_peers).then(|| PeerDialling::over_network(&self.peer_networks)),
            ..Config::default()
        }
    }

    /// The options of each topic.
    pub(crate) fn topic_options(&self) -> TopicOptions {
        TopicOptions {
            keep: Keep { versions: self.keep_versions, bytes: self.keep_bytes.unwrap_or(u64::MAX) },
            when_full: match self.when_full {
                WhenFullArg::Evict => WhenFull::Evict,
                WhenFullArg::Block => WhenFull::Block,
            },
            publish_timeout: self.publish_timeout,
            release_timeout: Some(self.release_timeout),
            bases: self.bases,
            expire_after: None,
            codec: None,
        }
    }
}

/// Parses the permissions of a socket: its owner may use it, and nobody may execute it.
pub(super) fn parse_socket_mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode & !0o066 == 0o600 => Ok(mode),
        _ => Err("write octal permissions that include the owner's, such as 0600, 0660 or 0666".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_for_its_owner_at_least() {
        assert_eq!(["0600", "660", "0666"].map(parse_socket_mode), [Ok(0o600), Ok(0o660), Ok(0o666)]);
        for wrong in ["", "432", "0770", "060", "01660", "rw"] {
            assert!(parse_socket_mode(wrong).is_err(), "{wrong}");
        }
    }
}
