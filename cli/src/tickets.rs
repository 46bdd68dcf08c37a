//! `tensor-relay tickets`: creates, shows, lists and revokes tickets.

use crate::{
    args::{CreateTicketArgs, KeysArgs, RevokeTicketArgs, ShowTicketArgs, TicketsCommand},
    exit::{Exit, UsageError},
    keys::{self, KEY_FILE},
    output::{print_json, print_line},
    serve::{
        self,
        admission::{TICKETS_FILE, bare_ticket, write_tickets},
    },
    ticket, units,
};
use anyhow::{Context, bail};
use serde_json::{Value, json};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    time::Duration,
};
use tensor_relay_server::{
    AccessStore, Claims, Credentials, Denied, Grant, Identity, TicketId, Topic, seconds_now,
};

/// The port of an address without one: the default of `serve --listen`.
const PORT: u16 = 4747;

pub(crate) fn run(command: TicketsCommand) -> anyhow::Result<Exit> {
    match command {
        TicketsCommand::Create(args) => create(&args),
        TicketsCommand::Show(args) => show(&args),
        TicketsCommand::List(args) => list(&args),
        TicketsCommand::Revoke(args) => revoke(&args),
        TicketsCommand::Rotate(args) => rotate(&args),
    }
}

/// The access store in the state directory of `args`, as it is. Warns if it has no secret.
pub(crate) fn open_store(args: &KeysArgs) -> anyhow::Result<AccessStore> {
    let store = AccessStore::existing(&server_state_dir(args)?);
    if let Some(error) = store.lost_secret() {
        crate::log::message!("warning: {error}");
    }
    Ok(store)
}

/// The state directory of `args`, which must be a server's: in a mistyped one, a revocation would have no effect.
fn server_state_dir(args: &KeysArgs) -> anyhow::Result<PathBuf> {
    let dir = serve::state_dir_or_default(args.state_dir.as_deref())?;
    match keys::has_key(&dir)? || dir.join("access").exists() {
        true => Ok(dir),
        false => bail!(UsageError(format!(
            "{} is no server's state directory, so nothing was changed: name that of `serve` with --state-dir, or make a \
             key there with `tensor-relay keys create`",
            dir.display()
        ))),
    }
}

/// Warns of access files that a running server does not follow as they are.
pub(crate) fn warn_of_refused(store: &AccessStore) {
    for error in store.refused() {
        crate::log::message!(
            "warning: {error}; until then a running server keeps what it read from this file before, except for what \
             the file revokes"
        );
    }
}

fn create(args: &CreateTicketArgs) -> anyhow::Result<Exit> {
    let dir = server_state_dir(&args.state)?;
    let identity = Identity::load_or_create(&dir)?;
    let addresses = match args.addresses.is_empty() {
        true => last_addresses(&dir)?,
        false => args.addresses.iter().map(|address| address.with_port(PORT)).collect(),
    };
    let topic = match &args.topics[..] {
        [topic] if topic.is_literal() => Some(Topic::new(topic.as_str())?),
        _ => None,
    };
    let ticket = bare_ticket(addresses, identity.fingerprint(), topic)?;
    let grants = args.topics.iter().map(|glob| Grant { topics: glob.clone(), verbs: args.verbs });
    // A lost secret is not replaced here: if it is restored, the tickets made before are valid again.
    let store = AccessStore::existing(&dir);
    let store = if store.has_made_tickets() { store } else { AccessStore::open(&dir)? };
    let (claims, token) = store.issue(&args.holder, grants.collect(), args.expires)?;
    let ticket = ticket.with_token(token);
    crate::log::message!("created ticket {}: {}", claims.id, describe(&claims));
    match (&args.ticket_file, args.state.json) {
        (Some(path), _) => write_tickets(path, &[ticket.to_string()])?,
        (None, true) => {
            print_json(&json!({ "id": claims.id.to_string(), "ticket": ticket.to_string() }));
        }
        (None, false) => print_line(&ticket.to_string()),
    }
    Ok(Exit::Done)
}

/// The addresses in the tickets that the server of this state directory wrote at its last start.
fn last_addresses(dir: &Path) -> anyhow::Result<Vec<String>> {
    let path = dir.join(TICKETS_FILE);
    let read = ticket::read_any(&path.to_string_lossy());
    let last = read.with_context(|| {
        format!(
            "the server's address is unknown, because there are no tickets in {}: give it with --address HOST:PORT",
            path.display()
        )
    });
    Ok(last?.addresses().to_vec())
}

fn show(args: &ShowTicketArgs) -> anyhow::Result<Exit> {
    let ticket = ticket::read_any(&args.ticket)?;
    let dir = serve::state_dir_or_default(args.state.state_dir.as_deref())?;
    let has_key = dir.join(KEY_FILE).exists();
    let identity = has_key.then(|| Identity::load_or_create(&dir)).transpose()?;
    let has_own_key = identity.is_some_and(|identity| ticket.keys().contains(&identity.fingerprint().0));
    let is_own = has_own_key || ticket.socket().is_some(); // The server of a socket shows no key.
    let claims = ticket.token().map(|token| token.decode_unverified()).transpose()?;
    let standing = match (ticket.token(), is_own) {
        (None, _) => {
            "without a token: valid only for a server with --open, or one that trusts the client's key".into()
        }
        (Some(_), false) => {
            "issued by a server other than that of this state directory, so its validity is unknown".into()
        }
        (Some(token), true) => {
            let credentials = Credentials { token: Some(token.clone()), ..Credentials::default() };
            match open_store(&args.state)?.rules()?.admit(&credentials, seconds_now()) {
                Ok(_) => "valid".to_owned(),
                Err(denied) => format!("not valid: {denied}"),
            }
        }
    };
    if args.state.json {
        let claims = claims.as_ref().map(|claims| as_object(claims, None, None));
        print_json(&json!({
            "addresses": ticket.addresses(),
            "topic": ticket.topic().map(Topic::as_str),
            "claims": claims,
            "standing": standing,
        }));
        return Ok(Exit::Done);
    }
    print_line(&ticket.redacted());
    if let Some(claims) = claims {
        print_line(&format!("ticket {}: {}", claims.id, describe(&claims)));
    }
    print_line(&standing);
    Ok(Exit::Done)
}

fn list(args: &KeysArgs) -> anyhow::Result<Exit> {
    let store = open_store(args)?;
    let (used, rules): (HashMap<TicketId, u64>, _) = (store.used()?, store.rules()?);
    let now = seconds_now();
    let mut listed = vec![];
    for ticket in store.issued()? {
        let standing = match rules.check_issued(&ticket, now) {
            Ok(()) => "valid",
            Err(Denied::Revoked(_)) => "revoked",
            Err(Denied::Expired) => "expired",
            Err(_) if rules.secrets.is_empty() => "secret lost",
            Err(_) => "rotated out",
        };
        let claims = ticket.claims;
        let used_s = used.get(&claims.id).copied();
        if args.json {
            listed.push(as_object(&claims, Some(standing), used_s));
            continue;
        }
        let last_use = used_s.map_or_else(
            || "never used".into(),
            |used_s| {
                format!("used {} ago", units::long_time(Duration::from_secs(now.saturating_sub(used_s))))
            },
        );
        print_line(&format!("{}  {standing}, {last_use}: {}", claims.id, describe(&claims)));
    }
    if args.json {
        print_json(&json!({ "tickets": listed }));
    }
    Ok(Exit::Done)
}

fn revoke(args: &RevokeTicketArgs) -> anyhow::Result<Exit> {
    let id: TicketId = args.id.parse().map_err(|_| {
        UsageError(format!(
            "{:?} is not a ticket ID: write the 16 hexadecimal digits that `tickets list` prints",
            args.id
        ))
    })?;
    let store = open_store(&args.state)?;
    let is_first = store.rules().is_ok_and(|rules| rules.revoked.is_empty());
    match store.revoke(id)? {
        true => crate::log::message!("revoked {id}; running servers close its sessions within ten seconds"),
        false => crate::log::message!("{id} was already revoked"),
    }
    if store
        .issued()
        .is_ok_and(|issued| issued.iter().all(|ticket| ticket.claims.id != id))
    {
        crate::log::message!(
            "warning: no ticket with this ID was made by `tickets create` here: is it of another server, or mistyped? \
             Tickets that `serve` itself makes are not listed"
        );
    }
    if is_first {
        crate::log::message!(
            "note: access/revoked listed no other ticket; if it did before, restore its lines, because a server takes it as \
             it is at its start"
        );
    }
    warn_of_refused(&store);
    Ok(Exit::Done)
}

fn rotate(args: &KeysArgs) -> anyhow::Result<Exit> {
    let store = open_store(args)?;
    store.rotate()?;
    crate::log::message!(
        "new tickets are now made with a new secret; restart `serve` to renew its own tickets, and replace older \
         tickets before the next rotation, which invalidates them"
    );
    warn_of_refused(&store);
    Ok(Exit::Done)
}

/// The grants, validity and holder of a ticket, in one line.
pub(crate) fn describe(claims: &Claims) -> String {
    let grants: Vec<_> = claims.grants.iter().map(Grant::to_string).collect();
    let until = claims.expires_s.map_or_else(String::new, |expires_s| {
        match expires_s.saturating_sub(seconds_now()) {
            0 => ", expired".into(),
            left => format!(", expires in {}", units::long_time(Duration::from_secs(left))),
        }
    });
    let holder = match claims.holder.is_empty() {
        true => String::new(),
        false => format!(", for {}", claims.holder.escape_debug()),
    };
    format!("{}{until}{holder}", grants.join("; "))
}

fn as_object(claims: &Claims, standing: Option<&str>, used_s: Option<u64>) -> Value {
    let grants = claims.grants.iter();
    let grants = grants
        .map(|grant| json!({ "topics": grant.topics.as_str(), "verbs": grant.verbs.to_string() }))
        .collect::<Vec<_>>();
    let mut object = json!({
        "id": claims.id.to_string(),
        "for": claims.holder,
        "expires_s": claims.expires_s,
        "grants": grants,
    });
    if let Some(standing) = standing {
        object["standing"] = standing.into();
        object["used_s"] = used_s.into();
    }
    object
}
