//! The options of `serve`.

use super::{Codec, DeviceArgs, FolderArgs};
use crate::{admin::AdminArgs, units};
use clap::ValueEnum;
use std::{net::SocketAddr, path::PathBuf, time::Duration};
use tensor_relay_server::{Advertised, Keep, Topic, TopicOptions, Transport, WhenFull};

#[derive(Debug, clap::Args)]
pub(crate) struct ServeArgs {
    /// A topic and what it offers: a .safetensors, .npy or .npz file, or a folder of a model (Hugging Face); repeat it
    /// or write `;` between them for several topics.
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

    /// Let processes on this machine publish through a Unix socket that is made here: `tensor-relay publish`, or
    /// `tensor_relay.publish_to` in Python. Their topics appear as they are published, in host memory.
    #[arg(long, value_name = "PATH", help_heading = "Topics")]
    pub(crate) publish_socket: Option<PathBuf>,

    /// With --publish-socket: a further user whose processes may publish, by number; repeat it or write `,` between
    /// them for several. Default: the server's own, and root. 65534 is refused: it stands for every user
    /// without a number in this container.
    #[arg(long, value_name = "UID", value_delimiter = ',', help_heading = "Topics")]
    pub(crate) publish_uid: Vec<u32>,

    /// With --publish-socket: how long a topic published through it may be without a new version before it ends, in
    /// seconds. At most 4096 such topics may be open. Default: no limit.
    #[arg(long, value_name = "SECONDS", value_parser = units::parse_seconds, help_heading = "Topics")]
    pub(crate) expire_after: Option<Duration>,

    /// Whether tensors are copied to memory first, or read from their files each time they are sent.
    #[arg(long, value_enum, default_value_t = HoldArg::Stage, help_heading = "Topics")]
    pub(crate) hold: HoldArg,

    /// Publish a new version whenever a file is replaced. Write the new one under another name and rename it into
    /// place.
    #[arg(long, help_heading = "Topics")]
    pub(crate) watch: bool,

    /// The interval at which files are checked, in seconds, more than 0. A file that is the same in two checks is
    /// published: if a program overwrites it in place with longer pauses than this, a half-written file is published.
    #[arg(long, value_name = "SECONDS", default_value = "0.5", value_parser = units::parse_positive_seconds, help_heading = "Topics")]
    pub(crate) watch_interval: Duration,

    /// How many versions of each topic are retained, the newest included: for subscribers in mode `every`.
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Versions")]
    pub(crate) keep_versions: u32,

    /// The maximum size of the versions retained for each topic; the newest is always retained. Default: no bound.
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes, help_heading = "Versions")]
    pub(crate) keep_bytes: Option<u64>,

    /// What happens when retention is full of versions that a subscriber in mode `every` has not acknowledged.
    #[arg(long, value_enum, default_value_t = WhenFullArg::Evict, help_heading = "Versions")]
    pub(crate) when_full: WhenFullArg,

    /// How long a new version waits for such subscribers before they are evicted, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = units::parse_seconds, help_heading = "Versions")]
    pub(crate) publish_timeout: Duration,

    /// How long subscribers may finish a version that left retention, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = units::parse_seconds, help_heading = "Versions")]
    pub(crate) release_timeout: Duration,

    /// How long the place of a named subscriber in mode `every` is kept when its connection is lost, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = units::parse_seconds, help_heading = "Versions")]
    pub(crate) reader_linger: Duration,

    /// The address to listen on, over UDP and TCP.
    #[arg(long, value_name = "ADDR:PORT", default_value = "0.0.0.0:4747", help_heading = "Network")]
    pub(crate) listen: SocketAddr,

    /// The transports that clients may use: QUIC (UDP), TCP with TLS, or `auto` for both, on the same port number.
    #[arg(long, value_name = "auto|quic|tcp", default_value = "auto", help_heading = "Network")]
    pub(crate) transport: Transport,

    /// Do not listen on TCP: the same as --transport quic.
    #[arg(long, conflicts_with = "transport", help_heading = "Network")]
    pub(crate) no_tcp: bool,

    /// The address that tickets name, if it is not this machine's own: HOST or HOST:PORT; repeat it or write `,`
    /// between them for several.
    #[arg(long, value_name = "HOST[:PORT]", value_delimiter = ',', help_heading = "Network")]
    pub(crate) advertise: Vec<Advertised>,

    /// How many clients may be connected at once.
    #[arg(long, value_name = "N", default_value = "1024", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Network")]
    pub(crate) sessions: u32,

    /// How many lanes one client may have at once: connections that share the work of its transfers. With 1, one each.
    #[arg(long, value_name = "N", default_value = "16", value_parser = clap::value_parser!(u32).range(1..=64), help_heading = "Network")]
    pub(crate) lanes_max: u32,

    /// How long a subscriber in mid-transfer may take no byte before it is evicted, in seconds; more than 0.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = units::parse_positive_seconds, help_heading = "Network")]
    pub(crate) stall_timeout: Duration,

    /// The directory of the server's key and the secrets of its tickets, so that they stay valid after a restart, and
    /// of the numbers of its last versions. Only one `serve --watch` at a time can use it. Default:
    /// $XDG_STATE_HOME/tensor-relay or ~/.local/state/tensor-relay.
    #[arg(long, value_name = "DIR", help_heading = "Key and tickets")]
    pub(crate) state_dir: Option<PathBuf>,

    /// Where the tickets are written, readable by its owner alone. It is replaced in one step; a device, a FIFO or a
    /// socket is refused, and of a symbolic link the link is replaced. Default: `tickets` in the state directory.
    #[arg(long, value_name = "FILE", help_heading = "Key and tickets")]
    pub(crate) ticket_file: Option<PathBuf>,

    /// Give everybody who can reach this server access to every topic; tickets then contain no token. For networks on
    /// which everybody is trusted.
    #[arg(long, help_heading = "Key and tickets")]
    pub(crate) open: bool,

    /// How chunks are encoded for subscribers that choose no codec themselves. Chunks that would shrink by less than 3
    /// % are sent raw.
    #[arg(long, value_enum, default_value_t = Codec::Auto, help_heading = "Encoding")]
    pub(crate) codec: Codec,

    /// How large chunks are: a multiple of 256 bytes up to 64MiB.
    #[arg(long, value_name = "SIZE", default_value = "4MiB", value_parser = parse_chunk_size, help_heading = "Encoding")]
    pub(crate) chunk_size: u32,

    /// How many chunks are read, encoded or sent to one subscriber at the same time: two at each stage, since chunks
    /// do not take equally long, and two to spare. A longer path needs more. With a GPU, each holds a page-locked slot
    /// until it is acknowledged.
    #[arg(long, value_name = "N", default_value = "8", value_parser = clap::value_parser!(u32).range(1..=1024), help_heading = "Encoding")]
    pub(crate) chunks_in_flight: u32,

    /// How much memory staged versions may take; what does not fit is refused. Default: no bound but the machine's.
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes, help_heading = "Memory")]
    pub(crate) staged_mem: Option<u64>,

    /// How much memory encoded chunks may take: those that are being sent, and up to half of it for those kept for
    /// further subscribers. Beyond it chunks are sent raw. Default: 512MiB, or an eighth of the container's memory
    /// limit.
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes, help_heading = "Memory")]
    pub(crate) encoded_mem: Option<u64>,

    /// With --watch or --publish-socket: how many versions of each topic that left retention are kept, while
    /// subscribers hold copies of them, so that new ones can be sent to these as deltas. With 0, every version is sent
    /// whole.
    #[arg(long, value_name = "N", default_value = "2", help_heading = "Memory")]
    pub(crate) bases: u32,

    /// How much memory such versions may take, over all topics.
    #[arg(long, value_name = "SIZE", default_value = "4GiB", value_parser = units::parse_bytes_or_zero, help_heading = "Memory")]
    pub(crate) base_mem: u64,

    #[command(flatten)]
    pub(crate) device: DeviceArgs,

    #[command(flatten)]
    pub(crate) admin: AdminArgs,

    /// After a signal to end, how long transfers under way may take to finish, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "8", value_parser = units::parse_seconds, help_heading = "Network")]
    pub(crate) grace: Duration,

    /// Print one JSON object per line on stdout instead of text.
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

/// How a version is held, as a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum HoldArg {
    /// Copied to memory: nobody can change it, and files may be overwritten.
    Stage,
    /// Read from its files when it is sent: costs no memory; files must not be overwritten in place.
    Borrow,
}

/// What happens when retention is full, as a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum WhenFullArg {
    /// They are evicted when the new version has waited for them.
    Evict,
    /// The new version waits on.
    Block,
}

impl ServeArgs {
    /// How each topic treats its versions and its readers.
    pub(crate) fn topic_options(&self) -> TopicOptions {
        TopicOptions {
            keep: Keep { versions: self.keep_versions, bytes: self.keep_bytes.unwrap_or(u64::MAX) },
            when_full: match self.when_full {
                WhenFullArg::Evict => WhenFull::Evict,
                WhenFullArg::Block => WhenFull::Block,
            },
            publish_timeout: self.publish_timeout,
            release_timeout: Some(self.release_timeout),
            // Of files that are not watched there is one version.
            bases: if self.watch { self.bases } else { 0 },
            expire_after: None,
            codec: None,
        }
    }
}

/// The chunk sizes that every receiver accepts with its default limits.
fn parse_chunk_size(text: &str) -> Result<u32, String> {
    match units::parse_bytes(text)? {
        bytes if bytes.is_multiple_of(256) && bytes <= 64 << 20 => Ok(bytes as u32),
        _ => Err("chunks are a multiple of 256 bytes, up to 64MiB".into()),
    }
}

fn parse_topic_file(text: &str) -> Result<(Topic, PathBuf), String> {
    let (topic, file) = text.split_once('=').ok_or("write NAME=FILE, e.g. policy=model.safetensors")?;
    let topic = Topic::new(topic).map_err(|e| e.to_string())?;
    if file.is_empty() {
        return Err(format!("no file is given for topic {topic}"));
    }
    Ok((topic, file.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topics_are_pairs() {
        assert!(
            parse_topic_file("a/b=x=y.safetensors")
                .is_ok_and(|(t, f)| t.as_str() == "a/b" && f.as_os_str() == "x=y.safetensors")
        );
        for wrong in ["a", "=f", "a=", "../a=f", "a b=f"] {
            assert!(parse_topic_file(wrong).is_err(), "{wrong}");
        }
    }
}
