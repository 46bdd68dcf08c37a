//! [`SourceTable`]: the subscriptions to further sources of the versions in transfer, and whom their messages are for.

use crate::other_servers::{Link, is_to_source};
use std::collections::BTreeMap;
use tensor_relay_protocol::{ProtocolViolation, SubscriptionId};

/// The subscriptions of a session to further sources. Pure.
#[derive(Debug, Default)]
pub(crate) struct SourceTable(BTreeMap<SubscriptionId, Source>);

/// A subscription to a further source of the version in transfer.
#[derive(Debug, Clone, Copy)]
struct Source {
    /// The user's subscription.
    reception: SubscriptionId,
    /// The connection to the source. It is the origin's once the source has become the origin.
    link: Link,
    /// Whether it was left or has ended. It is not asked again for this version, and chunks that it had begun may arrive.
    is_left: bool,
}

/// Whom a message or a stream is for. A server speaks only for the subscriptions that were requested of it: none may
/// send chunks, manifests or lists of hashes in another one's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    /// A subscription of the user, which is the origin's; or the session.
    User,
    /// This subscription to a further source of a version, for the user's subscription `reception`.
    Source { source: SubscriptionId, reception: SubscriptionId },
    /// A subscription that has ended, which the server may not know yet.
    Nobody,
}

impl SourceTable {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds the subscription `source` on `link`, for the current version of the user's subscription `reception`.
    pub(crate) fn insert(&mut self, source: SubscriptionId, reception: SubscriptionId, link: Link) {
        self.0.insert(source, Source { reception, link, is_left: false });
    }

    pub(crate) fn remove(&mut self, source: SubscriptionId) {
        self.0.remove(&source);
    }

    /// Records that a source was left or has ended, while chunks of it may still arrive.
    pub(crate) fn leave(&mut self, source: SubscriptionId) {
        if let Some(source) = self.0.get_mut(&source) {
            source.is_left = true;
        }
    }

    /// Forgets the sources of a reception's earlier version.
    pub(crate) fn end_version(&mut self, reception: SubscriptionId) {
        self.0.retain(|_, source| source.reception != reception);
    }

    /// Handles the loss of a connection. Returns the sources on it, with their receptions.
    pub(crate) fn take_lost(&mut self, link: Link) -> Vec<(SubscriptionId, SubscriptionId)> {
        let lost = self.0.extract_if(.., |_, source| source.link == link);
        lost.map(|(id, source)| (id, source.reception)).collect()
    }

    /// Removes the sources whose receptions have ended. Returns them with their connections.
    pub(crate) fn take_orphans(
        &mut self,
        is_ended: impl Fn(SubscriptionId) -> bool,
    ) -> Vec<(SubscriptionId, Link)> {
        let orphans = self.0.extract_if(.., |_, source| is_ended(source.reception));
        orphans.map(|(id, source)| (id, source.link)).collect()
    }

    /// Handles the change of the origin to the server that had this index.
    pub(crate) fn handle_promoted(&mut self, index: usize) {
        let promoted = self.0.values_mut().filter(|source| source.link == Link::Other(index));
        promoted.for_each(|source| source.link = Link::Origin);
    }

    /// The connection to a source.
    pub(crate) fn link(&self, source: SubscriptionId) -> Option<Link> {
        self.0.get(&source).map(|source| source.link)
    }

    /// Whether the server at `link` was asked for the current version of a reception.
    pub(crate) fn is_asked(&self, reception: SubscriptionId, link: Link) -> bool {
        let mut asked = self.0.values();
        asked.any(|source| source.reception == reception && source.link == link)
    }

    /// The sources on a connection that were not left, with their receptions.
    pub(crate) fn used(&self, link: Link) -> impl Iterator<Item = (SubscriptionId, SubscriptionId)> + '_ {
        let used = self.0.iter().filter(move |(_, source)| source.link == link && !source.is_left);
        used.map(|(id, source)| (*id, source.reception))
    }

    /// The other servers that were asked for a version.
    pub(crate) fn servers(&self) -> Vec<usize> {
        let links = self.0.values().filter_map(|source| match source.link {
            Link::Other(index) => Some(index),
            Link::Origin => None,
        });
        links.collect()
    }

    /// Whom what came over `link` for `subscription` is for. The user's subscriptions so far have the numbers below
    /// `next_user`; `is_user` says whether this is one that has not ended.
    ///
    /// # Errors
    /// [`ProtocolViolation::UnknownSubscription`] when it was not requested of the server at `link`.
    pub(crate) fn owner(
        &self,
        subscription: SubscriptionId,
        link: Link,
        next_user: u32,
        is_user: bool,
    ) -> Result<Owner, ProtocolViolation> {
        let is_ended = match self.0.get(&subscription) {
            Some(source) if source.link == link && !source.is_left => {
                return Ok(Owner::Source { source: subscription, reception: source.reception });
            }
            Some(source) => source.link == link,
            None if is_to_source(subscription) => true,
            None if !(1..next_user).contains(&subscription.0) => false,
            None if link == Link::Origin => return Ok(Owner::User),
            None => !is_user,
        };
        match is_ended {
            true => Ok(Owner::Nobody),
            false => Err(ProtocolViolation::UnknownSubscription(subscription)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Link = Link::Other(0);
    const SECOND: Link = Link::Other(1);

    const fn id(number: u32) -> SubscriptionId {
        SubscriptionId(number)
    }

    /// Two receptions, 1 and 2. The first has a source at both other servers, of which the second was left.
    fn table() -> SourceTable {
        let mut table = SourceTable::default();
        table.insert(id(1 << 27), id(1), FIRST);
        table.insert(id(1 << 28), id(1), SECOND);
        table.insert(id((1 << 27) + 1), id(2), FIRST);
        table.leave(id(1 << 28));
        table
    }

    fn sorted<T: Ord>(items: impl IntoIterator<Item = T>) -> Vec<T> {
        let mut items: Vec<_> = items.into_iter().collect();
        items.sort();
        items
    }

    #[test]
    fn a_server_speaks_only_for_the_subscriptions_that_were_requested_of_it() {
        let (mut table, ended) = (table(), id((1 << 28) + 7));
        let source = Ok(Owner::Source { source: id(1 << 27), reception: id(1) });
        let refused = |number| Err(ProtocolViolation::UnknownSubscription(id(number)));
        let nobody = Ok(Owner::Nobody);
        for (number, link, is_user, owner) in [
            (id(1), Link::Origin, true, Ok(Owner::User)),
            (id(2), Link::Origin, false, Ok(Owner::User)),
            (id(3), Link::Origin, false, refused(3)),
            (id(0), Link::Origin, false, refused(0)),
            (id(1), FIRST, true, refused(1)),
            (id(2), FIRST, false, nobody.clone()),
            (id(3), FIRST, false, refused(3)),
            (id(1 << 27), FIRST, false, source.clone()),
            (id(1 << 27), SECOND, false, refused(1 << 27)),
            (id(1 << 27), Link::Origin, false, refused(1 << 27)),
            (id(1 << 28), SECOND, false, nobody.clone()),
            (id(1 << 28), FIRST, false, refused(1 << 28)),
            (ended, SECOND, false, nobody),
        ] {
            assert_eq!(table.owner(number, link, 3, is_user), owner, "{number:?} {link:?} {is_user}");
        }
        table.handle_promoted(0);
        assert_eq!(table.owner(id(1 << 27), Link::Origin, 3, false), source);
        assert_eq!(table.owner(id(1 << 27), FIRST, 3, false), refused(1 << 27));
    }

    #[test]
    fn a_source_that_was_left_is_not_asked_again() {
        let mut table = table();
        assert_eq!([FIRST, SECOND].map(|link| table.is_asked(id(1), link)), [true, true]);
        assert_eq!([FIRST, SECOND].map(|link| table.is_asked(id(2), link)), [true, false]);
        assert_eq!(sorted(table.used(FIRST)), [(id(1 << 27), id(1)), (id((1 << 27) + 1), id(2))]);
        assert_eq!(sorted(table.used(SECOND)), []);
        assert_eq!(table.link(id(1 << 28)), Some(SECOND), "its chunks may still arrive");
        table.remove(id(1 << 28));
        assert!(!table.is_asked(id(1), SECOND), "it may have the version now");
        table.end_version(id(1));
        assert_eq!(sorted(table.servers()), [0], "the other reception's");
    }

    #[test]
    fn sources_end_with_their_connection_and_with_their_reception() {
        let mut lost = table();
        assert_eq!(sorted(lost.take_lost(FIRST)), [(id(1 << 27), id(1)), (id((1 << 27) + 1), id(2))]);
        assert_eq!((sorted(lost.servers()), lost.take_lost(FIRST)), (vec![1], vec![]));
        let mut orphaned = table();
        let orphans = orphaned.take_orphans(|reception| reception == id(1));
        assert_eq!(sorted(orphans.iter().map(|(source, _)| *source)), [id(1 << 27), id(1 << 28)]);
        assert!(orphans.contains(&(id(1 << 28), SECOND)) && !orphaned.is_empty());
    }
}
