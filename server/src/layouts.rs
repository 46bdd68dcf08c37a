//! [`Layouts`]: the manifests of versions that are still in memory, for their successors.

use std::sync::{Arc, Weak};
use tensor_relay_device::Lock;
use tensor_relay_protocol::{LayoutError, Manifest, Metadata, TensorSpec};

/// Finds the manifest of an earlier version with the same tensors: to lay out ten thousand tensors, and to encode and hash
/// their manifest, takes milliseconds. Holds no manifest itself.
#[derive(Debug, Default)]
pub(crate) struct Layouts(Lock<Vec<Layout>>);

/// The manifest of a version. `aliases` are those of its tensors, which the manifest does not name.
#[derive(Debug)]
struct Layout {
    manifest: Weak<Manifest>,
    aliases: Box<[Option<usize>]>,
}

/// The most manifests that are remembered, which bounds a search. Topics of the same tensors share one.
const REMEMBERED_MAX: usize = 64;

impl Layouts {
    /// The manifest of these tensors: that of an earlier version, or a new one by `lay_out`.
    ///
    /// # Errors
    /// That of `lay_out`.
    pub(crate) fn find_or(
        &self,
        specs: Vec<TensorSpec>,
        metadata: Metadata,
        lay_out: impl FnOnce(Vec<TensorSpec>, Metadata) -> Result<Manifest, LayoutError>,
    ) -> Result<Arc<Manifest>, LayoutError> {
        let known = self.0.lock().iter().rev().find_map(|layout| layout.of(&specs, &metadata));
        if let Some(manifest) = known {
            return Ok(manifest);
        }
        let aliases = specs.iter().map(|spec| spec.alias_of).collect();
        let manifest = Arc::new(lay_out(specs, metadata)?);
        let mut layouts = self.0.lock();
        layouts.retain(|layout| layout.manifest.strong_count() > 0);
        if layouts.len() == REMEMBERED_MAX {
            layouts.remove(0);
        }
        layouts.push(Layout { manifest: Arc::downgrade(&manifest), aliases });
        Ok(manifest)
    }
}

impl Layout {
    /// Its manifest, if it is that of these tensors.
    fn of(&self, specs: &[TensorSpec], metadata: &Metadata) -> Option<Arc<Manifest>> {
        let manifest = self.manifest.upgrade().filter(|manifest| manifest.metadata() == metadata)?;
        let is_same = self.aliases.len() == specs.len()
            && manifest
                .tensors()
                .iter()
                .zip(&self.aliases)
                .zip(specs)
                .all(|((tensor, alias), spec)| {
                    let TensorSpec { name, dtype, shape, shard, alias_of } = spec;
                    (&tensor.name, &tensor.dtype, &tensor.shape, &tensor.shard, alias)
                        == (name, dtype, shape, shard, alias_of)
                });
        is_same.then_some(manifest)
    }
}
