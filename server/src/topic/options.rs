//! A publisher's options for its topic.

use crate::{Keep, config::DEADLINE_MAX};
use std::time::Duration;
use tensor_relay_protocol::CodecChoice;

/// How a topic treats its versions and its readers. Each publisher brings its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopicOptions {
    /// How much is retained for late subscribers and for readers in mode `every`. Default: the newest version.
    pub keep: Keep,
    /// The policy when retention is full of versions that a reader in mode `every` has not acknowledged.
    pub when_full: WhenFull,
    /// How long `publish` waits for readers before [`WhenFull`] decides. Default 10 s.
    pub publish_timeout: Duration,
    /// How long a version that left retention may be read by those who are at it; then they are cut off, and told.
    /// Default: ten minutes for staged versions, ten seconds for borrowed ones, whose producer waits.
    pub release_timeout: Option<Duration>,
    /// How many versions that left retention are kept at most, while subscribers hold copies of them: what is published then
    /// travels as deltas against these. Default 2: the version that most have, and the one that some are getting. Each takes
    /// its payload's memory, within [`Config::base_bytes`](crate::Config::base_bytes). Where all
    /// subscribers are lost they stay for those to come back, until the next publish after
    /// [`Config::reader_linger`](crate::Config::reader_linger). With 0, every version travels whole: for topics of one version.
    pub bases: u32,
    /// How its chunks are encoded, unless a subscriber wants it otherwise. Default: as
    /// [`Config::codec`](crate::Config::codec) says.
    pub codec: Option<CodecChoice>,
    /// After how long without a publish the topic ends by itself. Default: never.
    pub expire_after: Option<Duration>,
}

/// What `publish` does when it has waited for readers as long as it may.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhenFull {
    /// Evicts the blocking readers. They are told, and it is counted.
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
    pub(crate) fn within_reason(self) -> Self {
        Self {
            publish_timeout: self.publish_timeout.min(DEADLINE_MAX),
            release_timeout: self.release_timeout.map(|timeout| timeout.min(DEADLINE_MAX)),
            expire_after: self.expire_after.map(|after| after.min(DEADLINE_MAX)),
            ..self
        }
    }
}
