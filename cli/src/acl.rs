//! `tensor-relay acl`: queries the access control list.

use crate::{
    args::{AclCommand, CheckAclArgs},
    exit::{Exit, UsageError},
    subscribe::print_line,
    tickets,
};
use anyhow::bail;
use serde_json::json;
use tensor_relay_server::{AccessStore, Decision, TicketId};

pub(crate) fn run(command: AclCommand) -> anyhow::Result<Exit> {
    match command {
        AclCommand::Check(args) => check(&args),
    }
}

fn check(args: &CheckAclArgs) -> anyhow::Result<Exit> {
    let store = tickets::store(&args.state)?;
    let (allowed, why) = match args.principal.split_once(':') {
        Some(("ticket", id)) => by_ticket(&store, id, args)?,
        Some(("key" | "dns" | "uri" | "uid", _)) => {
            match store.rules()?.acl.decide(&args.principal, args.verb, &args.topic) {
                Decision::Allowed(number, line) => {
                    (true, format!("line {number} of the list allows it: {line}"))
                }
                Decision::Unrestricted => (
                    true,
                    "no line speaks of users, so those may publish whom the publish socket lets in".into(),
                ),
                Decision::Denied => (false, "no line of the list allows it".into()),
            }
        }
        _ => bail!(UsageError(format!(
            "{:?} is no principal: write key:NAME, dns:NAME, uri:URI, uid:NUMBER or ticket:ID",
            args.principal
        ))),
    };
    match args.state.json {
        true => print_line(&json!({ "allowed": allowed, "why": why }).to_string()),
        false => print_line(&format!("{}: {why}", if allowed { "allowed" } else { "denied" })),
    }
    Ok(if allowed { Exit::Done } else { Exit::Refused })
}

/// A ticket's rights are its grants; the list adds nothing.
fn by_ticket(store: &AccessStore, id: &str, args: &CheckAclArgs) -> anyhow::Result<(bool, String)> {
    let Ok(id) = id.parse::<TicketId>() else {
        bail!(UsageError(format!("{id:?} is no identity of a ticket: it has 16 hexadecimal digits")));
    };
    let Some(ticket) = store.issued()?.into_iter().find(|ticket| ticket.claims.id == id) else {
        bail!(
            "ticket {id} was not made with `tickets create` and this state directory: `tickets show` reads what it says"
        );
    };
    if let Err(denied) = store.rules()?.check_issued(&ticket, tickets::seconds_now()) {
        return Ok((false, denied.to_string()));
    }
    let grant = ticket.claims.grants.iter().find(|grant| grant.allows(args.verb, &args.topic));
    Ok(match grant {
        Some(grant) => (true, format!("the ticket grants {grant}")),
        None => (false, "the ticket grants nothing of the kind".into()),
    })
}
