//! [`Publishable`]: a version that is laid out and ready to be sent, wherever its bytes are.

use crate::{Borrowed, Staged};
use std::sync::Arc;
use tensor_relay_device::{Charge, Returned};
use tensor_relay_protocol::{Manifest, RelayPath, VersionDigest};
use tensor_relay_transport::egress::{Arrival, Payload};

/// A version that is ready to be published: [`Staged`] or [`Borrowed`].
#[derive(Debug)]
pub struct Publishable {
    pub(crate) payload: Arc<Payload>,
    /// Reports that the producer's memory is no longer used.
    pub(crate) returned: Option<Returned>,
    /// The share of the budget for staged versions that the manifest of another process takes.
    pub(crate) charge: Option<Charge>,
    /// Where it comes from, if it is received from another server.
    pub(crate) relayed: Option<Relayed>,
}

/// Where a version comes from that is received from another server.
#[derive(Debug, Clone)]
pub(crate) struct Relayed {
    /// Which of its chunks are here.
    pub(crate) arrival: Arc<Arrival>,
    /// The relays that it came through, this one included.
    pub(crate) path: RelayPath,
}

impl Publishable {
    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        self.payload.manifest()
    }

    /// The version's digest, if every chunk is hashed.
    pub fn digest(&self) -> Option<VersionDigest> {
        self.payload.digest()
    }
}

impl From<Staged> for Publishable {
    fn from(staged: Staged) -> Self {
        Self { payload: staged.payload.into(), returned: None, charge: None, relayed: None }
    }
}

impl From<Borrowed> for Publishable {
    fn from(borrowed: Borrowed) -> Self {
        let Borrowed { payload, returned } = borrowed;
        Self { payload: payload.into(), returned, charge: None, relayed: None }
    }
}
