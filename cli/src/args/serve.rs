//! The options of `serve`.

use super::{Codec, DeviceArgs, FolderArgs, SplitArgs};
use crate::{admin::AdminArgs, units};
use clap::ValueEnum;
use std::{
    net::{AddrParseError, SocketAddr},
    path::PathBuf,
    str::FromStr,
    time::Duration,
};
use tensor_relay_server::{Advertised, Keep, PeerNetwork, Topic, TopicOptions, Transport, WhenFull};

#[derive(Debug, clap::Args)]
pub(crate) struct ServeArgs {
    /// A topic and its content: a .safetensors file, or the folder of a Hugging Face model. Repeat the option for
    /// several topics, or separate them by `;`.
    #[arg(
        long = "topic",
        value_name = "NAME=PATH",
        value_parser = parse_topic_file,
        value_delimiter = ';',
        env = "TENSOR_RELAY_TOPICS",
        help_heading = "Topics"
    )]
    pub(crate) topics: Vec<(Topic, PathBuf)>,

    #[command(flatten)]
    pub(crate) folder: FolderArgs,

    #[command(flatten)]
    pub(crate) split: SplitArgs,

    /// Create a Unix socket through which processes on this machine can publish, with `tensor-relay publish` or with
    /// `tensor_relay.publish_to` in Python. A topic appears with its first version.
    #[arg(long, value_name = "PATH", help_heading = "Topics")]
    pub(crate) publish_socket: Option<PathBuf>,

    /// With --publish-socket: the ID of a further user whose processes may publish; repeat the option for several, or
    /// separate them by `,`. The server's own user and root always may. 65534 is refused: it stands for every user that
    /// has no ID in this container.
    #[arg(long, value_name = "UID", value_delimiter = ',', help_heading = "Topics")]
    pub(crate) publish_uid: Vec<u32>,

    /// With --publish-socket: end a topic of the socket after this time without a new version, in seconds. At most 4096
    /// such topics may be open. Default: never.
    #[arg(long, value_name = "SECONDS", value_parser = units::parse_seconds, help_heading = "Topics")]
    pub(crate) expire_after: Option<Duration>,

    /// Whether tensors are copied to memory once, or read from their files each time they are sent.
    #[arg(long, value_enum, default_value_t = HoldArg::Stage, help_heading = "Topics")]
    pub(crate) hold: HoldArg,

    /// Publish a new version whenever a file is replaced. Write the new file under another name and rename it into
    /// place.
    #[arg(long, help_heading = "Topics")]
    pub(crate) watch: bool,

    /// The interval at which files are checked, in seconds, more than 0. A file that is unchanged between two checks is
    /// published: if a program overwrites it in place with longer pauses than this interval, a half-written file is
    /// published.
    #[arg(long, value_name = "SECONDS", default_value = "0.5", value_parser = units::parse_positive_seconds, help_heading = "Topics")]
    pub(crate) watch_interval: Duration,

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

    /// The encoding of chunks for subscribers that choose no codec themselves. Chunks that would shrink by less than
    /// 3 % are sent raw.
    #[arg(long, value_enum, default_value_t = Codec::Auto, help_heading = "Encoding")]
    pub(crate) codec: Codec,

    /// The size of chunks: a multiple of 256 bytes, up to 64MiB.
    #[arg(long, value_name = "SIZE", default_value = "4MiB", value_parser = parse_chunk_size, help_heading = "Encoding")]
    pub(crate) chunk_size: u32,

    /// The maximum number of chunks in progress for one subscriber on each lane: being read, encoded or sent. The
    /// default keeps each of these stages busy; paths with long round trips need more. With a GPU, each chunk occupies
    /// page-locked memory until it is acknowledged.
    #[arg(long, value_name = "N", default_value = "8", value_parser = clap::value_parser!(u32).range(1..=1024), help_heading = "Encoding")]
    pub(crate) chunks_in_flight: u32,

    /// The maximum memory for staged versions; a version that does not fit is refused. Default: no limit.
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes, help_heading = "Memory")]
    pub(crate) staged_mem: Option<u64>,

    /// The maximum memory for encoded chunks. Up to half of it caches chunks for further subscribers, and when it is
    /// full, chunks are sent raw. Default: 512MiB, or an eighth of the container's memory limit.
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes, help_heading = "Memory")]
    pub(crate) encoded_mem: Option<u64>,

    /// With --watch or --publish-socket: the number of versions of each topic that are kept as bases of deltas after
    /// they left retention, while subscribers hold copies of them. With 0, every version is sent whole.
    #[arg(long, value_name = "N", default_value = "2", help_heading = "Memory")]
    pub(crate) bases: u32,

    /// The maximum memory for bases of deltas, over all topics.
    #[arg(long, value_name = "SIZE", default_value = "4GiB", value_parser = units::parse_bytes_or_zero, help_heading = "Memory")]
    pub(crate) base_mem: u64,

    #[command(flatten)]
    pub(crate) device: DeviceArgs,

    #[command(flatten)]
    pub(crate) admin: AdminArgs,

    /// How long transfers in progress may take to finish after a signal to end, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "8", value_parser = units::parse_seconds, help_heading = "Network")]
    pub(crate) grace: Duration,

    /// Print one JSON object per line on stdout instead of text.
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
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

/// The values of `--hold`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum HoldArg {
    /// Copied to memory; files may be overwritten.
    Stage,
    /// Read from files when sent: needs no memory, but files must not be overwritten in place.
    Borrow,
}

/// The values of `--when-full`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum WhenFullArg {
    /// The subscriber is evicted after --publish-timeout.
    Evict,
    /// The new version waits without a time limit.
    Block,
}

impl ServeArgs {
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
            // Files that are not watched have only one version.
            bases: if self.watch { self.bases } else { 0 },
            expire_after: None,
            codec: None,
        }
    }
}

/// Parses a chunk size that every receiver accepts with its default limits.
fn parse_chunk_size(text: &str) -> Result<u32, String> {
    match units::parse_bytes(text)? {
        bytes if bytes.is_multiple_of(256) && bytes <= 64 << 20 => Ok(bytes as u32),
        _ => Err("write a multiple of 256 bytes, up to 64MiB".into()),
    }
}

/// Parses the permissions of a socket: its owner may use it, and nobody may execute it.
pub(super) fn parse_socket_mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode & !0o066 == 0o600 => Ok(mode),
        _ => Err("write octal permissions that include the owner's, such as 0600, 0660 or 0666".into()),
    }
}

fn parse_topic_file(text: &str) -> Result<(Topic, PathBuf), String> {
    let (topic, file) = text.split_once('=').ok_or("write NAME=FILE, e.g. policy=model.safetensors")?;
    let topic = Topic::new(topic).map_err(|error| error.to_string())?;
    if file.is_empty() {
        return Err(format!("no file is given for topic {topic}"));
    }
    Ok((topic, file.into()))
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

    #[test]
    fn topics_are_pairs_of_name_and_path() {
        assert!(
            parse_topic_file("a/b=x=y.safetensors")
                .is_ok_and(|(topic, path)| topic.as_str() == "a/b" && path.as_os_str() == "x=y.safetensors")
        );
        for wrong in ["a", "=f", "a=", "../a=f", "a b=f"] {
            assert!(parse_topic_file(wrong).is_err(), "{wrong}");
        }
    }
}
