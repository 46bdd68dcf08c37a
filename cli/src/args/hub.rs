//! The options of the hub.

use super::{OriginsArgs, publish::parse_topic};
use crate::units;
use std::{net::SocketAddr, path::PathBuf};
use tensor_relay_client::{Topic, Transport};

pub(super) const EXAMPLE: &str = "\
Example:
  tensor-relay hub policy.ticket --hub-token-file hub.token
  HF_ENDPOINT=http://127.0.0.1:8470 HF_HUB_DISABLE_XET=1 HF_TOKEN=$(cat hub.token) hf download policy";

#[derive(Debug, clap::Args)]
pub(crate) struct HubArgs {
    #[command(flatten)]
    pub(crate) origins: OriginsArgs,

    /// The transport of the sessions. `auto` chooses TCP with TLS on paths with short round trips or where UDP is
    /// blocked, else QUIC.
    #[arg(long, value_name = "auto|quic|tcp", default_value = "auto", help_heading = "Connection")]
    pub(crate) transport: Transport,

    /// The address to listen on. Plain HTTP: beyond this machine, the token and the files can be read on the way.
    #[arg(
        long,
        value_name = "ADDR:PORT",
        default_value = "127.0.0.1:8470",
        env = "TENSOR_RELAY_HUB_LISTEN",
        help_heading = "Hub"
    )]
    pub(crate) listen: SocketAddr,

    #[command(flatten)]
    pub(crate) options: HubOptions,

    /// Print one JSON object on stdout instead of text.
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

/// The options of a hub, whatever command opens it.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct HubOptions {
    /// The file with the token that clients have to send (`HF_TOKEN`), of 16 characters or more. A file that does not exist
    /// is written, readable by its owner alone. Default: a new token for each start, which is printed.
    #[arg(long, value_name = "FILE", help_heading = "Hub")]
    pub(crate) hub_token_file: Option<PathBuf>,

    /// Require no token. Only at loopback addresses, where then every user of the machine may read all topics.
    #[arg(long, conflicts_with = "hub_token_file", help_heading = "Hub")]
    pub(crate) hub_anonymous: bool,

    /// A host name by which clients reach the hub, beside `localhost` and IP addresses; repeat the option for several, or
    /// separate them by `,`. Requests for another host are refused.
    #[arg(long, value_name = "NAME", value_delimiter = ',', help_heading = "Hub")]
    pub(crate) hub_host: Vec<String>,

    /// A topic under another name, e.g. `org/llama=teams/a/llama`: repositories have one slash at most. Repeat the option for
    /// several.
    #[arg(long, value_name = "REPO=TOPIC", value_parser = parse_repo, help_heading = "Hub")]
    pub(crate) hub_repo: Vec<(String, Topic)>,

    /// The maximum memory for parts of files that were received and may be read again.
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = units::parse_bytes, help_heading = "Memory")]
    pub(crate) hub_mem: u64,
}

fn parse_repo(text: &str) -> Result<(String, Topic), String> {
    let (repo, topic) = text.split_once('=').ok_or("write REPO=TOPIC")?;
    let topic = parse_topic(topic)?;
    match crate::hub::is_repo_id(repo) {
        true => Ok((repo.into(), topic)),
        false => {
            Err("a repository is NAME or ORGANISATION/NAME, of letters, digits, `.`, `_` and `-`".into())
        }
    }
}
