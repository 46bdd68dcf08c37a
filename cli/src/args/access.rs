//! The options of `tickets`, `keys` and `acl`.

use super::{KeysArgs, publish::parse_topic};
use crate::units;
use clap::Subcommand;
use std::{path::PathBuf, time::Duration};
use tensor_relay_server::{Advertised, Fingerprint, Glob, Topic, Verb, Verbs};

const CREATE: &str = "\
Examples:
  tensor-relay tickets create --topic 'policy/**' --expires 30d --for inference > policy.ticket
  tensor-relay tickets create --topic kv --address 10.0.0.5:4747 --ticket-file kv.ticket";

#[derive(Debug, Subcommand)]
pub(crate) enum TicketsCommand {
    /// Create a ticket for topics of the server that uses this state directory. The server need not be running.
    #[command(after_help = CREATE)]
    Create(CreateTicketArgs),
    /// Show what a ticket grants, and whether the server that uses this state directory accepts it.
    Show(ShowTicketArgs),
    /// List the tickets created with `tickets create`: their holders, expiry and last use.
    List(KeysArgs),
    /// Revoke a ticket. A running server closes its sessions within ten seconds.
    Revoke(RevokeTicketArgs),
    /// Replace the secret that new tickets are made with. Tickets made with the previous secret stay valid until the
    /// next rotation.
    Rotate(KeysArgs),
}

#[derive(Debug, clap::Args)]
pub(crate) struct CreateTicketArgs {
    /// The topics of the ticket: a name or a glob, e.g. 'policy/**'; repeat the option for several.
    #[arg(long = "topic", value_name = "GLOB", required = true, value_parser = parse_glob, env = "TENSOR_RELAY_CREATE_TOPIC")]
    pub(crate) topics: Vec<Glob>,

    /// The permitted actions: `list`, `subscribe`, or both, separated by `,`.
    #[arg(long, value_name = "VERBS", default_value = "list,subscribe")]
    pub(crate) verbs: Verbs,

    /// The validity period, e.g. 12h or 30d. Default: until the ticket is revoked.
    #[arg(long, value_name = "TIME", value_parser = units::parse_long_time)]
    pub(crate) expires: Option<Duration>,

    /// The ticket's holder, as free text that lists and logs show.
    #[arg(long = "for", value_name = "NAME", default_value = "")]
    pub(crate) holder: String,

    /// The server's address for clients; repeat the option for several. Default: the addresses of its last start.
    #[arg(long = "address", value_name = "HOST[:PORT]")]
    pub(crate) addresses: Vec<Advertised>,

    /// Write the ticket to this file, readable by its owner alone, instead of to stdout.
    #[arg(long, value_name = "FILE", env = "TENSOR_RELAY_CREATE_TICKET_FILE")]
    pub(crate) ticket_file: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) state: KeysArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ShowTicketArgs {
    /// The ticket, a file that holds it, or `-` for stdin.
    #[arg(value_name = "TICKET")]
    pub(crate) ticket: String,

    #[command(flatten)]
    pub(crate) state: KeysArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct RevokeTicketArgs {
    /// The ticket's ID, which `tickets list`, `tickets show` and the server's log print.
    #[arg(value_name = "ID")]
    pub(crate) id: String,

    #[command(flatten)]
    pub(crate) state: KeysArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct TrustKeyArgs {
    /// The fingerprint of the client's key, as printed by `tensor-relay keys show` on the client: `sha256:` and 64
    /// hexadecimal digits.
    #[arg(value_name = "FINGERPRINT")]
    pub(crate) key: Fingerprint,

    /// The name of the key, for `key:NAME` in the access control list: letters, digits, `-`, `_` and `.`.
    #[arg(value_name = "NAME", value_parser = parse_key_name)]
    pub(crate) name: String,

    #[command(flatten)]
    pub(crate) state: KeysArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct RevokeKeyArgs {
    /// The name of the key, or its fingerprint.
    #[arg(value_name = "NAME")]
    pub(crate) name: String,

    #[command(flatten)]
    pub(crate) state: KeysArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum AclCommand {
    /// Check whether a principal has a right, and print the line of the access control list that grants it. Exit code
    /// 0: allowed; 4: denied.
    Check(CheckAclArgs),
}

#[derive(Debug, clap::Args)]
pub(crate) struct CheckAclArgs {
    /// The principal: key:NAME, dns:NAME, uri:URI, uid:NUMBER or ticket:ID.
    #[arg(value_name = "PRINCIPAL")]
    pub(crate) principal: String,

    /// The topic.
    #[arg(value_name = "TOPIC", value_parser = parse_topic)]
    pub(crate) topic: Topic,

    /// The action: list, subscribe or publish.
    #[arg(value_name = "VERB")]
    pub(crate) verb: Verb,

    #[command(flatten)]
    pub(crate) state: KeysArgs,
}

fn parse_key_name(text: &str) -> Result<String, String> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    match (1..=64).contains(&text.len()) && text.chars().all(is_allowed) {
        true => Ok(text.into()),
        false => Err("a name has 1 to 64 letters, digits, `-`, `_` and `.`".into()),
    }
}

fn parse_glob(text: &str) -> Result<Glob, String> {
    Glob::new(text).map_err(|error| error.to_string())
}
