//! Formats and parses the lines of `issued`. Their fields, separated by tabs: `ID`, `ISSUED@SECRET` (without `@SECRET`
//! in lines of older builds), `EXPIRES` (`-` for never), a field `VERBS TOPICS` for each grant, and `HOLDER`.

use tensor_relay_protocol::{Claims, Glob, Grant, SecretId};

/// A ticket that an operator issued.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IssuedTicket {
    /// Its claims.
    pub claims: Claims,
    /// When it was issued, in seconds since 1970.
    pub issued_s: u64,
    /// The secret that sealed it, if recorded.
    pub secret: Option<SecretId>,
}

pub(super) fn to_line(ticket: &IssuedTicket) -> String {
    let Claims { id, holder, expires_s, grants } = &ticket.claims;
    let expires = expires_s.map_or_else(|| "-".into(), |s| s.to_string());
    let grants = grants.iter().map(|grant| format!("{grant}\t")).collect::<String>();
    let secret = ticket.secret.map(|secret| format!("@{:08x}", secret.0)).unwrap_or_default();
    format!("{id}\t{}{secret}\t{expires}\t{grants}{holder}", ticket.issued_s)
}

pub(super) fn from_line(line: &str) -> Option<IssuedTicket> {
    let fields: Vec<_> = line.split('\t').collect();
    let [id, issued, expires, grants @ .., holder] = &fields[..] else { return None };
    let (issued_s, secret) = match issued.split_once('@') {
        Some((issued_s, secret)) => (issued_s, Some(SecretId(u32::from_str_radix(secret, 16).ok()?))),
        None => (*issued, None),
    };
    let grant = |text: &&str| {
        let (verbs, topics) = text.split_once(' ')?;
        Some(Grant { topics: Glob::new(topics).ok()?, verbs: verbs.parse().ok()? })
    };
    let expires_s = match *expires {
        "-" => None,
        expires_s => Some(expires_s.parse().ok()?),
    };
    let claims = Claims {
        id: id.parse().ok()?,
        holder: (*holder).to_owned(),
        expires_s,
        grants: grants.iter().map(grant).collect::<Option<_>>()?,
    };
    Some(IssuedTicket { claims, issued_s: issued_s.parse().ok()?, secret })
}
