//! [`ClientState`]: the selection of a subscription's client, and the content that the client holds.

use crate::topic::Retained;
use std::sync::Arc;
use tensor_relay_protocol::{Glob, ManifestDigest, Partial, RangeSet, Selection, Subscribe};
use tensor_relay_transport::Workers;

/// A client's selection, and the content that it holds.
#[derive(Debug)]
pub(crate) struct ClientState {
    globs: Vec<Glob>,
    /// The wanted chunks, of those with selected tensors; empty for all.
    within: RangeSet,
    /// The selection for the latest manifest, cached because manifests rarely change.
    selection: Option<(ManifestDigest, Arc<Selection>)>,
    /// The manifest that the client holds.
    manifest: Option<ManifestDigest>,
    partial: Option<Partial>,
}

impl ClientState {
    pub(crate) fn new(subscribe: Subscribe) -> Self {
        let Subscribe { selection: globs, within, manifest, partial, .. } = subscribe;
        Self { globs, within, selection: None, manifest, partial }
    }

    /// The client's selection of `retained`. A worker computes it: matching many globs with many tensors is slow.
    pub(crate) async fn selection(&mut self, retained: &Retained, workers: Workers) -> Arc<Selection> {
        let manifest = retained.payload.manifest();
        match &self.selection {
            Some((digest, selection)) if *digest == manifest.digest() => Arc::clone(selection),
            _ => {
                let (all, globs, within) = (Arc::clone(manifest), self.globs.clone(), self.within.clone());
                let selection = match globs.is_empty() && within.is_empty() {
                    true => Selection::all(all),
                    false => workers.run(move || Selection::new(all, &globs).within(&within)).await,
                };
                let selection = Arc::new(selection);
                self.selection = Some((manifest.digest(), Arc::clone(&selection)));
                selection
            }
        }
    }

    /// Takes the chunks of `retained` that the client holds: the next transfer invalidates them.
    pub(crate) fn take_held(&mut self, retained: &Retained) -> RangeSet {
        let partial = self.partial.take().filter(|partial| is_part_of(partial, retained));
        partial.map_or_else(RangeSet::new, |partial| partial.chunks)
    }

    /// Whether the client holds a part of another version than `retained`.
    pub(crate) fn has_part_of_other_version(&self, retained: &Retained) -> bool {
        self.partial.as_ref().is_some_and(|partial| !is_part_of(partial, retained))
    }

    /// Forgets the part that the client holds: its content differs.
    pub(crate) fn forget_partial(&mut self) {
        self.partial = None;
    }

    pub(crate) fn needs_manifest(&self, retained: &Retained) -> bool {
        self.manifest != Some(retained.payload.manifest().digest())
    }

    pub(crate) fn handle_committed(&mut self, retained: &Retained) {
        self.manifest = Some(retained.payload.manifest().digest());
    }

    /// Handles an aborted version: its manifest may not have arrived either.
    pub(crate) fn handle_given_up(&mut self) {
        self.manifest = None;
    }
}

fn is_part_of(partial: &Partial, retained: &Retained) -> bool {
    (partial.epoch, partial.version) == (retained.id.epoch, retained.id.version)
}
