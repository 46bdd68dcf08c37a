//! The command line options. Variables and keys of the configuration file follow from them: see [`crate::config`].

mod access;
mod device;
mod folder;
mod publish;
mod serve;
mod subscribe;

pub(crate) use access::{
    AclCommand, CheckAclArgs, CreateTicketArgs, RevokeKeyArgs, RevokeTicketArgs, ShowTicketArgs,
    TicketsCommand, TrustKeyArgs,
};
pub(crate) use device::{DeviceArgs, DeviceName};
pub(crate) use folder::FolderArgs;
pub(crate) use publish::PublishArgs;
pub(crate) use serve::{HoldArg, ServeArgs};
pub(crate) use subscribe::{OnGap, SubscribeArgs};

use crate::{log::LogFormat, units};
use clap::{ArgAction, Parser, Subcommand, ValueEnum};
use std::{path::PathBuf, sync::Arc, time::Duration};
use tensor_relay_bench::command::BenchArgs;
use tensor_relay_server::{CodecChoice, CodecId, Identity, Transport};

/// Streams tensors between containers over QUIC or TLS: encrypted and verified, on plain Ethernet.
#[derive(Debug, Parser)]
#[command(name = "tensor-relay", version, after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,

    /// Log more on stderr: -v for information, -vv for everything. TENSOR_RELAY_LOG sets a filter, e.g. `debug`; QUIC's
    /// frames, which contain secrets, are never logged.
    #[arg(short, long, global = true, action = ArgAction::Count, help_heading = FOR_ALL)]
    pub(crate) verbose: u8,

    /// The format of stderr: text, or JSON with one object a line.
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Text, help_heading = FOR_ALL)]
    pub(crate) log_format: LogFormat,
}

/// The help heading of the options of every command.
pub(crate) const FOR_ALL: &str = "For every command";

const EXAMPLES: &str = "\
Examples:
  tensor-relay demo                                        see it work on this machine
  tensor-relay serve --topic policy=policy.safetensors     on the producer; prints a ticket
  tensor-relay subscribe 'relay://…' --out models          on each consumer, with that ticket
  tensor-relay publish /run/relay.sock policy new.safetensors
                                                           beside a server with --publish-socket
  tensor-relay devices                                     the GPUs that --device may name
  tensor-relay doctor                                      diagnose problems, and how to fix them
  tensor-relay config                                      the value of every option, and its source

Every option is also an environment variable, which the command's help names, and a key of the
configuration file: see `tensor-relay config --help`.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not reached or timed out,
            4 wrong key or access refused, 5 topic not found, 6 damaged data,
            7 versions were missed, 8 the command of --exec failed (with --once),
            129, 130 and 143 ended by a signal";

const CONFIG: &str = "\
The configuration file is TOML. It has a table for each command, whose keys are named like flags,
and [default] for options that several commands share:

  [default]
  connect-timeout = 5

  [serve]
  listen = \"0.0.0.0:4747\"
  json = true

  [serve.topics]
  policy = \"/models/policy.safetensors\"

A flag overrides a variable, a variable the file, and a command's own table [default].
A switch --NAME that a variable or the file turns on is turned off by --no-NAME.

Examples:
  tensor-relay config serve
  tensor-relay config --sample > ~/.config/tensor-relay/config.toml";

const DEVICES: &str = "\
A machine without a GPU or a working driver is not an error: the exit code is 0, the JSON object
has an empty list and the reason, and without --json the reason is printed on stderr.

The processes that use a GPU, and its free memory, are reported by NVML, NVIDIA's management
library. Process ids are those of the host, which mean nothing inside a container.";

const COMPLETIONS: &str = "\
Examples:
  tensor-relay completions bash > ~/.local/share/bash-completion/completions/tensor-relay
  tensor-relay completions zsh > ~/.zfunc/_tensor-relay          with ~/.zfunc in fpath
  tensor-relay completions fish > ~/.config/fish/completions/tensor-relay.fish";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve files of tensors as topics, and print a ticket for each.
    Serve(ServeArgs),
    /// Publish a version into a server that runs on this machine with `serve --publish-socket`.
    Publish(PublishArgs),
    /// Receive the versions of a topic, or of all matching topics.
    Subscribe(SubscribeArgs),
    /// List the topics of a server.
    List(ListArgs),
    /// Move a generated model between two processes on this machine and verify every byte.
    Demo(DemoArgs),
    /// List the GPUs of this machine.
    #[command(after_help = DEVICES)]
    Devices(DevicesArgs),
    /// Diagnose this machine, this container and, with a ticket, the path to its server.
    Doctor(DoctorArgs),
    /// Measure how fast tensors move, also compared with other tools.
    Bench(BenchArgs),
    /// Show the value of every option, and whether it comes from a variable, the configuration file or its default.
    #[command(after_help = CONFIG)]
    Config(ConfigArgs),
    /// Show or make the server's key, which tickets contain, and manage the known keys of clients.
    #[command(subcommand)]
    Keys(KeysCommand),
    /// Create, show, list and revoke tickets, which give clients access.
    #[command(subcommand)]
    Tickets(TicketsCommand),
    /// Query the access control list.
    #[command(subcommand)]
    Acl(AclCommand),
    /// Print a completion script for a shell.
    #[command(after_help = COMPLETIONS)]
    Completions(CompletionsArgs),
    /// Print the manual page, or write one for every command.
    Man(ManArgs),
    #[command(hide = true)]
    DemoProducer(DemoProducerArgs),
    #[command(hide = true)]
    DemoConsumer(DemoConsumerArgs),
}

#[derive(Debug, clap::Args)]
pub(crate) struct TicketArgs {
    /// The ticket that `serve` printed, a file that holds it, or `-` for stdin.
    #[arg(value_name = "TICKET", env = "TENSOR_RELAY_TICKET", hide_env_values = true)]
    pub(crate) ticket: String,

    /// The file with the private key of this client, where the server knows it by `keys trust`: it needs no token then.
    /// `tensor-relay keys create --state-dir DIR` makes one, as DIR/identity.key.
    #[arg(long, value_name = "FILE", help_heading = "Connection")]
    pub(crate) identity: Option<PathBuf>,

    /// The certificate of that key in PEM, followed by its chain to the authority that the server trusts.
    #[arg(long, value_name = "FILE", requires = "identity", help_heading = "Connection")]
    pub(crate) certificate: Option<PathBuf>,

    /// The deadline for connecting, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = units::parse_seconds, help_heading = "Connection")]
    pub(crate) connect_timeout: Duration,

    /// The transport of the session. `auto` takes TCP with TLS on short paths, QUIC on long ones, and TCP if UDP is not
    /// answered.
    #[arg(long, value_name = "auto|quic|tcp", default_value = "auto", help_heading = "Connection")]
    pub(crate) transport: Transport,
}

impl TicketArgs {
    /// The client's key, if one is given.
    pub(crate) fn identity(&self) -> anyhow::Result<Option<Arc<Identity>>> {
        let Some(key) = &self.identity else { return Ok(None) };
        Ok(Some(Arc::new(Identity::from_files(key, self.certificate.as_deref())?)))
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct DoctorArgs {
    /// The ticket that `serve` printed, a file that holds it, or `-` for stdin: then its server is tried too.
    #[arg(value_name = "TICKET", env = "TENSOR_RELAY_TICKET", hide_env_values = true)]
    pub(crate) ticket: Option<String>,

    /// Where the server's key is or will be kept. Default: $XDG_STATE_HOME/tensor-relay or ~/.local/state/tensor-relay.
    #[arg(long, value_name = "DIR", help_heading = "Key and tickets")]
    pub(crate) state_dir: Option<PathBuf>,

    /// Print one JSON object on stdout instead of text.
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    pub(crate) ticket: TicketArgs,

    /// Print one JSON object on stdout instead of text.
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct DemoArgs {
    /// How large the generated model is, from 1MiB.
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = units::parse_bytes, help_heading = "Workload")]
    pub(crate) size: u64,

    /// How many versions of it are published.
    #[arg(long, value_name = "N", default_value = "3", value_parser = clap::value_parser!(u64).range(1..=1000), help_heading = "Workload")]
    pub(crate) versions: u64,

    /// How many small versions are published to measure latency.
    #[arg(long, value_name = "N", default_value = "300", value_parser = clap::value_parser!(u64).range(1..=100_000), help_heading = "Workload")]
    pub(crate) small: u64,

    /// The encoding of chunks.
    #[arg(long, value_enum, default_value_t = Codec::Auto, help_heading = "Encoding")]
    pub(crate) codec: Codec,

    #[command(flatten)]
    pub(crate) device: DeviceArgs,

    /// Print one JSON object on stdout instead of text.
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct DevicesArgs {
    /// Print one JSON object on stdout instead of text.
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ConfigArgs {
    /// Only this command's options.
    pub(crate) command: Option<String>,

    /// Print a sample configuration file: every option, commented out, with its help.
    #[arg(long, conflicts_with = "json")]
    pub(crate) sample: bool,

    /// Print one JSON object on stdout instead of a table.
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum KeysCommand {
    /// Show the fingerprint of the key in a state directory, and where it is kept.
    Show(KeysArgs),
    /// Make the server's key before its first start, or a client's own. Refuses if there is one.
    Create(KeysArgs),
    /// Give access to clients that hold a key, with the rights in the access control list: see `acl`.
    Trust(TrustKeyArgs),
    /// Revoke a client's key. A running server cuts its sessions within ten seconds.
    Revoke(RevokeKeyArgs),
    /// List the known keys of clients.
    List(KeysArgs),
}

#[derive(Debug, clap::Args)]
pub(crate) struct KeysArgs {
    /// The directory of the server's key and access rules. Default: $XDG_STATE_HOME/tensor-relay or
    /// ~/.local/state/tensor-relay.
    #[arg(long, value_name = "DIR", help_heading = "Key and tickets")]
    pub(crate) state_dir: Option<PathBuf>,

    /// Print one JSON object on stdout instead of text.
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct CompletionsArgs {
    /// The shell.
    pub(crate) shell: clap_complete::Shell,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ManArgs {
    /// Write the page of every command into this folder, as tensor-relay-serve.1 and so on.
    #[arg(long, value_name = "DIR", env = "TENSOR_RELAY_MAN_OUT")]
    pub(crate) out: Option<PathBuf>,
}

/// The demo's server process, driven by lines on stdin.
#[derive(Debug, clap::Args)]
pub(crate) struct DemoProducerArgs {
    #[arg(long)]
    pub(crate) size: u64,
    #[arg(long)]
    pub(crate) state_dir: PathBuf,
    #[arg(long, value_enum)]
    pub(crate) codec: Codec,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}

/// The demo's subscriber process, which reads expectations from stdin.
#[derive(Debug, clap::Args)]
pub(crate) struct DemoConsumerArgs {
    pub(crate) ticket: String,
    #[arg(long)]
    pub(crate) size: u64,
    #[arg(long)]
    pub(crate) versions: u64,
    #[arg(long)]
    pub(crate) small: u64,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}

/// A codec, as a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Codec {
    /// Each chunk by a sample of its bytes, with as much effort as is measured to pay.
    Auto,
    /// Bytes as they are.
    Raw,
    /// zstd level 1: for bytes that are not floats.
    Zstd,
    /// The exponents of floats in bit planes: a third less at the speed of memory.
    Bitplanes,
    /// Byte planes, each with a Huffman code: much smaller for f32 that holds f16 or bf16, several times slower.
    Planes,
    /// Deltas: what changed since a version that the subscriber holds.
    Sparse,
}

impl Codec {
    /// The codec, unless it is `auto`.
    pub(crate) fn fixed(self) -> Option<CodecId> {
        match self {
            Self::Auto => None,
            Self::Raw => Some(CodecId::Raw),
            Self::Zstd => Some(CodecId::Zstd),
            Self::Bitplanes => Some(CodecId::BitPlanes),
            Self::Planes => Some(CodecId::Planes),
            Self::Sparse => Some(CodecId::Sparse),
        }
    }

    /// Its name on the command line.
    pub(crate) fn word(self) -> &'static str {
        self.fixed().map_or("auto", CodecId::name)
    }
}

impl From<Codec> for CodecChoice {
    fn from(codec: Codec) -> Self {
        codec.fixed().map_or(Self::Auto, Self::Fixed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn a_codec_is_called_by_its_name() {
        for codec in Codec::value_variants() {
            let word = codec.to_possible_value().unwrap();
            assert_eq!(word.get_name(), codec.word());
        }
        assert_eq!(Codec::value_variants().len(), CodecId::ALL.len() + 1, "every codec, and auto");
    }

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }
}
