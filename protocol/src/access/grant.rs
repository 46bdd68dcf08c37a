//! Grants: which verbs a holder may use on which topics.

use crate::{Glob, GlobError, Topic};
use std::{fmt, str::FromStr};

/// An operation on a topic that can be granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verb {
    /// Seeing that the topic exists, in topic lists and in watches.
    List,
    /// Receiving its versions.
    Subscribe,
    /// Publishing versions into it, through a server's publish socket.
    Publish,
}

impl Verb {
    /// All verbs.
    pub const ALL: [Self; 3] = [Self::List, Self::Subscribe, Self::Publish];

    /// The name on the command line and in access files.
    pub fn name(self) -> &'static str {
        match self {
            Self::List => "list",
            Self::Subscribe => "subscribe",
            Self::Publish => "publish",
        }
    }

    fn bit(self) -> u32 {
        match self {
            Self::List => 1,
            Self::Subscribe => 2,
            Self::Publish => 4,
        }
    }
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Verb {
    type Err = GrantError;

    fn from_str(text: &str) -> Result<Self, GrantError> {
        let verb = Self::ALL.into_iter().find(|verb| verb.name() == text);
        verb.ok_or_else(|| GrantError::UnknownVerb(text.into()))
    }
}

/// A set of verbs. In text: `list,subscribe`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Verbs(u32);

impl Verbs {
    /// The verbs of a consumer: `list` and `subscribe`.
    pub const CONSUME: Self = Self(1 | 2);

    /// The set of these verbs.
    pub fn of(verbs: impl IntoIterator<Item = Verb>) -> Self {
        Self(verbs.into_iter().fold(0, |bits, verb| bits | verb.bit()))
    }

    /// Whether `verb` is in the set.
    pub fn contains(self, verb: Verb) -> bool {
        self.0 & verb.bit() != 0
    }

    /// The set with these bits, one per verb. Bits of verbs that only later builds know are dropped.
    pub(super) fn from_bits(bits: u32) -> Self {
        Self(bits & Self::of(Verb::ALL).0)
    }

    pub(super) fn bits(self) -> u32 {
        self.0
    }
}

impl fmt::Display for Verbs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = Verb::ALL
            .into_iter()
            .filter(|verb| self.contains(*verb))
            .map(Verb::name)
            .collect();
        f.write_str(&names.join(","))
    }
}

impl FromStr for Verbs {
    type Err = GrantError;

    fn from_str(text: &str) -> Result<Self, GrantError> {
        let verbs = text
            .split(',')
            .map(|verb| verb.trim().parse())
            .collect::<Result<Vec<Verb>, _>>()?;
        Ok(Self::of(verbs))
    }
}

/// A grant: verbs allowed on the topics that match a glob. An operation without a grant is denied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// The glob that the topics match.
    pub topics: Glob,
    /// The allowed verbs.
    pub verbs: Verbs,
}

impl Grant {
    /// The grant of `verbs` on all topics.
    pub fn everywhere(verbs: Verbs) -> Self {
        Self { topics: Glob::new("**").expect("`**` is a glob"), verbs }
    }

    /// The grant of `verbs` on `topic` alone: a topic contains no wildcard, so as a glob it matches only itself.
    pub fn for_topic(topic: &Topic, verbs: Verbs) -> Self {
        Self { topics: Glob::new(topic.as_str()).expect("a topic is a glob"), verbs }
    }

    /// Whether the grant allows `verb` on `topic`.
    pub fn allows(&self, verb: Verb, topic: &Topic) -> bool {
        self.verbs.contains(verb) && self.topics.matches(topic.as_str())
    }
}

impl fmt::Display for Grant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.verbs, self.topics.as_str())
    }
}

/// Why a text is not a grant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrantError {
    /// An unknown verb.
    #[error("there is no verb {0:?}: the verbs are `list`, `subscribe` and `publish`, separated by `,`")]
    UnknownVerb(String),
    /// The topics are not a valid glob.
    #[error(transparent)]
    Glob(#[from] GlobError),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_without_a_grant_are_denied() {
        let grant =
            Grant { topics: Glob::new("policy/**").unwrap(), verbs: "list,subscribe".parse().unwrap() };
        let (inside, outside) = (Topic::new("policy/a/b").unwrap(), Topic::new("policies").unwrap());
        assert!(grant.allows(Verb::Subscribe, &inside) && grant.allows(Verb::List, &inside));
        assert!(!grant.allows(Verb::Publish, &inside) && !grant.allows(Verb::List, &outside));
        assert_eq!(grant.to_string(), "list,subscribe policy/**");
    }

    #[test]
    fn a_grant_on_a_topic_covers_no_other() {
        let topic = |name| Topic::new(name).unwrap();
        let grant = Grant::for_topic(&topic("a.b"), Verbs::CONSUME);
        assert!(grant.topics.is_literal() && grant.allows(Verb::List, &topic("a.b")));
        assert!(!grant.allows(Verb::List, &topic("acb")) && !grant.allows(Verb::List, &topic("a.b/c")));
        assert!(
            ["a*", "a?", "a/**"].iter().all(|name| Topic::new(name).is_err()),
            "no topic contains a wildcard"
        );
    }

    #[test]
    fn verbs_are_parsed_as_displayed() {
        for text in ["list", "subscribe", "publish", "list,subscribe,publish"] {
            assert_eq!(text.parse::<Verbs>().unwrap().to_string(), text);
        }
        assert_eq!("read".parse::<Verbs>(), Err(GrantError::UnknownVerb("read".into())));
        assert_eq!("".parse::<Verbs>(), Err(GrantError::UnknownVerb(String::new())));
        assert_eq!(Verbs::from_bits(u32::MAX), Verbs::of(Verb::ALL), "bits of unknown verbs are dropped");
    }
}
