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
                    let TensorSpec { name, dtype, shape, shard, alias_of, cuts } = spec;
                    (&tensor.name, &tensor.dtype, &tensor.shape, &tensor.shard, alias)
                        == (name, dtype, shape, shard, alias_of)
                        && (alias.is_some() || tensor.cuts() == cuts)
                });
        is_same.then_some(manifest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor_relay_protocol::{Cuts, Dtype, Limits, Shape, TensorName};

    fn spec(name: &str, elements: u64) -> TensorSpec {
        TensorSpec::new(TensorName::new(name).unwrap(), Dtype::U8, Shape::new(&[elements]).unwrap())
    }

    fn find(layouts: &Layouts, specs: &[TensorSpec], metadata: Metadata) -> (Arc<Manifest>, bool) {
        let mut is_new = false;
        let manifest = layouts.find_or(specs.to_vec(), metadata, |specs, metadata| {
            is_new = true;
            Manifest::layout(specs, metadata, 1024, &Limits::default())
        });
        (manifest.unwrap(), is_new)
    }

    #[test]
    fn only_equal_tensors_share_a_manifest() {
        let layouts = Layouts::default();
        let specs = [spec("a", 8), spec("b", 8), spec("none", 0)];
        let (first, _) = find(&layouts, &specs, vec![]);
        let (second, is_new) = find(&layouts, &specs, vec![]);
        assert!(Arc::ptr_eq(&first, &second) && !is_new);
        let with = |change: fn(&mut Vec<TensorSpec>)| {
            let mut specs = specs.to_vec();
            change(&mut specs);
            specs
        };
        let changed = [
            with(|specs| specs[0].name = TensorName::new("c").unwrap()),
            with(|specs| specs[0].dtype = Dtype::I8),
            with(|specs| specs[0].shape = Shape::new(&[2, 4]).unwrap()),
            with(|specs| specs[1].alias_of = Some(0)),
            with(|specs| specs[1].cuts = Cuts::equal(0, 8, 2)),
            with(|specs| specs.swap(0, 1)),
            with(|specs| specs.truncate(2)),
            with(|specs| specs.push(spec("d", 1))),
        ];
        for specs in changed {
            let (manifest, is_new) = find(&layouts, &specs, vec![]);
            assert!(is_new && manifest != first, "{specs:?}");
        }
        assert!(find(&layouts, &specs, vec![("key".into(), "value".into())]).1);
    }

    #[test]
    fn manifests_are_not_kept() {
        let layouts = Layouts::default();
        let held: Vec<_> = (0..=REMEMBERED_MAX)
            .map(|i| find(&layouts, &[spec(&i.to_string(), 1)], vec![]))
            .collect();
        assert_eq!(layouts.0.lock().len(), REMEMBERED_MAX);
        assert!(!find(&layouts, &[spec("1", 1)], vec![]).1);
        assert!(find(&layouts, &[spec("0", 1)], vec![]).1, "the oldest was forgotten");
        drop(held);
        assert!(find(&layouts, &[spec("1", 1)], vec![]).1);
        assert_eq!(layouts.0.lock().len(), 1);
    }
}
