//! The options of `subscribe`.

use super::{
    Codec, DeviceArgs, SwarmArgs, TicketArgs, UnpackedCacheArgs, boxes::parse_box, server::parse_socket_mode,
};
use crate::{
    admin::{AdminArgs, ReadyArgs},
    units,
};
use clap::ValueEnum;
use std::{net::IpAddr, path::PathBuf, time::Duration};
use tensor_relay_client::{Epoch, Glob, Lanes, Mode, ReaderName, Start, TensorBox, Version};

#[derive(Debug, clap::Args)]
pub(crate) struct SubscribeArgs {
    #[command(flatten)]
    pub(crate) ticket: TicketArgs,

    /// A topic other than the ticket's, or a glob: `*` matches any text without `/`, `**` any text, `?` one character.
    /// Matching topics that appear later are received too.
    #[arg(long, value_name = "NAME|GLOB", help_heading = "What to receive")]
    pub(crate) topic: Option<Glob>,

    /// The versions to receive: always the newest, or every version in order.
    #[arg(long, value_enum, default_value_t = ModeArg::Latest, help_heading = "What to receive")]
    pub(crate) mode: ModeArg,

    /// The first version to receive: `newest`, `next`, or in mode `every` also `oldest`, a version number, or
    /// EPOCH:VERSION. Default: `newest` in mode `latest`, `oldest` (the oldest retained) in mode `every`.
    #[arg(long, value_name = "START", value_parser = parse_start, help_heading = "What to receive")]
    pub(crate) from: Option<Start>,

    /// Receive only tensors whose names match, e.g. `model.layers.*`; repeat the option for several globs, or separate
    /// them by `,`.
    #[arg(long, value_name = "GLOB", value_delimiter = ',', help_heading = "What to receive")]
    pub(crate) select: Vec<Glob>,

    /// Receive only a box of each tensor whose name matches: rows or columns as a rank of several needs them
    /// (`GLOB=rows:2/8`, part 2 of 8 from 0), or the given indices of each dimension (`GLOB=0:128,:`). Repeat the option;
    /// the first glob that matches counts, and other tensors come whole. Only chunks with a byte of a box are sent.
    #[arg(long = "box", value_name = "GLOB=BOX", value_parser = parse_box, help_heading = "What to receive")]
    pub(crate) boxes: Vec<TensorBox>,

    /// In mode `every`: a name under which the server keeps this subscriber's place for a while after it disconnects.
    #[arg(long, value_name = "NAME", help_heading = "What to receive")]
    pub(crate) reader: Option<ReaderName>,

    /// In mode `every`: the number of versions to receive ahead, including the one being processed.
    #[arg(long, value_name = "N", default_value = "3", value_parser = clap::value_parser!(u32).range(1..=1024), help_heading = "What to receive")]
    pub(crate) window: u32,

    /// In mode `every`: what to do when versions are missing, or the publisher began a new epoch.
    #[arg(long, value_enum, default_value_t = OnGap::Fail, help_heading = "What to receive")]
    pub(crate) on_gap: OnGap,

    /// In mode `latest`: abandon a version that is being received when a newer one appears.
    #[arg(long, help_heading = "What to receive")]
    pub(crate) preempt: bool,

    /// End after the first version; with a glob, after the first version of each existing topic.
    #[arg(long, help_heading = "What to receive")]
    pub(crate) once: bool,

    /// With --once: end with exit code 3 if that takes longer, in seconds, whatever it waits for. Default: no limit, so
    /// that a version that an existing topic does not have yet is awaited for ever.
    #[arg(long, value_name = "SECONDS", value_parser = units::parse_seconds, requires = "once", help_heading = "What to receive")]
    pub(crate) once_within: Option<Duration>,

    /// How long to wait for the first version, in seconds, if the topic does not exist yet or the server aborts the
    /// first version midway.
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = units::parse_seconds, help_heading = "What to receive")]
    pub(crate) wait: Duration,

    /// How long to try to re-establish a lost connection, in seconds; with 0, the command ends immediately.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = units::parse_seconds, help_heading = "Connection")]
    pub(crate) reconnect: Duration,

    /// The number of lanes, 1 to 16. Each lane is a connection with its own socket and thread. `auto` begins large
    /// versions with one for every two processors, and keeps more or fewer if that is faster; `auto:N` has at most N.
    #[arg(long, value_name = "auto|auto:N|N", default_value = "auto", value_parser = parse_lanes, help_heading = "Connection")]
    pub(crate) lanes: Lanes,

    /// The ticket of another server with the same files, a file that holds it, or `-` for stdin; repeat the option for
    /// several. Large versions are received from all servers at once, and from the others when one is lost.
    #[arg(long, value_name = "TICKET", help_heading = "Connection")]
    pub(crate) source: Vec<String>,

    /// A local address for lanes, one for each network card to use; repeat the option for several, or separate them by
    /// `,`. Lanes use the addresses in turn. Default: chosen by the system.
    #[arg(long, value_name = "IP", value_delimiter = ',', help_heading = "Connection")]
    pub(crate) lane_address: Vec<IpAddr>,

    #[command(flatten)]
    pub(crate) share: ShareArgs,

    #[command(flatten)]
    pub(crate) swarm: SwarmArgs,

    /// Write each version below DIR in its original form: DIR/TOPIC.safetensors, or a folder DIR/TOPIC. It replaces the
    /// previous version atomically.
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub(crate) out: Option<PathBuf>,

    /// With --out: keep the newest N versions as DIR/TOPIC/VERSION-EPOCH…, and a link `latest`.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), requires = "out", help_heading = "Output")]
    pub(crate) keep: Option<u32>,

    #[command(flatten)]
    pub(crate) caches: UnpackedCacheArgs,

    /// Run this shell command after each version, with TENSOR_RELAY_TOPIC, _VERSION, _EPOCH and _PATH set. The next
    /// version waits until the command has ended. If the command fails, a warning is printed, and with --once the exit
    /// code is 8. With --json, its stdout is stderr. The command runs in a process group of its own: if `subscribe` ends
    /// first, the group receives SIGTERM, and SIGKILL 5 seconds later.
    #[arg(long, value_name = "CMD", help_heading = "Output")]
    pub(crate) exec: Option<String>,

    /// The encoding of chunks; with `auto`, the server decides. Chunks that would shrink by less than 3 % are sent raw.
    #[arg(long, value_enum, default_value_t = Codec::Auto, help_heading = "Encoding")]
    pub(crate) codec: Codec,

    /// The maximum number of chunks in flight on each lane, which hides the time for encoding, for decoding and for a
    /// round trip. With a GPU, each chunk occupies page-locked memory.
    #[arg(long, value_name = "N", default_value = "8", value_parser = clap::value_parser!(u32).range(1..=1024), help_heading = "Memory")]
    pub(crate) chunks_in_flight: u32,

    /// The maximum memory for versions; a version that does not fit is an error. Default: no limit.
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes, help_heading = "Memory")]
    pub(crate) mem: Option<u64>,

    /// The maximum memory for copies of versions, over all topics. With a copy, the next version of a topic can be
    /// received as deltas, without a copy only whole. With 0, no copies are made.
    #[arg(long, value_name = "SIZE", default_value = "4GiB", value_parser = units::parse_bytes_or_zero, help_heading = "Memory")]
    pub(crate) base_mem: u64,

    #[command(flatten)]
    pub(crate) device: DeviceArgs,

    #[command(flatten)]
    pub(crate) admin: AdminArgs,

    #[command(flatten)]
    pub(crate) ready: ReadyArgs,

    /// Print one JSON object per version on stdout instead of text.
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,

    /// Show no progress bar.
    #[arg(short, long, help_heading = "Output")]
    pub(crate) quiet: bool,
}

/// Sharing with this host.
#[derive(Debug, clap::Args)]
pub(crate) struct ShareArgs {
    /// Offer each version to processes of this host, through a Unix socket that is created here, with the ticket
    /// unix:PATH: they share its memory instead of receiving it too.
    #[arg(
        long, value_name = "PATH", conflicts_with_all = ["once", "select", "boxes"], help_heading = "Sharing with this host"
    )]
    pub(crate) share_host: Option<PathBuf>,

    /// With --share-host: the ID of a further user whose processes may take versions; repeat the option for several, or
    /// separate them by `,`. The own user and root always may. 65534 stands for all users without an ID in this container.
    #[arg(
        long,
        value_name = "UID",
        value_delimiter = ',',
        requires = "share_host",
        help_heading = "Sharing with this host"
    )]
    pub(crate) share_uid: Vec<u32>,

    /// With --share-host: the permissions of the socket's file, in octal.
    #[arg(
        long, value_name = "MODE", default_value = "0660", value_parser = parse_socket_mode, help_heading = "Sharing with this host"
    )]
    pub(crate) share_mode: u32,
}

/// The values of `--mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ModeArg {
    /// Always the newest version; older ones are skipped and counted.
    Latest,
    /// Every version, in order.
    Every,
}

/// The values of `--on-gap`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnGap {
    /// End with exit code 7.
    Fail,
    /// Report the gap and continue.
    Continue,
}

impl From<ModeArg> for Mode {
    fn from(mode: ModeArg) -> Self {
        match mode {
            ModeArg::Latest => Self::Latest,
            ModeArg::Every => Self::Every,
        }
    }
}

pub(super) fn parse_lanes(text: &str) -> Result<Lanes, &'static str> {
    let lane_count = |text: &str| match text.parse() {
        Ok(lanes @ 1..=16) => Ok(lanes),
        _ => Err("write auto, auto:N, or N, with a number from 1 to 16"),
    };
    match (text, text.strip_prefix("auto:")) {
        ("auto", _) => Ok(Lanes::Auto),
        (_, Some(max)) => lane_count(max).map(Lanes::UpTo),
        (lanes, None) => lane_count(lanes).map(Lanes::Fixed),
    }
}

fn parse_start(text: &str) -> Result<Start, String> {
    let version = |text: &str| match text.parse() {
        Ok(version @ 1..) => Ok(Version(version)),
        _ => Err("write newest, next, oldest, a version from 1, or EPOCH:VERSION".to_owned()),
    };
    match (text, text.split_once(':')) {
        ("newest", _) => Ok(Start::Newest),
        ("next", _) => Ok(Start::Next),
        ("oldest", _) => Ok(Start::Oldest),
        (_, Some((epoch, number))) => {
            let epoch = u64::from_str_radix(epoch, 16).map_err(|_| "an epoch is 16 hexadecimal digits")?;
            Ok(Start::At(Some(Epoch(epoch)), version(number)?))
        }
        (number, None) => Ok(Start::At(None, version(number)?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_are_auto_or_a_number() {
        assert_eq!((parse_lanes("auto"), parse_lanes("16")), (Ok(Lanes::Auto), Ok(Lanes::Fixed(16))));
        assert_eq!(parse_lanes("auto:4"), Ok(Lanes::UpTo(4)));
        for wrong in ["", "0", "17", "-1", "two", "Auto", "auto:", "auto:0", "auto:17", "auto:auto"] {
            assert!(parse_lanes(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_start_is_a_word_or_a_version() {
        assert_eq!(parse_start("oldest"), Ok(Start::Oldest));
        assert_eq!(parse_start("12"), Ok(Start::At(None, Version(12))));
        assert_eq!(parse_start("00000000000000ff:3"), Ok(Start::At(Some(Epoch(255)), Version(3))));
        for wrong in ["", "0", "-1", "first", "xyz:1", "ff:", "ff:0"] {
            assert!(parse_start(wrong).is_err(), "{wrong}");
        }
    }
}
