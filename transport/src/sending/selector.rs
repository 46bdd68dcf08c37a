//! [`Selector`]: the chunks that a subscription's client selects of each version.

use crate::Workers;
use std::sync::Arc;
use tensor_relay_protocol::{Manifest, ManifestDigest, Selection, Subscribe, Wanted};

/// A client's selection.
#[derive(Debug)]
pub struct Selector {
    wanted: Wanted,
    workers: Workers,
    /// The selection for the latest manifest, cached because manifests rarely change.
    latest: Option<(ManifestDigest, Arc<Selection>)>,
}

impl Selector {
    /// The selection of a `subscribe`.
    pub fn new(subscribe: &Subscribe, workers: Workers) -> Self {
        Self { wanted: Wanted::from(subscribe), workers, latest: None }
    }

    /// The client's selection of a version. A worker computes it: matching many globs with many tensors is slow.
    pub(crate) async fn selection(&mut self, manifest: &Arc<Manifest>) -> Arc<Selection> {
        match &self.latest {
            Some((digest, selection)) if *digest == manifest.digest() => Arc::clone(selection),
            _ => {
                let (all, wanted) = (Arc::clone(manifest), self.wanted.clone());
                let selection = match wanted.is_simple() {
                    true => wanted.selection(all),
                    false => self.workers.run(move || wanted.selection(all)).await,
                };
                let selection = Arc::new(selection);
                self.latest = Some((manifest.digest(), Arc::clone(&selection)));
                selection
            }
        }
    }
}
