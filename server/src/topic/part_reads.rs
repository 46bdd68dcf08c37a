//! [`PartReads`]: the version of a topic that is read in parts, which stays for its readers when it leaves retention.

use crate::retained::Retained;
use std::{
    sync::{Arc, Weak},
    time::Duration,
};
use tokio::time::Instant;

/// By how much longer than a pause between two parts the transfers of a version that left retention may take. So versions
/// in borrowed memory, whose publisher waits for it, stay for half a second by default.
const TRANSFERS_PER_PAUSE: u32 = 20;

/// The version that is read in parts. Others are read only while they are retained, so that the memory of a topic grows by
/// one version at most, however many are read.
#[derive(Debug, Default)]
pub(super) struct PartReads(Option<PartRead>);

#[derive(Debug)]
struct PartRead {
    version: Weak<Retained>,
    /// When its readers count as gone.
    until: Instant,
    /// The version, once it left retention.
    kept: Option<Arc<Retained>>,
}

impl PartReads {
    /// Notes that a part of `version` is requested: it stays for `pause`, or a twentieth of its release timeout. Returns
    /// when to call [`expire`](Self::expire), unless it was returned before.
    pub(super) fn note(&mut self, version: &Arc<Retained>, pause: Duration, now: Instant) -> Option<Instant> {
        let until = now + pause.min(version.release_timeout / TRANSFERS_PER_PAUSE);
        let until = version.abort_at.borrow().map_or(until, |abort_at| until.min(abort_at));
        match &mut self.0 {
            Some(read) if read.version.as_ptr() == Arc::as_ptr(version) => read.until = until,
            Some(read) if read.kept.is_some() => {} // Its readers have nothing else; this one's have retention.
            Some(read) => *read = PartRead { version: Arc::downgrade(version), until, kept: None },
            None => {
                self.0 = Some(PartRead { version: Arc::downgrade(version), until, kept: None });
                return Some(until);
            }
        }
        None
    }

    /// Notes that a version left retention.
    pub(super) fn handle_left(&mut self, version: &Arc<Retained>) {
        if let Some(read) = self.0.as_mut().filter(|read| read.version.as_ptr() == Arc::as_ptr(version)) {
            read.kept = Some(Arc::clone(version));
        }
    }

    /// The version that left retention and is still read, and can be.
    pub(super) fn kept(&self) -> Option<&Arc<Retained>> {
        self.0.as_ref()?.kept.as_ref().filter(|kept| kept.failure.get().is_none())
    }

    /// Forgets the version if its readers are gone. Returns when to check again; `None` if that is not necessary. The caller
    /// drops the version outside of locks.
    pub(super) fn expire(&mut self, now: Instant) -> (Option<Instant>, Option<Arc<Retained>>) {
        match &self.0 {
            Some(read) if now < read.until => (Some(read.until), None),
            _ => (None, self.forget()),
        }
    }

    /// Forgets the version.
    pub(super) fn forget(&mut self) -> Option<Arc<Retained>> {
        self.0.take()?.kept
    }
}
