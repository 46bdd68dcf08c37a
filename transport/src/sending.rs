//! The sending side of a subscription: a [`Delivery`] executes the decisions of a
//! [`Sender`](tensor_relay_protocol::Sender) for a [`Host`], which offers the versions. It sends over the [`Lanes`] of a
//! session, with what all subscriptions of the process share ([`Egress`](crate::egress::Egress)).

mod comparison;
mod delivery;
mod effort;
mod held_report;
mod host;
mod lanes;
mod selector;
mod sent_chunks;
mod source_watch;
mod stall;
mod version_sends;

pub use delivery::Delivery;
pub use effort::{EffortMeter, EffortMeters};
pub use host::{DeltaBase, Host, Input, Loan, Offered};
pub use lanes::{JoinRefused, Lanes, LiveLane, Silence};
pub use selector::Selector;
pub use sent_chunks::SentChunks;
pub use version_sends::{Coding, Route};
