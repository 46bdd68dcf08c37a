//! `tensor_relay.TopicInfo`: a server's description of a topic.

use pyo3::prelude::*;
use tensor_relay_client::TopicEntry;

/// A topic of a server, with its newest version.
#[pyclass(frozen, get_all, module = "tensor_relay")]
pub(crate) struct TopicInfo {
    /// The topic's name.
    topic: String,
    /// The number of its newest version.
    version: u64,
    /// The epoch of that version.
    epoch: String,
    /// The number of tensors of that version.
    tensors: u64,
    /// The size of those tensors in bytes, including padding.
    payload_bytes: u64,
    /// The number of subscriptions to the topic.
    subscribers: u64,
}

#[pymethods]
impl TopicInfo {
    fn __repr__(&self) -> String {
        let Self { topic, version, epoch, tensors, payload_bytes, .. } = self;
        format!(
            "TopicInfo({topic} version {version} (epoch {epoch}), {tensors} tensors, {payload_bytes} bytes)"
        )
    }
}

impl TopicInfo {
    pub(crate) fn of(entry: TopicEntry) -> Self {
        Self {
            topic: entry.id.topic.to_string(),
            version: entry.id.version.0,
            epoch: entry.id.epoch.to_string(),
            tensors: entry.tensors,
            payload_bytes: entry.payload_bytes,
            subscribers: entry.subscribers,
        }
    }
}
