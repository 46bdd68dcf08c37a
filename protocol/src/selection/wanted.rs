//! What a subscription wants of every version.

use super::Selection;
use crate::{Glob, Manifest, RangeSet, Subscribe, TensorBox};
use std::sync::Arc;

/// What a subscription wants of every version: the fields of its `Subscribe` that select.
#[derive(Debug, Clone, Default)]
pub struct Wanted {
    globs: Vec<Glob>,
    boxes: Vec<TensorBox>,
    /// The wanted chunks, of those with selected tensors; empty for all.
    within: RangeSet,
    /// Whether manifests are wanted without chunks.
    describes: bool,
}

impl From<&Subscribe> for Wanted {
    fn from(subscribe: &Subscribe) -> Self {
        let Subscribe { selection, boxes, within, describe, .. } = subscribe;
        let (globs, boxes, within) = (selection.clone(), boxes.clone(), within.clone());
        Self { globs, boxes, within, describes: *describe }
    }
}

impl Wanted {
    /// Whether the selection of a version is all or nothing of it, which takes no time worth mentioning.
    pub fn is_simple(&self) -> bool {
        self.describes || self.globs.is_empty() && self.boxes.is_empty() && self.within.is_empty()
    }

    /// The selection of a version with this manifest. With boxes, takes a few steps for each of their chunks too; see
    /// [`Selection::new`].
    pub fn selection(&self, manifest: Arc<Manifest>) -> Selection {
        match self.describes {
            true => Selection::none(manifest),
            false => Selection::new(manifest, &self.globs).cut(&self.boxes).within(&self.within),
        }
    }
}
