//! `tensor-relay acl`: queries the access control list.

use crate::{
    args::{AclCommand, CheckAclArgs},
    exit::{Exit, UsageError},
    output::{print_json, print_line},
    tickets,
};
use anyhow::bail;
use serde_json::json;
use tensor_relay_server::{AccessStore, Decision, TicketId, seconds_now};

pub(crate) fn run(command: AclCommand) -> anyhow::Result<Exit> {
    match command {
        AclCommand::Check(args) => check(&args),
    }
}

fn check(args: &CheckAclArgs) -> anyhow::Result<Exit> {
    let store = tickets::open_store(&args.state)?;
    let (allowed, reason) = match args.principal.split_once(':') {
        Some(("ticket", id)) => check_ticket(&store, id, args)?,
        Some(("key" | "dns" | "uri" | "uid", _)) => {
            match store.rules()?.acl.decide(&args.principal, args.verb, &args.topic) {
                Decision::Allowed(line_number, line) => {
                    (true, format!("line {line_number} of the list allows it: {line}"))
                }
                Decision::Unrestricted => (
                    true,
                    "no line of the list lets a user publish, so every user that the publish socket admits may publish"
                        .into(),
                ),
                Decision::OwnUsers => (
                    false,
                    "no line of the list lets a user take, so only the server's own user and root may, from its socket"
                        .into(),
                ),
                Decision::Denied => (false, "no line of the list allows it".into()),
            }
        }
        _ => bail!(UsageError(format!(
            "{:?} is not a principal: write key:NAME, dns:NAME, uri:URI, uid:NUMBER or ticket:ID",
            args.principal
        ))),
    };
    match args.state.json {
        true => print_json(&json!({ "allowed": allowed, "why": reason })),
        false => print_line(&format!("{}: {reason}", if allowed { "allowed" } else { "denied" })),
    }
    tickets::warn_of_refused(&store);
    Ok(if allowed { Exit::Done } else { Exit::Refused })
}

/// Checks whether a ticket's own grants allow the action; the access control list does not apply to tickets.
fn check_ticket(store: &AccessStore, id: &str, args: &CheckAclArgs) -> anyhow::Result<(bool, String)> {
    let Ok(id) = id.parse::<TicketId>() else {
        bail!(UsageError(format!("{id:?} is not a ticket ID: a ticket ID has 16 hexadecimal digits")));
    };
    let Some(ticket) = store.issued()?.into_iter().find(|ticket| ticket.claims.id == id) else {
        bail!(
            "this state directory has no record of ticket {id}: only tickets made with `tickets create` are recorded; \
             `tickets show` prints the grants of any ticket"
        );
    };
    if let Err(denied) = store.rules()?.check_issued(&ticket, seconds_now()) {
        return Ok((false, denied.to_string()));
    }
    let grant = ticket.claims.grants.iter().find(|grant| grant.allows(args.verb, &args.topic));
    Ok(match grant {
        Some(grant) => (true, format!("the ticket grants {grant}")),
        None => (false, "no grant of the ticket allows it".into()),
    })
}
