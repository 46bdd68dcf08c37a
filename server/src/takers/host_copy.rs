//! [`HostCopy`]: the copy in host memory of a version that lies on a GPU.

use super::{VERSIONS_FREE, made_once::MadeOnce};
use crate::{device, retained::Retained, staged::Staging};
use tensor_relay_device::HostSource;
use tensor_relay_protocol::NotLent;

/// The copy in host memory of a version that lies on a GPU, made when the first client of this host needs it: one that
/// wants the version on another GPU or in host memory, or where the GPU cannot share its memory. It lives as long as
/// the version.
#[derive(Debug, Default)]
pub(super) struct HostCopy(MadeOnce<HostSource>);

impl HostCopy {
    /// The copy of `version`, which is made if there is room for it and for [further versions](VERSIONS_FREE). Others
    /// that ask meanwhile wait for the same copy.
    ///
    /// # Errors
    /// [`NotLent`], for all that waited; the next client tries again.
    pub(super) async fn get(&self, version: &Retained, staging: &Staging) -> Result<&HostSource, NotLent> {
        self.0.get(|| make(version, staging)).await
    }
}

async fn make(version: &Retained, staging: &Staging) -> Result<HostSource, NotLent> {
    let manifest = version.payload.manifest();
    let needed_bytes = manifest.payload_bytes().saturating_mul(1 + VERSIONS_FREE);
    if !staging
        .memory
        .has_room(needed_bytes.saturating_sub(staging.bases.stats().bytes))
    {
        return Err(NotLent::Full);
    }
    match device::copy_to_host(staging, manifest, version.payload.source()).await {
        Ok(region) => Ok(HostSource::of_region(region)),
        Err(error) => {
            tracing::warn!(
                version = %version.id, %error,
                "A version on a GPU cannot be copied to host memory for processes of this host: they receive it in chunks."
            );
            Err(NotLent::NotShareable)
        }
    }
}
