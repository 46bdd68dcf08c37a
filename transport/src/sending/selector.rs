//! [`Selector`]: the chunks that a subscription's client selects of each version.

use crate::Workers;
use std::sync::Arc;
use tensor_relay_protocol::{Glob, Manifest, ManifestDigest, RangeSet, Selection, Subscribe};

/// A client's selection.
#[derive(Debug)]
pub struct Selector {
    globs: Vec<Glob>,
    /// The wanted chunks, of those with selected tensors; empty for all.
    within: RangeSet,
    /// Whether the client wants manifests without chunks.
    describes: bool,
    workers: Workers,
    /// The selection for the latest manifest, cached because manifests rarely change.
    latest: Option<(ManifestDigest, Arc<Selection>)>,
}

impl Selector {
    /// The selection of a `subscribe`.
    pub fn new(subscribe: &Subscribe, workers: Workers) -> Self {
        let (globs, within) = (subscribe.selection.clone(), subscribe.within.clone());
        Self { globs, within, describes: subscribe.describe, workers, latest: None }
    }

    /// The client's selection of a version. A worker computes it: matching many globs with many tensors is slow.
    pub(crate) async fn selection(&mut self, manifest: &Arc<Manifest>) -> Arc<Selection> {
        match &self.latest {
            Some((digest, selection)) if *digest == manifest.digest() => Arc::clone(selection),
            _ => {
                let (all, globs, within) = (Arc::clone(manifest), self.globs.clone(), self.within.clone());
                let selection = match globs.is_empty() && within.is_empty() {
                    _ if self.describes => Selection::none(all),
                    true => Selection::all(all),
                    false => self.workers.run(move || Selection::new(all, &globs).within(&within)).await,
                };
                let selection = Arc::new(selection);
                self.latest = Some((manifest.digest(), Arc::clone(&selection)));
                selection
            }
        }
    }
}
