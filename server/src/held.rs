//! What a publisher takes: a version that is laid out and can be sent, wherever its bytes are.

use crate::Staged;
use tensor_relay_device::Returned;
use tensor_relay_transport::egress::Payload;

/// A version that is ready to be published.
#[derive(Debug)]
pub struct Held {
    pub(crate) payload: Payload,
    /// For a version whose bytes somebody wants back.
    pub(crate) returned: Option<Returned>,
}

impl From<Staged> for Held {
    fn from(staged: Staged) -> Self {
        Self { payload: staged.into_payload(), returned: None }
    }
}
