//! The command line options. Environment variables and keys of the configuration file are derived from them: see
//! [`crate::config`].

mod access;
mod boxes;
mod device;
mod engine;
mod folder;
mod hub;
mod publish;
mod relay;
mod serve;
mod server;
mod split;
mod subscribe;
mod swarm;

pub(crate) use access::{
    AclCommand, CheckAclArgs, CreateTicketArgs, RevokeKeyArgs, RevokeTicketArgs, ShowTicketArgs,
    TicketsCommand, TrustKeyArgs,
};
pub(crate) use device::{DeviceArgs, DeviceName};
pub use engine::parse_engine_cache;
pub(crate) use engine::{SentCacheArgs, UnpackedCacheArgs};
pub(crate) use folder::FolderArgs;
pub(crate) use hub::{HubArgs, HubOptions};
pub(crate) use publish::PublishArgs;
pub(crate) use relay::RelayArgs;
pub(crate) use serve::{HoldArg, ServeArgs};
pub(crate) use server::{ListenArg, ServerArgs};
pub(crate) use split::SplitArgs;
pub(crate) use subscribe::{ModeArg, OnGap, SubscribeArgs};
pub(crate) use swarm::SwarmArgs;

use crate::{log::LogFormat, ticket, units};
use clap::{ArgAction, Parser, Subcommand, ValueEnum};
use std::{path::PathBuf, sync::Arc, time::Duration};
use tensor_relay_bench::command::BenchArgs;
use tensor_relay_client::Ticket;
use tensor_relay_server::{CodecChoice, CodecId, Identity, Transport};

/// Streams tensors between containers over QUIC or TLS: encrypted and verified, on plain Ethernet.
#[derive(Debug, Parser)]
#[command(name = "tensor-relay", version, after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,

    /// Log more on stderr: -v for information, -vv for debugging. TENSOR_RELAY_LOG sets a filter, e.g. `debug`; QUIC's
    /// frames, which contain secrets, are never logged.
    #[arg(short, long, global = true, action = ArgAction::Count, help_heading = GLOBAL_HEADING)]
    pub(crate) verbose: u8,

    /// The format of messages on stderr: text, or one JSON object per line.
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Text, help_heading = GLOBAL_HEADING)]
    pub(crate) log_format: LogFormat,
}

/// The help heading of the options that every command has.
pub(crate) const GLOBAL_HEADING: &str = "For every command";

const EXAMPLES: &str = "\
Examples:
  tensor-relay demo                                        try it on this machine
  tensor-relay serve --topic policy=policy.safetensors     on the producer; prints a ticket
  tensor-relay subscribe 'relay://…' --out models          on each consumer, with that ticket
  tensor-relay relay policy.ticket --ticket-file site.ticket
                                                           for a site; prints a ticket of its own
  tensor-relay publish /run/relay.sock policy new.safetensors
                                                           beside a server with --publish-socket
  tensor-relay devices                                     list the GPUs for --device
  tensor-relay doctor                                      diagnose problems and suggest fixes
  tensor-relay config                                      show every option's value and its source

Every option can also be set by an environment variable, which the command's help names, and in the
configuration file: see `tensor-relay config --help`.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 unreachable or timed out,
            4 wrong key or access refused, 5 topic not found, 6 damaged data,
            7 versions were missed, 8 the command of --exec failed (with --once),
            9 another process took the reader's place,
            129, 130 and 143 ended by a signal";

const CONFIG: &str = "\
The configuration file is TOML. It has a table for each command, with the names of its flags as keys,
and a table [default] for options that several commands share:

  [default]
  connect-timeout = 5

  [serve]
  listen = \"[::]:4747\"
  json = true

  [serve.topics]
  policy = \"/models/policy.safetensors\"

A flag overrides a variable, and a variable overrides the file. In the file, a command's own table
overrides [default]. A switch --NAME that a variable or the file turns on is turned off by
--no-NAME.

Example:
  tensor-relay config serve";

const DEVICES: &str = "\
A machine without a GPU or a working driver is not an error: the exit code is 0, the JSON object
contains an empty list and the reason, and without --json the reason is printed on stderr.

The processes that use a GPU, and its free memory, are reported by NVML, NVIDIA's management
library. Process ids are those of the host and differ from those in a container.";

const COMPLETIONS: &str = "\
Examples:
  tensor-relay completions bash > ~/.local/share/bash-completion/completions/tensor-relay
  tensor-relay completions zsh > ~/.zfunc/_tensor-relay          with ~/.zfunc in fpath
  tensor-relay completions fish > ~/.config/fish/completions/tensor-relay.fish";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve files of tensors as topics, and create a ticket for each.
    Serve(Box<ServeArgs>),
    /// Publish a version through a server on this machine that was started with `serve --publish-socket`.
    Publish(PublishArgs),
    /// Receive topics from servers, and serve them to others while they arrive.
    Relay(Box<RelayArgs>),
    /// Receive the versions of a topic, or of all matching topics.
    Subscribe(Box<SubscribeArgs>),
    /// List the topics of a server.
    List(ListArgs),
    /// Offer the topics of tickets to clients of Hugging Face's hub, such as `from_pretrained`, vLLM and SGLang.
    #[command(after_help = hub::EXAMPLE)]
    Hub(Box<HubArgs>),
    /// Move a generated model from a server to a subscriber on this machine and verify every byte.
    Demo(DemoArgs),
    /// List the GPUs of this machine.
    #[command(after_help = DEVICES)]
    Devices(DevicesArgs),
    /// Diagnose this machine, this container and, with a ticket, the path to its server.
    Doctor(DoctorArgs),
    /// Measure transfer rates, also in comparison with other tools.
    Bench(BenchArgs),
    /// Show the value of every option, and whether it comes from a variable, the configuration file or its default.
    #[command(after_help = CONFIG)]
    Config(ConfigArgs),
    /// Show or create the key of a server or client, and manage the client keys that a server trusts.
    #[command(subcommand)]
    Keys(KeysCommand),
    /// Create, show, list and revoke tickets, which grant clients access.
    #[command(subcommand)]
    Tickets(TicketsCommand),
    /// Query the access control list.
    #[command(subcommand)]
    Acl(AclCommand),
    /// Print a completion script for a shell.
    #[command(after_help = COMPLETIONS)]
    Completions(CompletionsArgs),
}

#[derive(Debug, clap::Args)]
pub(crate) struct TicketArgs {
    /// The ticket that `serve` printed, a file that holds it, or `-` for stdin.
    #[arg(value_name = "TICKET", env = "TENSOR_RELAY_TICKET", hide_env_values = true)]
    pub(crate) ticket: String,

    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,

    /// The transport of the session. `auto` chooses TCP with TLS on paths with short round trips or where UDP is
    /// blocked, else QUIC.
    #[arg(long, value_name = "auto|quic|tcp", default_value = "auto", help_heading = "Connection")]
    pub(crate) transport: Transport,
}

/// The tickets of several servers.
#[derive(Debug, clap::Args)]
pub(crate) struct OriginsArgs {
    /// The tickets of the servers that have the topics, or files that hold them; `-` for stdin. A topic that several
    /// servers have is taken from the first of them.
    #[arg(
        value_name = "TICKET",
        required = true,
        num_args = 1..,
        value_delimiter = ';',
        env = "TENSOR_RELAY_ORIGINS",
        hide_env_values = true
    )]
    pub(crate) tickets: Vec<String>,

    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
}

impl OriginsArgs {
    /// Reads the tickets.
    pub(crate) fn read(&self) -> anyhow::Result<Vec<Ticket>> {
        self.tickets.iter().map(|source| ticket::read_for_all(source)).collect()
    }
}

/// How a client connects.
#[derive(Debug, clap::Args)]
pub(crate) struct ConnectionArgs {
    #[command(flatten)]
    pub(crate) identity: IdentityArgs,

    /// The deadline for connecting, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = units::parse_seconds, help_heading = "Connection")]
    pub(crate) connect_timeout: Duration,
}

#[derive(Debug, clap::Args)]
pub(crate) struct IdentityArgs {
    /// The file with this client's private key. If the server trusts the key (`keys trust`), the ticket needs no token.
    /// `tensor-relay keys create --state-dir DIR` creates the file DIR/identity.key.
    #[arg(long, value_name = "FILE", help_heading = "Connection")]
    pub(crate) identity: Option<PathBuf>,

    /// A PEM file with the certificate of the --identity key, followed by the chain to an authority that the server
    /// trusts.
    #[arg(long, value_name = "FILE", requires = "identity", help_heading = "Connection")]
    pub(crate) certificate: Option<PathBuf>,
}

impl IdentityArgs {
    /// The client's key, if `--identity` is given.
    pub(crate) fn load(&self) -> anyhow::Result<Option<Arc<Identity>>> {
        let Some(key) = &self.identity else { return Ok(None) };
        Ok(Some(Arc::new(Identity::from_files(key, self.certificate.as_deref())?)))
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct DoctorArgs {
    /// The ticket that `serve` printed, a file that holds it, or `-` for stdin. With a ticket, the path to its server
    /// is diagnosed too.
    #[arg(value_name = "TICKET", env = "TENSOR_RELAY_TICKET", hide_env_values = true)]
    pub(crate) ticket: Option<String>,

    #[command(flatten)]
    pub(crate) identity: IdentityArgs,

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
    /// The size of the generated model, at least 1MiB.
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = units::parse_bytes, help_heading = "Workload")]
    pub(crate) size: u64,

    /// The number of versions of the model to publish.
    #[arg(long, value_name = "N", default_value = "3", value_parser = clap::value_parser!(u64).range(1..=1000), help_heading = "Workload")]
    pub(crate) versions: u64,

    /// The number of small versions to publish, for measuring latency.
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
    /// Show only this command's options.
    pub(crate) command: Option<String>,

    /// Print one JSON object on stdout instead of a table.
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum KeysCommand {
    /// Show the fingerprint and the file of the key in a state directory.
    Show(KeysArgs),
    /// Create a key: the server's before its first start, or a client's. Fails if a key exists.
    Create(KeysArgs),
    /// Trust a client's key. The access control list grants its rights: see `acl`.
    Trust(TrustKeyArgs),
    /// Revoke a client's key. A running server closes its sessions within ten seconds.
    Revoke(RevokeKeyArgs),
    /// List the trusted keys of clients.
    List(KeysArgs),
}

#[derive(Debug, clap::Args)]
pub(crate) struct KeysArgs {
    /// The directory that holds the key and, for a server, the access rules. Default: $XDG_STATE_HOME/tensor-relay or
    /// ~/.local/state/tensor-relay.
    #[arg(long, value_name = "DIR", help_heading = "Key and tickets")]
    pub(crate) state_dir: Option<PathBuf>,

    /// Print one JSON object on stdout instead of text.
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct CompletionsArgs {
    /// The shell to generate the script for.
    pub(crate) shell: clap_complete::Shell,
}

/// The values of `--codec`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Codec {
    /// The best codec for each chunk, estimated from a sample and from measured throughput.
    Auto,
    /// No encoding.
    Raw,
    /// zstd level 1: for bytes that are not floats.
    Zstd,
    /// Exponents of floats as bit planes: a third smaller for bf16, at memory speed.
    Bitplanes,
    /// Byte planes, each Huffman-coded: much smaller for f32 values converted from f16 or bf16, but several times
    /// slower.
    Planes,
    /// Deltas: only the changes since a version that the subscriber holds.
    Sparse,
}

impl Codec {
    /// The chosen codec; `None` for `auto`.
    pub(crate) fn fixed(self) -> Option<CodecId> {
        let value = self.to_possible_value()?;
        CodecId::ALL.iter().copied().find(|codec| codec.name() == value.get_name())
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
    fn values_of_codec_are_the_names_of_codecs() {
        for codec in Codec::value_variants() {
            let value = codec.to_possible_value().unwrap();
            assert_eq!(value.get_name(), codec.fixed().map_or("auto", CodecId::name));
        }
        assert_eq!(Codec::value_variants().len(), CodecId::ALL.len() + 1, "every codec and `auto`");
    }

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }
}
