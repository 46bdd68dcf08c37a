//! What a publisher takes: a version that is laid out and can be sent, wherever its bytes are.

use crate::{Borrowed, Staged};
use tensor_relay_device::Returned;
use tensor_relay_protocol::{Manifest, VersionDigest};
use tensor_relay_transport::egress::Payload;

/// A version that is ready to be published: [`Staged`] or [`Borrowed`].
#[derive(Debug)]
pub struct Publishable {
    pub(crate) payload: Payload,
    /// A version whose producer waits for its memory.
    pub(crate) returned: Option<Returned>,
}

impl Publishable {
    /// What it holds.
    pub fn manifest(&self) -> &Manifest {
        self.payload.manifest()
    }

    /// What the version is, if every chunk was hashed already.
    pub fn digest(&self) -> Option<VersionDigest> {
        self.payload.digest()
    }
}

impl From<Staged> for Publishable {
    fn from(staged: Staged) -> Self {
        Self { payload: staged.into_payload(), returned: None }
    }
}

impl From<Borrowed> for Publishable {
    fn from(borrowed: Borrowed) -> Self {
        let Borrowed { payload, returned } = borrowed;
        Self { payload, returned }
    }
}
