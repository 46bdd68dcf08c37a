use std::sync::Arc;

use super::{inbox::Inbox, options::CudaOptions, stats::Counters};
use crate::id::Id;

/// The settings shared by all parts of the thread.
pub(super) struct Setting {
    pub(super) engine: Id,
    pub(super) options: CudaOptions,
    pub(super) inbox: Inbox,
    pub(super) counters: Arc<Counters>,
}

impl Setting {
    pub(super) fn device(&self) -> String {
        self.inbox.device().into()
    }
}
