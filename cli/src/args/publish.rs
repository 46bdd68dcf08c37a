//! The options of `publish`.

use super::{FolderArgs, SentCacheArgs, SplitArgs};
use crate::units;
use std::{path::PathBuf, time::Duration};
use tensor_relay_server::{RESERVED_PREFIX, Topic, is_reserved};

#[derive(Debug, clap::Args)]
pub(crate) struct PublishArgs {
    /// The socket of the server: the path given to `serve --publish-socket`.
    #[arg(value_name = "SOCKET")]
    pub(crate) socket: PathBuf,

    /// The topic that gets a new version.
    #[arg(value_name = "TOPIC", value_parser = parse_topic)]
    pub(crate) topic: Topic,

    /// The .safetensors file to publish, or the folder of a Hugging Face model.
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,

    #[command(flatten)]
    pub(crate) folder: FolderArgs,

    #[command(flatten)]
    pub(crate) split: SplitArgs,

    #[command(flatten)]
    pub(crate) caches: SentCacheArgs,

    /// Metadata of this version, e.g. `step=1200`; repeat the option for several entries.
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse_entry, help_heading = "Version")]
    pub(crate) metadata: Vec<(String, String)>,

    /// Wait until N consumers have received and verified the whole version.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Waiting")]
    pub(crate) wait_committed: Option<u64>,

    /// Wait until the version is replaced or withdrawn and the server has released its memory.
    #[arg(long, help_heading = "Waiting")]
    pub(crate) wait_released: bool,

    /// The timeout for publishing, and for each wait after it, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = units::parse_seconds, help_heading = "Waiting")]
    pub(crate) timeout: Duration,

    /// How long to retry connecting to a server that may start later, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = units::parse_seconds, help_heading = "Connection")]
    pub(crate) connect_timeout: Duration,

    /// The user ID that the server must run as: for sockets in a folder where other users may create files. Default:
    /// any.
    #[arg(long, value_name = "UID", help_heading = "Connection")]
    pub(crate) server_uid: Option<u32>,

    /// Print one JSON object per line on stdout instead of text.
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

/// Parses the name of a topic.
pub(super) fn parse_topic(text: &str) -> Result<Topic, String> {
    Topic::new(text).map_err(|error| error.to_string())
}

fn parse_entry(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("write KEY=VALUE, e.g. step=1200")?;
    match () {
        () if key.is_empty() => Err("the key before the `=` is missing".into()),
        () if is_reserved(key) => {
            Err(format!("keys that begin with {RESERVED_PREFIX:?} are reserved for tensor-relay"))
        }
        () if key.starts_with(PYTHON_PREFIX) => Err(format!(
            "keys that begin with {PYTHON_PREFIX:?} are reserved for tensor-relay's Python package"
        )),
        () => Ok((key.into(), value.into())),
    }
}

/// The prefix of the metadata keys that the Python package reserves for itself.
const PYTHON_PREFIX: &str = "tensor_relay.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_entries_are_pairs_of_key_and_value() {
        assert_eq!(parse_entry("a=b=c"), Ok(("a".into(), "b=c".into())));
        assert_eq!(parse_entry("a="), Ok(("a".into(), String::new())));
        assert!(parse_entry("a").is_err() && parse_entry("=b").is_err());
        assert!(parse_entry("tensor-relay.kind=x").is_err() && parse_entry("tensor_relay.json=x").is_err());
    }
}
