//! Handles a client's messages to a subscription, during a transfer and between transfers. Pure.

use tensor_relay_protocol::{
    AbortReason, Credit, EndReason, Epoch, LaneId, ProtocolViolation, RangeSet, SendPlan, Version, VersionId,
};

/// A message of the client to one of its subscriptions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SubscriptionMessage {
    Credit(u32),
    Committed {
        epoch: Epoch,
        version: Version,
        kept: bool,
    },
    Abort(Epoch, Version, AbortReason),
    Acknowledge(Epoch, Version),
    Fetch(Epoch, Version, RangeSet),
    Unsubscribe {
        keep_place: bool,
    },
    /// From the server, not from the client.
    End(EndReason),
}

/// A transfer in progress: its version, and the plan of its sends.
#[derive(Debug)]
pub(crate) struct Transfer {
    epoch: Epoch,
    version: Version,
    pub(crate) plan: SendPlan,
}

/// The effect of a message, for the driver to apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    /// None: the message made no progress.
    None,
    /// The transfer makes progress.
    Progress,
    /// The client acknowledged this version and all before it.
    Acknowledged(Epoch, Version),
    /// The client committed the version; `kept` is whether it keeps a copy as a base.
    Committed { kept: bool },
    /// The client aborted the version, or confirms that the server did.
    Aborted(AbortReason),
    /// The client ended the subscription.
    Unsubscribed { keep_place: bool },
    /// The server ends the subscription.
    Ended(EndReason),
}

impl Transfer {
    pub(crate) fn new(id: &VersionId, plan: SendPlan) -> Self {
        Self { epoch: id.epoch, version: id.version, plan }
    }

    fn has_id(&self, epoch: Epoch, version: Version) -> bool {
        (self.epoch, self.version) == (epoch, version)
    }
}

/// Handles a message of the client; `transfer` is the one in progress, if any.
///
/// # Errors
/// [`ProtocolViolation`] when the message breaks a rule.
pub(crate) fn handle_message(
    message: SubscriptionMessage,
    transfer: Option<&mut Transfer>,
    credit: &mut Credit,
    is_retired: impl Fn(LaneId) -> bool,
) -> Result<Effect, ProtocolViolation> {
    use SubscriptionMessage as Message;
    match (message, transfer) {
        (Message::Credit(chunks), transfer) => {
            credit.grant(chunks)?;
            // Without chunks it says that bytes of the version arrived.
            let is_progress = transfer.is_some_and(|transfer| !transfer.plan.is_given_up());
            Ok(if is_progress { Effect::Progress } else { Effect::None })
        }
        (Message::Acknowledge(epoch, version), _) => Ok(Effect::Acknowledged(epoch, version)),
        (Message::Unsubscribe { keep_place }, _) => Ok(Effect::Unsubscribed { keep_place }),
        (Message::End(reason), _) => Ok(Effect::Ended(reason)),
        // About the previous version, which client and server aborted at the same time.
        (Message::Committed { .. } | Message::Abort(..), None) => Ok(Effect::None),
        (Message::Committed { epoch, version, kept }, Some(transfer)) if transfer.has_id(epoch, version) => {
            match transfer.plan.is_complete() {
                true => Ok(Effect::Committed { kept }),
                false => {
                    let expected = "Complete to be sent first";
                    Err(ProtocolViolation::OutOfTurn { found: "Committed", expected })
                }
            }
        }
        (Message::Abort(epoch, version, reason), Some(transfer)) if transfer.has_id(epoch, version) => {
            Ok(Effect::Aborted(reason))
        }
        (Message::Fetch(epoch, version, chunks), Some(transfer)) if transfer.has_id(epoch, version) => {
            // Only new sends are progress: a client that repeats a `Fetch` is still evicted.
            let is_progress = transfer.plan.handle_fetch(&chunks, is_retired);
            Ok(if is_progress { Effect::Progress } else { Effect::None })
        }
        (
            Message::Committed { epoch, version, .. }
            | Message::Abort(epoch, version, _)
            | Message::Fetch(epoch, version, _),
            _,
        ) => Err(ProtocolViolation::WrongVersion { epoch, version }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use SubscriptionMessage as Message;
    use tensor_relay_protocol::{SendAction, Topic};

    const EPOCH: Epoch = Epoch(7);
    const VERSION: Version = Version(3);

    fn all() -> RangeSet {
        RangeSet::from_range(0..u32::MAX)
    }

    /// A transfer of two chunks, of which the first was begun on lane 1 and the second on lane 0.
    fn begun() -> (Transfer, Credit) {
        let id = VersionId { topic: Topic::new("t").unwrap(), epoch: EPOCH, version: VERSION };
        let mut transfer = Transfer::new(&id, SendPlan::new(RangeSet::from_range(0..2), false));
        let mut credit = Credit::new(2).unwrap();
        transfer.plan.poll(&mut credit, Some(LaneId(1))).unwrap();
        transfer.plan.poll(&mut credit, Some(LaneId(0))).unwrap();
        (transfer, credit)
    }

    /// Handles `message` with lane 1 retired.
    fn handle(
        message: Message,
        (transfer, credit): &mut (Transfer, Credit),
    ) -> Result<Effect, ProtocolViolation> {
        handle_message(message, Some(transfer), credit, |lane| lane == LaneId(1))
    }

    fn handle_idle(message: Message) -> Result<Effect, ProtocolViolation> {
        handle_message(message, None, &mut Credit::default(), |_| true)
    }

    #[test]
    fn a_fetch_restarts_lost_chunks_once() {
        let mut state = begun();
        let fetch = || Message::Fetch(EPOCH, VERSION, all());
        assert_eq!(handle(fetch(), &mut state), Ok(Effect::Progress));
        for _ in 0..3 {
            assert_eq!(handle(fetch(), &mut state), Ok(Effect::None), "repetition is no progress");
        }
        let (transfer, credit) = &mut state;
        let again = transfer.plan.poll(credit, Some(LaneId(0)));
        assert_eq!(again, Some(SendAction::Chunk(tensor_relay_protocol::ChunkIndex(0), LaneId(0))));
        assert_eq!(transfer.plan.poll(credit, Some(LaneId(0))), None);
        assert_eq!(handle(fetch(), &mut state), Ok(Effect::None), "its new lane lives");
    }

    #[test]
    fn a_fetch_of_chunks_not_lost_is_ignored() {
        let mut state = begun();
        for chunks in [RangeSet::new(), RangeSet::from_range(1..2), RangeSet::from_range(2..u32::MAX)] {
            assert_eq!(handle(Message::Fetch(EPOCH, VERSION, chunks), &mut state), Ok(Effect::None));
        }
    }

    #[test]
    fn only_the_version_in_transfer_may_be_named() {
        for (epoch, version) in [(EPOCH, Version(4)), (Epoch(8), VERSION)] {
            let wrong = Err(ProtocolViolation::WrongVersion { epoch, version });
            assert_eq!(handle(Message::Fetch(epoch, version, all()), &mut begun()), wrong);
            assert_eq!(handle(Message::Committed { epoch, version, kept: false }, &mut begun()), wrong);
            assert_eq!(handle(Message::Abort(epoch, version, AbortReason::Stalled), &mut begun()), wrong);
            assert_eq!(
                handle_idle(Message::Fetch(epoch, version, all())),
                wrong,
                "no transfer is in progress"
            );
        }
    }

    #[test]
    fn a_commit_before_complete_is_refused() {
        let mut state = begun();
        let commit = || Message::Committed { epoch: EPOCH, version: VERSION, kept: true };
        assert!(matches!(handle(commit(), &mut state), Err(ProtocolViolation::OutOfTurn { .. })));
        let (transfer, credit) = &mut state;
        (0..2).for_each(|_| transfer.plan.handle_ended());
        assert_eq!(transfer.plan.poll(credit, None), Some(SendAction::Complete));
        assert_eq!(handle(commit(), &mut state), Ok(Effect::Committed { kept: true }));
    }

    #[test]
    fn an_aborted_version_waits_for_the_clients_abort() {
        let mut state = begun();
        state.0.plan.give_up();
        assert_eq!(handle(Message::Credit(4), &mut state), Ok(Effect::None));
        assert_eq!(handle(Message::Fetch(EPOCH, VERSION, all()), &mut state), Ok(Effect::None));
        assert_eq!(
            handle(Message::Acknowledge(EPOCH, VERSION), &mut state),
            Ok(Effect::Acknowledged(EPOCH, VERSION))
        );
        let reason = AbortReason::Withdrawn;
        assert_eq!(handle(Message::Abort(EPOCH, VERSION, reason), &mut state), Ok(Effect::Aborted(reason)));
    }

    #[test]
    fn messages_about_the_previous_version_are_ignored() {
        assert_eq!(handle_idle(Message::Abort(EPOCH, VERSION, AbortReason::Stalled)), Ok(Effect::None));
        let committed = Message::Committed { epoch: EPOCH, version: VERSION, kept: false };
        assert_eq!(handle_idle(committed), Ok(Effect::None));
        assert_eq!(handle_idle(Message::Credit(4)), Ok(Effect::None));
    }

    #[test]
    fn excessive_credit_is_refused() {
        let mut state = begun();
        assert_eq!(handle(Message::Credit(0), &mut state), Ok(Effect::Progress));
        assert_eq!(handle(Message::Credit(1), &mut state), Ok(Effect::Progress));
        let too_much = Message::Credit(Credit::MAX);
        assert!(matches!(handle(too_much, &mut state), Err(ProtocolViolation::CreditOverflow(_))));
    }
}
