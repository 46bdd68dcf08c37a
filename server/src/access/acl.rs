//! The access control list: the rights of principals other than tickets.

use std::str::FromStr;
use tensor_relay_protocol::{Glob, Grant, GrantError, Topic, Verb};
use tensor_relay_transport::unix::overflow_uid;

/// An access control list, with lines `PRINCIPAL VERBS TOPICS` such as `key:trainer list,subscribe policy/**`.
///
/// A principal is `key:NAME` (a listed client key), `dns:NAME` or `uri:URI` (a name in a client's certificate), or
/// `uid:NUMBER` (a user of this host, at the server's socket or the publish socket), and may be a glob; topics are a
/// glob. Empty lines and comments from `#` on are ignored. Anything that no line allows is denied; but without `uid:`
/// lines that grant `publish`, every user that the publish socket admits may publish, and without `uid:` lines that
/// grant `list` or `subscribe`, the server's own user and root may take from its socket. A lookup scans the lines in
/// order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Acl {
    lines: Vec<Line>,
    /// Whether some `uid:` line grants `publish`: then only users named in the list may publish.
    restricts_publishers: bool,
    /// Whether some `uid:` line grants `list` or `subscribe`: then only users named in the list may take.
    restricts_takers: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Line {
    /// Its line number in the file, counted from 1.
    number: usize,
    principal: Glob,
    grant: Grant,
}

impl Line {
    /// Whether the line is for `principal`. A wildcard such as `uid:*` does not mean the uid that stands for all users without
    /// a number: it needs a line of its own.
    fn names(&self, principal: &str) -> bool {
        match is_unnumbered(principal) {
            true => self.principal.as_str() == principal,
            false => self.principal.matches(principal),
        }
    }
}

/// Whether the principal is the uid that stands for all users without a number in this user namespace.
fn is_unnumbered(principal: &str) -> bool {
    principal
        .strip_prefix("uid:")
        .is_some_and(|uid| uid.parse() == Ok(overflow_uid()))
}

/// The result of a lookup, with the line that decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// The line with this number and text allows it.
    Allowed(usize, String),
    /// No `uid:` line grants `publish`, so every user that the publish socket admits may publish.
    Unrestricted,
    /// No `uid:` line grants `list` or `subscribe`, so the server's own user and root may, and nobody else.
    OwnUsers,
    /// No line allows it.
    Denied,
}

/// Why a text is not an access control list.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {why}")]
pub struct AclError {
    line: usize,
    why: String,
}

impl Acl {
    /// Whether `principal` may do `verb` with `topic`.
    pub fn decide(&self, principal: &str, verb: Verb, topic: &Topic) -> Decision {
        let allows = |line: &&Line| line.names(principal) && line.grant.allows(verb, topic);
        let is_user = principal.starts_with("uid:");
        match self.lines.iter().find(allows) {
            Some(line) => {
                Decision::Allowed(line.number, format!("{} {}", line.principal.as_str(), line.grant))
            }
            None if is_user && verb == Verb::Publish && !self.restricts_publishers => Decision::Unrestricted,
            None if is_user
                && verb != Verb::Publish
                && !self.restricts_takers
                && !is_unnumbered(principal) =>
            {
                Decision::OwnUsers
            }
            None => Decision::Denied,
        }
    }

    /// All rights of `principal`.
    pub(super) fn grants_of(&self, principal: &str) -> Vec<Grant> {
        let lines = self.lines.iter().filter(|line| line.names(principal));
        lines.map(|line| line.grant.clone()).collect()
    }

    /// Whether a process of user `uid` may publish into `topic`.
    pub(crate) fn may_publish(&self, uid: u32, topic: &Topic) -> bool {
        self.decide(&format!("uid:{uid}"), Verb::Publish, topic) != Decision::Denied
    }

    /// Whether only users named in the list may take from the server's socket.
    pub(super) fn restricts_takers(&self) -> bool {
        self.restricts_takers
    }

    /// Keeps users restricted if `before` restricted them: a list that lost its `uid:` lines must not admit others.
    pub(super) fn keep_restriction_of_users(&mut self, before: &Self) {
        self.restricts_publishers |= before.restricts_publishers;
        self.restricts_takers |= before.restricts_takers;
    }
}

impl FromStr for Acl {
    type Err = AclError;

    fn from_str(text: &str) -> Result<Self, AclError> {
        let lines = text.lines().enumerate().filter_map(|(index, line)| {
            let line = line.split('#').next().unwrap_or(line).trim();
            (!line.is_empty()).then(|| parse_line(index + 1, line))
        });
        let lines = lines.collect::<Result<Vec<_>, _>>()?;
        let restricts = |verbs: &[Verb]| {
            let mut users = lines.iter().filter(|line| line.principal.as_str().starts_with("uid:"));
            users.any(|line| verbs.iter().any(|verb| line.grant.verbs.contains(*verb)))
        };
        let (restricts_publishers, restricts_takers) =
            (restricts(&[Verb::Publish]), restricts(&[Verb::List, Verb::Subscribe]));
        Ok(Self { lines, restricts_publishers, restricts_takers })
    }
}

fn parse_line(line_number: usize, line: &str) -> Result<Line, AclError> {
    let acl_error = |why: String| AclError { line: line_number, why };
    let fields: Vec<_> = line.split_whitespace().collect();
    let [principal, verbs, topics] = fields[..] else {
        return Err(acl_error(format!("{line:?} is not `PRINCIPAL VERBS TOPICS`")));
    };
    if !["key:", "dns:", "uri:", "uid:"].iter().any(|kind| principal.starts_with(kind)) {
        return Err(acl_error(format!(
            "{principal:?} is not a principal: it must begin with `key:`, `dns:`, `uri:` or `uid:`"
        )));
    }
    let grant = |topics| -> Result<Grant, GrantError> {
        Ok(Grant { topics: Glob::new(topics)?, verbs: verbs.parse()? })
    };
    let grant = grant(topics).map_err(|error| acl_error(error.to_string()))?;
    if grant.verbs.contains(Verb::Publish) && !principal.starts_with("uid:") {
        return Err(acl_error(format!(
            "{principal} cannot be granted {}: only `uid:` may publish, and the others list and subscribe",
            grant.verbs
        )));
    }
    let principal = Glob::new(principal).map_err(|error| acl_error(error.to_string()))?;
    Ok(Line { number: line_number, principal, grant })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "# who may do what\n\
        key:trainer   list,subscribe  policy/**\n\
        \n\
        key:gpu-*     subscribe       kv/*   # all workers\n\
        uid:1000      publish         kv/*\n";

    fn decide(principal: &str, verb: Verb, topic: &str) -> Decision {
        let acl: Acl = LIST.parse().unwrap();
        acl.decide(principal, verb, &Topic::new(topic).unwrap())
    }

    #[test]
    fn the_line_that_allows_is_named() {
        let allowed = Decision::Allowed(2, "key:trainer list,subscribe policy/**".into());
        assert_eq!(decide("key:trainer", Verb::Subscribe, "policy/a/b"), allowed);
        assert_eq!(
            decide("key:gpu-7", Verb::Subscribe, "kv/a"),
            Decision::Allowed(4, "key:gpu-* subscribe kv/*".into())
        );
    }

    #[test]
    fn anything_without_a_line_is_denied() {
        for (principal, verb, topic) in [
            ("key:trainer", Verb::Publish, "policy/a"),
            ("key:trainer", Verb::List, "kv/a"),
            ("key:trainer2", Verb::List, "policy/a"),
            ("key:gpu-7", Verb::List, "kv/a"),
            ("key:gpu-7", Verb::Subscribe, "kv/a/b"),
            ("trainer", Verb::List, "policy/a"),
        ] {
            assert_eq!(decide(principal, verb, topic), Decision::Denied, "{principal} {verb} {topic}");
        }
        assert_eq!(Acl::default().decide("key:a", Verb::List, &Topic::new("a").unwrap()), Decision::Denied);
    }

    #[test]
    fn users_are_denied_once_the_list_names_some() {
        let (kv, other) = (Topic::new("kv/a").unwrap(), Topic::new("other").unwrap());
        let acl: Acl = LIST.parse().unwrap();
        assert!(acl.may_publish(1000, &kv) && !acl.may_publish(1000, &other) && !acl.may_publish(1001, &kv));
        assert!(Acl::default().may_publish(1001, &kv));
        let (unrestricted, denied) = (Decision::Unrestricted, Decision::Denied);
        assert_eq!(Acl::default().decide("uid:1001", Verb::Publish, &kv), unrestricted);
        assert_eq!(Acl::default().decide("uid:1001", Verb::List, &kv), Decision::OwnUsers);
        assert_eq!(
            acl.decide("uid:1001", Verb::List, &kv),
            Decision::OwnUsers,
            "its line is about publishing"
        );
        let takers: Acl = "uid:1000 subscribe kv/*\n".parse().unwrap();
        assert_eq!(takers.decide("uid:1001", Verb::List, &kv), denied);
        assert!(takers.may_publish(1001, &kv), "its line is about taking");
        let mut cut = Acl::default();
        cut.keep_restriction_of_users(&acl);
        assert!(
            !cut.may_publish(1000, &kv) && !cut.restricts_takers(),
            "removed lines must not let others publish"
        );
        cut.keep_restriction_of_users(&takers);
        assert!(cut.restricts_takers(), "nor let others take");
    }

    #[test]
    fn a_broken_line_is_named() {
        for (text, why) in [
            ("\nkey:a list", "line 2: \"key:a list\" is not"),
            ("key:a read *", "there is no verb \"read\""),
            ("a list *", "\"a\" is not a principal"),
            ("name:a list *", "`dns:`, `uri:`"),
            ("key:a list,publish *", "line 1: key:a cannot be granted list,publish"),
            ("key:a list * *", "is not `PRINCIPAL VERBS TOPICS`"),
        ] {
            let error = text.parse::<Acl>().unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
