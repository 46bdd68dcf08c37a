//! [`Offer`]: what a topic offers to one subscription.

use crate::{
    client_base::ClientBase,
    places::PlaceName,
    retained::Retained,
    swarm::Sharing,
    topic::{Reader, ReaderState, TopicState},
};
use std::sync::Arc;
use tensor_relay_protocol::{
    Credit, EndReason, Epoch, FeatureSet, Here, Mode, Pick, ProtocolViolation, Published, RangeSet, Sender,
    Seq, Start, Subscribe, Version, Versions,
};
use tensor_relay_transport::sending::Offered;

/// A topic with one client's place in it and the base that the client holds.
#[derive(Debug)]
pub(crate) struct Offer {
    pub(crate) topic: Arc<TopicState>,
    /// The reader, in mode `every`.
    reader: Option<Reader>,
    pub(crate) base: ClientBase,
    /// Its part in swarms, if the client may have one.
    pub(crate) sharing: Option<Sharing>,
    /// Whether the client takes versions in memory, where they must be whole.
    takes_memory: bool,
}

impl Offer {
    /// The offer of `topic` to a client's `subscribe`, who `offered` these features, and the state machine of the
    /// subscription. Reader names are scoped by `owner`.
    ///
    /// # Errors
    /// [`ProtocolViolation`] when the credit is too large.
    pub(crate) fn new(
        topic: &Arc<TopicState>,
        subscribe: &Subscribe,
        offered: FeatureSet,
        owner: &str,
    ) -> Result<(Self, Sender<Arc<Retained>>), ProtocolViolation> {
        Credit::new(subscribe.credit)?; // Before a place is taken over.
        let have = subscribe.have.map(|have| have.key());
        let joined = (subscribe.mode == Mode::Every).then(|| {
            let name = subscribe.reader.clone().map(|name| PlaceName { owner: owner.to_owned(), name });
            Reader::join(Arc::clone(topic), name, have, subscribe.start)
        });
        let (reader, begin, lost_place) = match joined {
            Some((reader, begin, lost_place)) => (Some(reader), begin, lost_place),
            None => (None, Seq::FIRST, None),
        };
        let base = ClientBase::new(topic, subscribe.base.map(|base| base.key()));
        let takes_memory = subscribe.memory && !subscribe.describe;
        let offer = Self { topic: Arc::clone(topic), reader, base, sharing: None, takes_memory };
        if let Start::Exactly(Some(epoch), version) = subscribe.start
            && (subscribe.describe || !subscribe.within.is_empty())
        {
            topic.note_part_read(epoch, version);
        }
        let machine = Sender::new(&offer, subscribe, offered, begin, lost_place)?;
        Ok((offer, machine))
    }

    /// The same offer to a client that takes part in swarms by `sharing`.
    pub(crate) fn with_sharing(self, sharing: Option<Sharing>) -> Self {
        Self { sharing, ..self }
    }

    /// Records the reader's acknowledgement of this version and all before it.
    pub(crate) fn acknowledge(&self, epoch: Epoch, version: Version) {
        if let Some(reader) = &self.reader {
            reader.acknowledge(epoch, version);
        }
    }

    /// Whether the client may be sent this version now.
    fn is_offered(&self, version: &Retained) -> bool {
        !self.takes_memory || version.is_whole()
    }

    /// Releases the place and the base of a client that will not come back for them.
    pub(crate) fn release(&mut self) {
        if let Some(reader) = &mut self.reader {
            reader.release_place();
        }
        self.base.release();
    }
}

impl Versions for Offer {
    type Version = Arc<Retained>;

    fn newest(&self) -> Option<(Seq, Arc<Retained>)> {
        self.topic.current(|version| self.is_offered(version))
    }

    fn first_from(&self, seq: Seq) -> Option<(Seq, Arc<Retained>)> {
        self.topic.first_from(seq).filter(|(_, version)| self.is_offered(version))
    }

    fn find(&self, (epoch, version): (Epoch, Version)) -> Option<(Seq, Arc<Retained>)> {
        self.topic.find(epoch, version)
    }

    fn find_exactly(&self, (epoch, version): (Epoch, Version)) -> Option<Arc<Retained>> {
        self.topic.find_for_parts(epoch, version)
    }

    fn here(&self, version: &Arc<Retained>) -> Here {
        version.arrival().map_or(Here::All, |arrival| arrival.here())
    }

    fn base(&self) -> Option<Arc<Retained>> {
        self.base.retained()
    }

    fn start(&self, start: Start) -> Seq {
        match self.newest().filter(|_| start == Start::Newest) {
            Some((seq, _)) => seq,
            None => self.topic.start_of(None, start),
        }
    }

    fn is_behind(&self, held: (Epoch, Version)) -> bool {
        self.topic.is_behind(held)
    }

    fn ended(&self) -> Option<EndReason> {
        self.topic.ended()
    }

    fn unacknowledged(&self, seq: Seq, given_up: &mut Vec<Seq>) -> usize {
        self.reader.as_ref().map_or(0, |reader| reader.unacknowledged(seq, given_up))
    }

    fn lost_place(&self) -> Option<EndReason> {
        match self.reader.as_ref()?.state() {
            ReaderState::Reading => None,
            ReaderState::Evicted => Some(EndReason::TooSlow),
            ReaderState::Replaced => Some(EndReason::Replaced),
        }
    }

    fn is_shared(&self, version: &Arc<Retained>) -> bool {
        self.sharing.as_ref().is_some_and(|sharing| sharing.is_shared(version))
    }

    fn pick(&self, version: &Arc<Retained>, wanted: &RangeSet) -> Pick {
        let seat = self.sharing.as_ref().and_then(Sharing::seat);
        match seat.filter(|seat| seat.is_in(version.key())) {
            Some(seat) => seat.pick(wanted),
            None => Pick::InOrder,
        }
    }
}

#[cfg(test)]
mod tests;
