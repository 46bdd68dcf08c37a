//! The options of `serve`.

use super::{Codec, DeviceArgs, FolderArgs, SentCacheArgs, ServerArgs, SplitArgs};
use crate::units;
use clap::ValueEnum;
use std::{path::PathBuf, time::Duration};
use tensor_relay_server::{Topic, TopicOptions};

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

    #[command(flatten)]
    pub(crate) caches: SentCacheArgs,

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

    #[command(flatten)]
    pub(crate) server: ServerArgs,

    /// The encoding of chunks for subscribers that choose no codec themselves. Chunks that would shrink by less than
    /// 3 % are sent raw.
    #[arg(long, value_enum, default_value_t = Codec::Auto, help_heading = "Encoding")]
    pub(crate) codec: Codec,

    /// The size of chunks: a multiple of 256 bytes, up to 64MiB.
    #[arg(long, value_name = "SIZE", default_value = "4MiB", value_parser = parse_chunk_size, help_heading = "Encoding")]
    pub(crate) chunk_size: u32,

    /// The maximum memory for staged versions; a version that does not fit is refused. Default: no limit.
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes, help_heading = "Memory")]
    pub(crate) staged_mem: Option<u64>,

    #[command(flatten)]
    pub(crate) device: DeviceArgs,

    /// Print one JSON object per line on stdout instead of text.
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

/// The values of `--hold`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum HoldArg {
    /// Copied to memory; files may be overwritten.
    Stage,
    /// Read from files when sent: needs no memory, but files must not be overwritten in place.
    Borrow,
}

impl ServeArgs {
    /// The options of each topic.
    pub(crate) fn topic_options(&self) -> TopicOptions {
        // Files that are not watched have only one version.
        let bases = if self.watch { self.server.bases } else { 0 };
        TopicOptions { bases, ..self.server.topic_options() }
    }
}

/// Parses a chunk size that every receiver accepts with its default limits.
fn parse_chunk_size(text: &str) -> Result<u32, String> {
    match units::parse_bytes(text)? {
        bytes if bytes.is_multiple_of(256) && bytes <= 64 << 20 => Ok(bytes as u32),
        _ => Err("write a multiple of 256 bytes, up to 64MiB".into()),
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
