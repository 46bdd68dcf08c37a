//! A publisher's options for its topic.

use crate::{Keep, config::TIMEOUT_MAX};
use std::time::Duration;
use tensor_relay_protocol::CodecChoice;

/// The options of a topic: retention, readers, bases, codec. Each publisher sets them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopicOptions {
    /// The limits of retention for late subscribers and for readers in mode `every`. Default: the newest version.
    pub keep: Keep,
    /// The policy when retention is full of versions that a reader in mode `every` has not acknowledged. Default:
    /// [`WhenFull::Evict`].
    pub when_full: WhenFull,
    /// The time that `publish` waits for readers before [`WhenFull`] decides. Default 10 s.
    pub publish_timeout: Duration,
    /// The time that transfers of a version have to finish after it left retention; then they are aborted. Default: ten
    /// seconds if the producer waits for its memory ([`Publication::released`](crate::Publication::released)), else ten
    /// minutes.
    pub release_timeout: Option<Duration>,
    /// The maximum number of bases that left retention. They stay while subscribers hold copies of them, and later
    /// versions are sent as deltas against them. Default 2: the version that most subscribers have, and the one that
    /// some are receiving. Each takes its payload's memory, within [`Config::base_bytes`](crate::Config::base_bytes).
    /// When all subscribers are lost, bases stay for them for [`Config::reader_linger`](crate::Config::reader_linger).
    /// With 0, no version is sent as deltas: for topics with one version.
    pub bases: u32,
    /// The codec of its chunks, unless a subscriber chooses another. Default:
    /// [`Config::codec`](crate::Config::codec).
    pub codec: Option<CodecChoice>,
    /// The time without a publish after which the topic expires. Default: never.
    pub expire_after: Option<Duration>,
}

/// The action of `publish` after it has waited for readers for `publish_timeout`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhenFull {
    /// Evicts the blocking readers, informs them, and counts them.
    Evict,
    /// Keeps waiting without a deadline.
    Block,
}

impl Default for TopicOptions {
    fn default() -> Self {
        Self {
            keep: Keep::default(),
            when_full: WhenFull::Evict,
            publish_timeout: Duration::from_secs(10),
            release_timeout: None,
            bases: 2,
            codec: None,
            expire_after: None,
        }
    }
}

impl TopicOptions {
    /// The options clamped to valid deadlines.
    pub(crate) fn clamped(self) -> Self {
        Self {
            publish_timeout: self.publish_timeout.min(TIMEOUT_MAX),
            release_timeout: self.release_timeout.map(|timeout| timeout.min(TIMEOUT_MAX)),
            expire_after: self.expire_after.map(|after| after.min(TIMEOUT_MAX)),
            ..self
        }
    }
}
