//! [`Owner`]: whom a message or a stream of one of several servers is for.

use crate::{reception::SourceOf, sources::Link};
use tensor_relay_protocol::SubscriptionId;

/// Whom a message or a stream is for. A server speaks only for the subscriptions that were requested of it: none may
/// send chunks, manifests or lists of hashes in another one's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    /// A subscription of the user, which is the origin's; or the session.
    User,
    /// This subscription to a further source of a version, for the user's subscription `reception`.
    Source { source: SubscriptionId, reception: SubscriptionId },
    /// A subscription to a further source that has ended, which the source may not know yet.
    Nobody,
}

impl Owner {
    /// The owner of what came over `link` for `subscription`, which is the source `of`, if it is one, and the number of
    /// a subscription of the user, if `is_user`; `None` if the server at `link` must not use this number.
    pub(super) fn of(
        subscription: SubscriptionId,
        link: Link,
        of: Option<&SourceOf>,
        is_user: bool,
    ) -> Option<Self> {
        match of {
            Some(of) if of.link != link => None,
            Some(of) if of.is_left => Some(Self::Nobody),
            Some(of) => Some(Self::Source { source: subscription, reception: of.reception }),
            None if link == Link::Origin => Some(Self::User),
            None if is_user => None,
            None => Some(Self::Nobody),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_speaks_only_for_the_subscriptions_that_were_requested_of_it() {
        let (subscription, reception) = (SubscriptionId(7), SubscriptionId(1));
        let at = |link, is_left| SourceOf { reception, link, is_left };
        let source = Some(Owner::Source { source: subscription, reception });
        let (first, second) = (Link::Other(0), Link::Other(1));
        for (link, of, is_user, owner) in [
            (Link::Origin, None, true, Some(Owner::User)),
            (Link::Origin, None, false, Some(Owner::User)),
            (first, None, true, None),
            (first, None, false, Some(Owner::Nobody)),
            (first, Some(at(first, false)), false, source),
            (first, Some(at(first, true)), false, Some(Owner::Nobody)),
            (second, Some(at(first, false)), false, None),
            (second, Some(at(first, true)), false, None),
            (Link::Origin, Some(at(first, false)), false, None),
            (Link::Origin, Some(at(Link::Origin, false)), false, source),
        ] {
            let found = Owner::of(subscription, link, of.as_ref(), is_user);
            assert_eq!(found, owner, "{link:?} {of:?} {is_user}");
        }
    }
}
