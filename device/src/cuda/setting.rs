use std::sync::Arc;

use super::{inbox::Inbox, options::CudaOptions, stats::Counters};
use crate::id::Id;

/// The identity, options, inbox and counters of an engine, shared by all modules of its thread.
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
