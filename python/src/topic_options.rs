//! The topic options of `Relay.open`, converted from Python.

use crate::{
    errors::Kind,
    range::at_least,
    wait::{finite_seconds, seconds},
};
use pyo3::prelude::*;
use tensor_relay_server::{Keep, TopicOptions, WhenFull};

/// The arguments of `Relay.open`.
pub(crate) struct TopicArguments<'a> {
    pub(crate) keep_versions: u32,
    pub(crate) keep_bytes: Option<u64>,
    pub(crate) when_full: &'a str,
    pub(crate) publish_timeout: f64,
    pub(crate) release_timeout: Option<f64>,
    pub(crate) expire_after: Option<f64>,
}

impl TopicArguments<'_> {
    pub(crate) fn options(&self, py: Python<'_>) -> PyResult<TopicOptions> {
        let when_full = match self.when_full {
            "evict" => WhenFull::Evict,
            "block" => WhenFull::Block,
            other => {
                return Err(Kind::Request
                    .raise(py, format!("when_full is {other:?}, but must be \"evict\" or \"block\"")));
            }
        };
        Ok(TopicOptions {
            keep: Keep {
                versions: at_least(py, "keep_versions", self.keep_versions, 1)?,
                bytes: self.keep_bytes.unwrap_or(u64::MAX),
            },
            when_full,
            publish_timeout: finite_seconds("publish_timeout", self.publish_timeout)?,
            release_timeout: seconds("release_timeout", self.release_timeout)?,
            expire_after: seconds("expire_after", self.expire_after)?,
            ..TopicOptions::default()
        })
    }
}
