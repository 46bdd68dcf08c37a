//! The lines of `issued`: `ID ISSUED EXPIRES VERBS TOPICS… HOLDER`, with tabs between them, and `-` for never.

use tensor_relay_protocol::{Claims, Glob, Grant};

/// A ticket that was made by hand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IssuedTicket {
    /// What it says.
    pub claims: Claims,
    /// When it was made, in seconds since 1970.
    pub issued_s: u64,
}

pub(super) fn to_line(ticket: &IssuedTicket) -> String {
    let Claims { id, holder, expires_s, grants } = &ticket.claims;
    let expires = expires_s.map_or_else(|| "-".into(), |s| s.to_string());
    let grants = grants.iter().map(|grant| format!("{grant}\t")).collect::<String>();
    format!("{id}\t{}\t{expires}\t{grants}{holder}", ticket.issued_s)
}

pub(super) fn from_line(line: &str) -> Option<IssuedTicket> {
    let words: Vec<_> = line.split('\t').collect();
    let [id, issued_s, expires, grants @ .., holder] = &words[..] else { return None };
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
    Some(IssuedTicket { claims, issued_s: issued_s.parse().ok()? })
}
