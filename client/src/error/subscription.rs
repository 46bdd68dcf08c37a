//! Errors of a subscription.

use super::ClientError;
use std::sync::Arc;
use tensor_relay_protocol::{AbortReason, BoxError, EndReason, Gap, PathError, Topic, Version, VersionId};

/// Why a subscription delivers no snapshot. After a [final](Self::is_final) error, every later call returns a clone,
/// which is cheap.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum SubscriptionError {
    /// The topic did not appear before the timeout. A topic that this client may not see looks the same.
    #[error(
        "no topic {topic} appeared within {timeout_ms} ms: check its name against `tensor-relay list`, or wait longer"
    )]
    NotFound {
        /// The topic.
        topic: Topic,
        /// The time waited.
        timeout_ms: u128,
    },
    /// The version that was requested by its number will not be received.
    #[error("version {version} of {topic} is not kept: {detail}")]
    VersionNotFound {
        /// The topic.
        topic: Topic,
        /// The version.
        version: Version,
        /// Why, as far as it is known.
        detail: String,
    },
    /// The server does not offer a feature that the request needs.
    #[error(
        "the server of {topic} ({agent}) does not offer the feature {feature:?}, which this request needs: update the \
         server"
    )]
    NotSupported {
        /// The topic.
        topic: Topic,
        /// The feature.
        feature: &'static str,
        /// The server's name and version.
        agent: String,
    },
    /// The server aborted the first version that it sent, and no other followed before the timeout.
    #[error(
        "the server aborted {id}: {reason}; no other version was received before or within {timeout_ms} ms: see the \
         server's log"
    )]
    Aborted {
        /// The version.
        id: VersionId,
        /// The reason.
        reason: AbortReason,
        /// The time waited for another one.
        timeout_ms: u128,
    },
    /// The server ended the subscription.
    #[error("the server ended the subscription to {topic}: {reason}")]
    Ended {
        /// The topic.
        topic: Topic,
        /// The reason.
        reason: EndReason,
    },
    /// A relay must not pass the version on.
    #[error("{id} is not relayed: {reason}")]
    NotRelayed {
        /// The version.
        id: VersionId,
        /// Why.
        reason: PathError,
    },
    /// In mode `every`: versions are missing before the next snapshot. Not final: the next call returns that snapshot.
    #[error("{0}")]
    Gap(Box<Gap>),
    /// The user holds the maximum number of snapshots, so the next one cannot be delivered. Not final: drop some and
    /// call again.
    #[error(
        "{} snapshots of {topic} are held (versions {}), and at most {max} may be: drop some, or raise `versions_held_max`; \
         waited {timeout_ms} ms", held.len(), join(held)
    )]
    HoldingTooMany {
        /// The topic.
        topic: Topic,
        /// The held versions, in the order in which they were taken.
        held: Vec<Version>,
        /// The maximum.
        max: usize,
        /// The time waited for one to be dropped.
        timeout_ms: u128,
    },
    /// The session has ended.
    #[error("the subscription to {topic} ended with its connection: {source}")]
    Disconnected {
        /// The topic.
        topic: Topic,
        /// The cause.
        source: Arc<ClientError>,
    },
    /// The received bytes differ from the published ones.
    #[error("{id} arrived damaged and was discarded: {detail}")]
    Corrupt {
        /// The version.
        id: VersionId,
        /// The mismatch.
        detail: String,
    },
    /// A box that was requested does not fit the version. Of the first version of a subscription no chunk was sent.
    #[error(
        "{id} cannot be received as requested: {source}; correct the box, or subscribe again after a change of layout"
    )]
    BoxMisfit {
        /// The version.
        id: VersionId,
        /// The box and its tensor.
        source: BoxError,
    },
    /// There is not enough host memory for a version.
    #[error("{id} does not fit: {detail}; raise the memory budget or drop older snapshots")]
    OverBudget {
        /// The version.
        id: VersionId,
        /// The sizes.
        detail: String,
    },
    /// There is not enough memory for a version on the device that receives versions.
    #[error("{id} does not fit: {detail}; raise the device's memory budget or drop older snapshots")]
    NoRoomOnDevice {
        /// The version.
        id: VersionId,
        /// The device.
        device: Box<str>,
        /// The sizes.
        detail: String,
    },
    /// The device that receives versions failed to receive one. The fault is on this machine, not the server. Not final
    /// if the device may receive later versions.
    #[error("{id} could not be received on {device}, a device of this machine: {detail}")]
    Device {
        /// The version.
        id: VersionId,
        /// The device.
        device: Box<str>,
        /// The cause, and what to do.
        detail: String,
        /// Whether the device can receive no further version.
        is_final: bool,
    },
    /// The transfer of a version stopped midway.
    #[error(
        "{id} stalled: no byte of it was received for {timeout_ms} ms: the server is overloaded, stuck or gone"
    )]
    Stalled {
        /// The version.
        id: VersionId,
        /// The time without a byte.
        timeout_ms: u128,
    },
}

fn join(versions: &[Version]) -> String {
    versions.iter().map(Version::to_string).collect::<Vec<_>>().join(", ")
}

impl SubscriptionError {
    /// Whether the subscription has ended. After an error that is not final, call again.
    pub fn is_final(&self) -> bool {
        !matches!(self, Self::Gap(_) | Self::HoldingTooMany { .. } | Self::Device { is_final: false, .. })
    }

    pub(crate) fn disconnected(topic: &Topic, error: &Arc<ClientError>) -> Self {
        Self::Disconnected { topic: topic.clone(), source: Arc::clone(error) }
    }
}
