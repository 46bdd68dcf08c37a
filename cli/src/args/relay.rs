//! The options of `relay`.

use super::{HubOptions, ModeArg, OriginsArgs, ServerArgs, SwarmArgs, subscribe::parse_lanes};
use crate::units;
use std::{net::SocketAddr, path::PathBuf, time::Duration};
use tensor_relay_client::{Glob, Lanes, ReaderName, Transport};

#[derive(Debug, clap::Args)]
pub(crate) struct RelayArgs {
    #[command(flatten)]
    pub(crate) origins: OriginsArgs,

    /// The topics to relay, or globs: `*` matches any text without `/`, `**` any text, `?` one character. Repeat the option
    /// for several, or separate them by `,`. Matching topics that appear later are relayed too. Default: the topic of the
    /// ticket or, if that names none, every topic that it grants.
    #[arg(
        long,
        value_name = "NAME|GLOB",
        value_delimiter = ',',
        env = "TENSOR_RELAY_RELAY_TOPICS",
        help_heading = "What to relay"
    )]
    pub(crate) topic: Vec<Glob>,

    /// The versions to relay: always the newest, or every version in order. With `every`, the relay is one reader at each
    /// origin, and the origin waits for it as for any other.
    #[arg(long, value_enum, default_value_t = ModeArg::Latest, help_heading = "What to relay")]
    pub(crate) mode: ModeArg,

    /// In mode `every`: the name under which origins keep this relay's place. Default: a name made of its key.
    #[arg(long, value_name = "NAME", help_heading = "What to relay")]
    pub(crate) reader: Option<ReaderName>,

    /// The transport to the origins. `auto` chooses TCP with TLS on paths with short round trips or where UDP is blocked,
    /// else QUIC.
    #[arg(long, value_name = "auto|quic|tcp", default_value = "auto", help_heading = "Connection")]
    pub(crate) origin_transport: Transport,

    /// The number of lanes to each origin, 1 to 16: see `subscribe`.
    #[arg(long, value_name = "auto|auto:N|N", default_value = "auto", value_parser = parse_lanes, help_heading = "Connection")]
    pub(crate) lanes: Lanes,

    #[command(flatten)]
    pub(crate) swarm: SwarmArgs,

    /// The maximum memory for versions from each origin. A version that does not fit is an error, and those before it are
    /// served on. Default: no limit.
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes, help_heading = "Memory")]
    pub(crate) mem: Option<u64>,

    /// Keep the newest versions in this folder, from which a restarted relay serves them at once, also without its origins.
    /// They are compared with their hashes when they are read.
    #[arg(long, value_name = "DIR", help_heading = "Cache")]
    pub(crate) cache_dir: Option<PathBuf>,

    /// With --cache-dir: the most that its files take. The oldest ones give way. Default: no limit but the number of
    /// --keep-versions for each topic.
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes, requires = "cache_dir", help_heading = "Cache")]
    pub(crate) cache_bytes: Option<u64>,

    /// Serve what is relayed as Hugging Face's hub, too, at this address: see `hub`. Plain HTTP: beyond this machine, the
    /// token and the files can be read on the way.
    #[arg(long, value_name = "ADDR:PORT", help_heading = "Hub")]
    pub(crate) hub: Option<SocketAddr>,

    #[command(flatten)]
    pub(crate) hub_options: HubOptions,

    /// /readyz reports not ready once an origin has been lost for longer than this, in seconds. Default: no limit, because
    /// what is here is served on.
    #[arg(long, value_name = "SECONDS", value_parser = units::parse_positive_seconds, help_heading = "Admin port")]
    pub(crate) ready_within: Option<Duration>,

    #[command(flatten)]
    pub(crate) server: ServerArgs,

    /// Print one JSON object per line on stdout instead of text.
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}
